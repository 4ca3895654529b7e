"""What our workers take or give under vLLM on the same two cores: tokens/s of plain vLLM and of
vLLM whose experts are a worker's, and what the plug-in costs a start without its variable.

    VLLM_PYTHON=PYTHON python -m bench.campaigns.vllm_workers [--rounds 5] [--json ...]

PYTHON is the interpreter of an environment with vLLM for processors and the wheel of this checkout,
as `make vllm-check` makes it. Both sides run all the time, and each round asks both: 1, 4 and 16
sequences of 64 tokens that are continued by 32, and one prompt of 512. vLLM has two threads on both
sides, and the worker two of its own; none is bound, and none spins. The worker rounds what meets
its weights to bfloat16, as vLLM does. A vLLM that was asked polls for a while, so that the other
one is asked only after that. About six minutes.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.campaigns.harness import command_line
from bench.lab.reference_model import reference_model
from bench.lab.vllm_process import VllmProcess, running_vllm
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.results import timing_fields
from dflash_moe.model.make import MakeOptions, make_checkpoint

ONE_WORKER = "version: 1\nworkers: [{name: w0, backend: cpu, threads: 2, activations: bf16}]\n"
# Sequences, tokens of each prompt, new tokens of each.
CASES = {
    "1 sequence": (1, 64, 32),
    "4 sequences": (4, 64, 32),
    "16 sequences": (16, 64, 32),
    "prefill of 512": (1, 512, 1),
}
SIDES = ("plain", "workers")
# vLLM's processors then compute what is not experts with two threads on both sides.
ENVIRONMENT = {"OMP_NUM_THREADS": "2"}
IMPORTS = 9
# Behind a request vLLM's processes go on polling for a second (`busy_loop_s` of its message
# queues); this is that with room to spare.
POLLING_S = 4.0
IMPORT = """
import time
began = time.perf_counter()
import dflash_moe_vllm
dflash_moe_vllm.register()
print(time.perf_counter() - began)
"""


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    parser = command_line(__doc__, "vllm_workers")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds [5]")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try it out")
    arguments = parser.parse_args()
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        raise SystemExit("VLLM_PYTHON names no interpreter with vLLM; `make vllm-check` makes build/vllm/env/bin/python")
    recorder = Recorder(arguments.json)
    result = recorder.begin("vllm_workers", {"rounds": arguments.rounds, "vllm": _version(python)})
    with ExitStack() as running, recorder.recording():
        model = _model(running, arguments.tiny)
        sides = {
            name: running.enter_context(
                running_vllm(python, model, ONE_WORKER if name == "workers" else None, environment=ENVIRONMENT)
            )
            for name in SIDES
        }
        cases = [_Case(case, side, sides[side]) for case in CASES for side in SIDES]
        run_rounds(recorder, cases, rounds=arguments.rounds)
        result.summary = [_of_import(python), *(_seen(name, one) for name, one in sides.items())]
    for row in result.rows:
        print(f"{row['case']:15} {row['name']:8} {row['tokens_per_s']:8.1f} tokens/s")
    return 0


@dataclass(slots=True)
class _Case:
    """A case at one side."""

    case: str
    side: str
    process: VllmProcess
    rounds: int | None = None
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    samples_s: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.case}, {self.side}"

    def measure(self, *, keep: bool) -> None:
        # Both sides draw the same prompts, and each round others, which no cache of prefixes has.
        sequences, length, new = CASES[self.case]
        prompts = [[self.draw.randrange(256) for _ in range(length)] for _ in range(sequences)]
        time.sleep(POLLING_S)
        took_s = self.process.generate(prompts, max_tokens=new)["took_s"]
        if keep:
            self.samples_s.append(took_s)

    def row(self) -> dict[str, Any] | None:
        if not self.samples_s:
            return None
        sequences, length, new = CASES[self.case]
        tokens = sequences * (new if new > 1 else length)
        taken = timing_fields(self.samples_s)
        row = {"case": self.case, "name": self.side, "sequences": sequences, "tokens": tokens, **taken}
        return {**row, "tokens_per_s": tokens / row["median_s"]}


def _model(running: ExitStack, is_tiny: bool) -> Path:
    if not is_tiny:
        return reference_model(say=lambda line: print(line, flush=True))
    folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="dflash-bench-"))) / "model"
    make_checkpoint(MakeOptions("qwen3_moe", 2, 256, 8, 2, 64, "bf16", seed=1), folder)
    return folder


def _seen(name: str, side: VllmProcess) -> dict[str, Any]:
    """What is seen of a side's model, whose calls prove that it was the workers that computed."""
    (rank,) = side.look()
    totals = rank["totals"]
    moved = totals and totals["request_bytes"] + totals["reply_bytes"]
    return {
        "name": name, "start_s": side.start_s, "calls": sum(rank["calls"]), "expert_bytes": rank["expert_bytes"],
        "peak_bytes": rank["peak_bytes"], "wire_efficiency": totals["floor_bytes"] / moved if moved else None,
    }  # fmt: skip


def _of_import(python: str) -> dict[str, Any]:
    """What vLLM's call of the plug-in takes without the variable, in processes of their own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DFLASH_MOE_")}
    taken = [float(_said(python, IMPORT, environment)) for _ in range(IMPORTS)]
    return {"name": "plug-in without its variable", **timing_fields(taken)}


def _version(python: str) -> str:
    return _said(python, "import vllm; print(vllm.__version__)", dict(os.environ)).splitlines()[-1]


def _said(python: str, code: str, environment: dict[str, str]) -> str:
    """Returns what a program says to that interpreter's stdout, which has a minute for it."""
    command = [python, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
