"""Parity of every required family, f32 and bf16, over two worker processes and shared memory; one
JSON.

    python -m bench.campaigns.verify_families [--families NAME,...] \
        [--json bench/results/verify_families.json]

Tiny random checkpoints are made in a temporary directory. Exit code 1 when a bound is exceeded.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bench.campaigns.harness import command_line
from dflash_moe.bench.results import BenchResult
from dflash_moe.cli import options
from dflash_moe.topology import Topology


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    parser = command_line(__doc__, "verify_families")
    parser.add_argument("--families", default="", help="comma-separated [the required ones]")
    arguments = parser.parse_args()
    topology = Topology.local(2)
    options.prepare_host(topology)  # before torch is imported
    from bench.models.families import REQUIRED, tiny_options
    from dflash_moe.model.make import make_checkpoint
    from dflash_moe.proofs.verify import verify

    families = arguments.families.split(",") if arguments.families else list(REQUIRED)
    result = BenchResult("verify", {"workers": 2, "transport": "shared", "families": families})
    with tempfile.TemporaryDirectory() as folder:
        for arch in families:
            for dtype in ("f32", "bf16"):
                directory = Path(folder) / f"{arch}-{dtype}"
                make_checkpoint(tiny_options(arch, dtype), directory)
                report = verify(directory, topology, dtype=dtype)
                result.rows.append({**report.to_json(), "name": arch, "path": directory.name, "passed": not report.excesses})
                options.say(f"{arch} {dtype}: {'passed' if not report.excesses else report.excesses}")
    result.complete = True
    result.write(arguments.json)
    return 0 if all(row["passed"] for row in result.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
