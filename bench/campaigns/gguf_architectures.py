"""GGUF architectures against llama.cpp: its converter makes a file of one random checkpoint each,
and our reader has to find in it what the checkpoint holds; one JSON.

    python -m bench.campaigns.gguf_architectures --llama-src DIR [--only NAME,...] [--write]
        [--skip-verify] [--json bench/results/gguf_architectures.json]

DIR is llama.cpp's source, whose converter runs with this Python. Parameters must be
equal bit for bit, and within one unit in the last place where the converter adds one to them or
takes a logarithm; float32 logits must be within the bounds of docs/numerics.md; and `verify` has to
pass over two workers. --write puts the files into tests/golden/gguf, where the tests read them.
Exit status 1 where something is not as it must be.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.campaigns.harness import ROOT, command_line
from dflash_moe.bench.results import BenchResult
from dflash_moe.cli import options
from dflash_moe.topology import Topology

GOLDENS = ROOT / "tests" / "golden" / "gguf"
CONVERTER = Path(__file__).with_name("llama_converter.py")
CONVERTER_LIMIT_S = 600
# Of a message of the converter so many characters are quoted.
QUOTED = 600


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments()
    topology = Topology.local(2)
    options.prepare_host(topology)  # before torch is imported
    from bench.models.gguf_sources import SOURCES, write_source

    names = given.only.split(",") if given.only else list(SOURCES)
    result = BenchResult("gguf_architectures", {"converter": "llama.cpp convert_hf_to_gguf.py", "outtype": "f32"})
    with tempfile.TemporaryDirectory() as folder:
        models = {name: write_source(name, Path(folder) / name) for name in names}
        _convert(given.llama_src, names, Path(folder))
        for name, model in models.items():
            result.rows.append(row := _examine(name, model, Path(folder), given, topology))
            options.say(f"{name}: {'passed' if not row['excesses'] else '; '.join(row['excesses'])}")
    result.complete = len(names) == len(SOURCES)
    result.write(given.json)
    return 1 if any(row["excesses"] for row in result.rows) else 0


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, "gguf_architectures")
    parser.add_argument("--llama-src", type=Path, required=True, metavar="DIR", help="the source of llama.cpp")
    parser.add_argument("--only", default="", help="comma-separated names of sources [all]")
    parser.add_argument("--write", action="store_true", help="write the goldens of the tests")
    parser.add_argument("--skip-verify", action="store_true", help="do not run verify")
    return parser.parse_args()


def _examine(name: str, theirs: Any, folder: Path, given: argparse.Namespace, topology: Topology) -> dict[str, Any]:
    from bench.models import gguf_goldens as goldens

    file = folder / f"{name}.gguf"
    theirs.set_experts_implementation("eager")
    ours = goldens.load_eager_model(file)
    equal, near, excesses = _compare(goldens.parameters(ours), goldens.parameters(theirs))
    num_layers = theirs.config.get_text_config().num_hidden_layers
    excesses += goldens.logits_excess(goldens.logits(ours), goldens.logits(theirs), num_layers)
    if not given.skip_verify:
        from dflash_moe.proofs.verify import verify

        excesses += verify(file, topology, dtype="f32").excesses
    if given.write and not excesses:
        config = json.loads((folder / name / "config.json").read_text(encoding="utf-8"))
        GOLDENS.mkdir(parents=True, exist_ok=True)
        goldens.Golden(config, goldens.digests(theirs)).write(GOLDENS, name, file)
    class_names = {"source_class": type(theirs).__name__, "read_class": type(ours).__name__}
    return {"name": name, **class_names, "equal_parameters": equal, "near_parameters": near, "excesses": excesses}


def _convert(llama_src: Path, names: list[str], folder: Path) -> None:
    """Makes NAME.gguf of each checkpoint in `folder`, in one process: it imports torch."""
    from bench.models.gguf_sources import SOURCES

    command = [sys.executable, str(CONVERTER), str(llama_src)]
    for name in names:
        command += ["--", str(folder / name), "--outfile", str(folder / f"{name}.gguf"), "--outtype", "f32"]
        command += SOURCES[name].options
    done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERTER_LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"the converter ended with {done.returncode}: {done.stderr[-QUOTED:]}")


def _compare(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[int, int, list[str]]:
    """Returns how many parameters are equal bit for bit, how many others differ by one unit in the
    last place, and what is worse as text.
    """
    import torch

    excesses = [f"only one side has {name}" for name in sorted(ours.keys() ^ theirs.keys())]
    equal = near = 0
    for name in sorted(ours.keys() & theirs.keys()):
        mine, other = ours[name].float(), theirs[name].float()
        if mine.shape != other.shape:
            excesses.append(f"{name}: shapes {tuple(mine.shape)} and {tuple(other.shape)}")
        elif torch.equal(mine, other):
            equal += 1
        elif name.endswith((".weight", ".A_log")) and bool(((mine - other).abs() <= _unit(other)).all()):
            near += 1
        else:
            excesses.append(f"{name}: {int((mine != other).sum())} of {other.numel()} numbers differ")
    return equal, near, excesses


def _unit(value: Any) -> Any:
    """Returns the unit in the last place of a number or, where that is larger, of one, because one
    was added to it and taken away again.
    """
    import torch

    return torch.clamp(torch.exp2(torch.floor(torch.log2(value.abs().clamp(min=1.0))) - 23), min=2.0**-23)


if __name__ == "__main__":
    sys.exit(main())
