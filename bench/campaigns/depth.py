"""Whether a layer of a deep model takes longer than one of a shallow model: the first 12, 24 and 48
layers of the sizes of Qwen3-30B-A3B, each by `bench limits` in a process of its own.

    python -m bench.campaigns.depth [--layers 12,24,48] [--rounds 3] [--models DIR]
        [--json bench/results/depth.json]

The file has random blocks in Q4_K: 17 GB for 48 layers. It is made in DIR, by default a temporary
folder, and deleted there. Everything is computed by the host's two threads, one sequence at a time.
Needs the gguf package, and memory and disk for the file. Ten minutes on two cores that nobody else
uses.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.campaigns.harness import ROOT, command_line
from bench.peers.model import REAL, TINY, write_random_codes
from dflash_moe.bench.harness import Recorder

# Everything in one process, whose two threads are those of host and experts.
TOPOLOGY = "version: 1\nhost: {threads: 2}\nworkers: [{name: local, address: loopback, threads: 2}]\n"
# Nothing that is measured here takes longer.
PATIENCE_S = 3600


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments()
    depths = [int(depth) for depth in given.layers.split(",")]
    shape = replace(TINY if given.tiny else REAL, name="depth", num_layers=max(depths))
    recorder = Recorder(given.json)
    result = recorder.begin("depth", {"format": "q4_k", "vocab_size": shape.vocab_size, "rounds": given.rounds})
    with tempfile.TemporaryDirectory(dir=given.models) as folder, recorder.recording():
        path = Path(folder) / "model.gguf"
        write_random_codes(shape, path)
        for depth in depths:
            result.rows += _limits(path, Path(folder), depth, given.rounds)
            recorder.save()
    for row in result.rows:
        print(f"{row['layers']:3} layers, {row['name']}: {1e3 * row['step_s']:.2f} ms, {row['share']:.0%} of its bounds")
    return 0


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, "depth")
    parser.add_argument("--layers", default="12,24,48", help="comma-separated numbers of layers [12,24,48]")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds [3]")
    parser.add_argument("--tiny", action="store_true", help="layers of a tiny shape instead, to try this program")
    parser.add_argument("--models", type=Path, help="where the file is made [a temporary folder]")
    return parser.parse_args()


def _limits(path: Path, folder: Path, depth: int, rounds: int) -> list[dict[str, Any]]:
    """Measures the first `depth` layers, and returns the rows with that number."""
    topology, report = folder / "topology.yaml", folder / "limits.json"
    topology.write_text(TOPOLOGY)
    command = [
        *(sys.executable, "-m", "dflash_moe", "bench", "limits", "--model", path, "--topology", topology, "--layers", depth),
        *("--sequences", 1, "--prefill", 128, "--repeat", rounds, "--json", report),
    ]
    subprocess.run([*map(str, command)], check=True, timeout=PATIENCE_S, cwd=ROOT, stdout=subprocess.DEVNULL)
    found = json.loads(report.read_text())
    pages = found["params"]["huge_pages"]["local: host"]
    return [row | {"name": row["name"].removeprefix("local, "), "layers": depth, **pages} for row in found["rows"]]


if __name__ == "__main__":
    sys.exit(main())
