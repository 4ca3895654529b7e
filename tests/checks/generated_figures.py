"""Checks that the figures of recorded results in the documents are those that `python -m
bench.documents` writes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

from bench.documents.markup import findings


def find(root: Path) -> list[str]:
    """Returns what `bench.documents.markup.findings` finds."""
    return findings(root)
