"""Mutates inputs for the fuzz targets of checkpoint headers, runs a target in a loop and keeps what
it finds.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import hashlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FINDINGS = ROOT / "build/fuzz/findings"
MAX_INPUT = 1 << 14
_EDGES = (0, 1, 2, 7, 8, 9, 31, 39, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)

# Says what is wrong with how the reader takes this file, or None when nothing is.
Examine = Callable[[Path], "str | None"]


def corpus(name: str) -> list[Path]:
    """Returns the committed inputs of a target, sorted by name."""
    return sorted((ROOT / "tests/fuzz/corpus" / name).iterdir())


def mutate(data: bytes, random_: random.Random) -> bytes:
    """Returns the input after one to four changes: a bit is flipped, a number gets an edge value,
    or bytes are cut, inserted, repeated or copied.
    """
    changed = bytearray(data)
    for _ in range(random_.randrange(1, 5)):
        at = random_.randrange(len(changed) + 1)
        choice = random_.randrange(6)
        if choice == 0 and at < len(changed):
            changed[at] ^= 1 << random_.randrange(8)
        elif choice == 1:
            width = random_.choice((1, 2, 4, 8))
            value = random_.choice(_EDGES) % (1 << 8 * width)
            changed[at : at + width] = value.to_bytes(width, "little")
        elif choice == 2:
            del changed[at : at + random_.randrange(1, 33)]
        elif choice == 3:
            changed[at:at] = random_.randbytes(random_.randrange(1, 9))
        elif choice == 4:
            end = at + random_.randrange(1, 65)
            changed[at:at] = changed[at:end] * random_.randrange(1, 4)
        else:
            other = random_.randrange(len(changed) + 1)
            changed[at : at + 8] = changed[other : other + 8]
    return bytes(changed[:MAX_INPUT])


def run(name: str, seeds: Sequence[bytes], examine: Examine, limit_s: float, seed: int) -> int:
    """Mutates `seeds` for `limit_s` seconds. The first finding is kept below FINDINGS and ends the
    run with exit status 1.
    """
    random_ = random.Random(seed)
    inputs = list(seeds)
    num_executed = 0
    end = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        while time.monotonic() < end:
            data = mutate(random_.choice(inputs), random_)
            path.write_bytes(data)
            num_executed += 1
            problem = examine(path)
            if problem:
                FINDINGS.mkdir(parents=True, exist_ok=True)
                kept = FINDINGS / f"{name}-{hashlib.sha256(data).hexdigest()[:16]}"
                kept.write_bytes(data)
                print(f"{problem}\nseed {seed}, input {num_executed}, kept in {kept.name}", file=sys.stderr)
                return 1
            if len(inputs) < 2048 and random_.random() < 0.02:
                inputs.append(data)
    print(f"{num_executed} inputs for {name}, seed {seed}, no finding")
    return 0
