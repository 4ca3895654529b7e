"""What `weights_layout: mapped` and `stored` cost: the same worker with weights packed in memory,
computed from the mapped checkpoint, and mapped from panels on disk, interleaved.

    python -m bench.campaigns.mapped_weights [--rounds 7] [--json bench/results/mapped_weights.json]

Per stored format three runtimes of one loopback worker each, over the same file in the page cache:
the time of `experts()` for 1, 16, 64, 512 and 2,048 tokens, of starting each (loading included),
and the anonymous memory that each adds. Results are compared bit for bit before anything is timed.
Needs the gguf package, 4 GB of disk and memory; about five minutes.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.campaigns.harness import command_line
from bench.lab.panels import let_panels_be_kept, write_panels
from bench.models.tiny_gguf import tiny_gguf
from dflash_moe import ExpertRuntime, Topology
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.results import timing_fields
from dflash_moe.model.spec import ModelSpec
from dflash_moe.telemetry.memory import process_memory
from dflash_moe.testing.tiny import SAFETENSORS_DTYPES, routed_batch, tiny_checkpoint

LAYERS, EXPERTS, TOP_K, HIDDEN, WIDTH = 4, 64, 8, 1024, 512
LAYOUTS = ("packed", "mapped", "stored")
FORMATS = ("bf16", "q8_0", "q4_k", "q6_k")
TOKENS = (1, 16, 64, 512, 2048)
SAMPLE_S = 0.2


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    parser = command_line(__doc__, "mapped_weights")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds [7]")
    parser.add_argument("--threads", type=int, default=2, help="of each worker [2]")
    parser.add_argument("--experts", type=int, default=EXPERTS, help="of a layer; fewer for a trial [64]")
    parser.add_argument("--formats", default=",".join(FORMATS), help=f"comma-separated [{','.join(FORMATS)}]")
    arguments = parser.parse_args()
    let_panels_be_kept()
    recorder = Recorder(arguments.json)
    shape = {
        "layers": LAYERS,
        "experts": arguments.experts,
        "top_k": TOP_K,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH,
    }
    result = recorder.begin("mapped_weights", {"threads": arguments.threads, **shape})
    with recorder.recording():
        for weight_format in arguments.formats.split(","):
            with tempfile.TemporaryDirectory() as folder:
                spec = _checkpoint(Path(folder), weight_format, arguments.experts)
                cache = Path(folder) / "cache"
                write_panels(spec, cache)
                runtimes = {layout: _Started.start(spec, layout, arguments.threads, cache) for layout in LAYOUTS}
                _compare_bits(runtimes, arguments.experts)
                cases = [
                    _Case(weight_format, started, tokens, arguments.experts)
                    for tokens in TOKENS
                    for started in runtimes.values()
                ]
                run_rounds(recorder, cases, rounds=arguments.rounds)
                result.summary += _ratios(cases)
                for started in runtimes.values():
                    started.runtime.close()
    for line in result.summary:
        what = f"{line['format']:>5} {line['tokens']:>5} tokens"
        print(f"{what}: mapped takes {line['time_ratio']:.2f} x packed's time, stored {line['stored_ratio']:.2f} x")
    return 0


def _checkpoint(folder: Path, weight_format: str, num_experts: int) -> ModelSpec:
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH,
        "num_experts": num_experts,
        "top_k": TOP_K,
        "num_layers": LAYERS,
    }
    if weight_format in SAFETENSORS_DTYPES:
        return tiny_checkpoint(folder, dtype=weight_format, **sizes)
    return tiny_gguf(folder / "model.gguf", weight_format, **sizes)


@dataclass(frozen=True, slots=True)
class _Started:
    """A runtime with one loopback worker, and what starting it took."""

    layout: str
    runtime: ExpertRuntime
    start_s: float
    anonymous_bytes: int

    @classmethod
    def start(cls, spec: ModelSpec, layout: str, threads: int, cache: Path) -> _Started:
        topology = Topology.parse(
            f"version: 1\ncache: {{path: {cache}, panels: auto}}\nworkers:\n"
            f"  - {{name: w0, address: loopback, backend: cpu, threads: {threads}, weights_layout: {layout}}}\n"
        )
        before, began = process_memory().anonymous_bytes, time.perf_counter()
        runtime = ExpertRuntime.start(topology, model=spec, dtype=spec.dtype, mode="batched", batch_capacity=max(TOKENS))
        seconds = time.perf_counter() - began
        return cls(layout, runtime, seconds, process_memory().anonymous_bytes - before)


@dataclass(slots=True)
class _Case:
    """Calls of `experts()` of one size, over all layers in turn."""

    weight_format: str
    started: _Started
    tokens: int
    num_experts: int
    rounds: int | None = None
    samples_s: list[float] = field(default_factory=list)
    calls: int = 0

    @property
    def label(self) -> str:
        return f"{self.weight_format}, {self.started.layout}, {self.tokens} tokens"

    def _call(self, count: int) -> list[float]:
        batch = routed_batch(self.tokens, HIDDEN, self.num_experts, TOP_K, seed=self.tokens)
        samples = []
        for call in range(count):
            began = time.perf_counter()
            self.started.runtime.experts(call % LAYERS, *batch)
            samples.append(time.perf_counter() - began)
        return samples

    def measure(self, *, keep: bool) -> None:
        if not self.calls:
            self.calls = max(1, min(200, round(SAMPLE_S / min(self._call(2)))))
        samples = self._call(self.calls)
        if keep:
            self.samples_s += samples

    def row(self) -> dict[str, Any] | None:
        if not self.samples_s:
            return None
        own = {"name": self.label, "format": self.weight_format, "layout": self.started.layout, "tokens": self.tokens}
        start = {"start_s": self.started.start_s, "start_anonymous_bytes": self.started.anonymous_bytes}
        return own | start | timing_fields(self.samples_s, per_round=self.calls)


def _compare_bits(runtimes: dict[str, _Started], num_experts: int) -> None:
    batch = routed_batch(70, HIDDEN, num_experts, TOP_K, seed=1)
    packed, *others = (np.asarray(runtimes[layout].runtime.experts(0, *batch)) for layout in LAYOUTS)
    if any(packed.tobytes() != other.tobytes() for other in others):
        raise SystemExit("mapped weights or panels give other bits than packed weights: nothing is timed")


def _ratios(cases: list[_Case]) -> list[dict[str, Any]]:
    """Returns for each number of tokens the median times of `mapped` and `stored` divided by that
    of `packed`.
    """
    medians = {(case.tokens, case.started.layout): statistics.median(case.samples_s) for case in cases}
    return [
        {
            "format": cases[0].weight_format,
            "tokens": tokens,
            "time_ratio": medians[tokens, "mapped"] / medians[tokens, "packed"],
            "stored_ratio": medians[tokens, "stored"] / medians[tokens, "packed"],
        }
        for tokens in TOKENS
    ]


if __name__ == "__main__":
    sys.exit(main())
