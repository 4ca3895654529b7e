"""Prompts and topologies of the tests within a vLLM.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import random

TWO_WORKERS = """version: 1
workers:
  - {name: w0, backend: cpu, threads: 1}
  - {name: w1, backend: cpu, threads: 1}
"""


def prompts(count: int, *, length: int = 24, seed: int = 0) -> list[list[int]]:
    """Returns prompts of different lengths up to `length`, which come into one batch."""
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(draw.randrange(1, length + 1))] for _ in range(count)]
