"""Fuzzes the safetensors header reader: `fuzz_safetensors_header.py SECONDS [SEED]`.

Any file gives tensors inside it, or a CheckpointError.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from dflash_moe.errors import CheckpointError
from dflash_moe.model.formats.safetensors_header import read_header
from tests.fuzz.header_mutations import corpus, run

NAME = "fuzz_safetensors_header"


def examine(path: Path) -> str | None:
    """What is wrong with how this file is read; None when nothing is."""
    try:
        tensors = read_header(path, 0)
    except CheckpointError as error:
        return None if str(path) in str(error) else f"the error does not name the file: {error}"
    except Exception as error:  # noqa: BLE001 - any other exception is the finding
        return f"raised {type(error).__name__}: {error}"
    size = path.stat().st_size
    ends = 8
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        name.encode()  # names go into fingerprints
        if not info.num_bytes:
            continue
        if info.offset < ends or info.offset + info.num_bytes > size:
            return f"tensor {name!r} lies at {info.offset} + {info.num_bytes}, after {ends}, file {size}"
        ends = info.offset + info.num_bytes
    return None


if __name__ == "__main__":
    inputs = [path.read_bytes() for path in corpus(NAME)]
    sys.exit(run(NAME, inputs, examine, float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns() % 2**32))
