"""What a whole expert layer reaches of its bare matrix products, and what a second thread brings.
Interleaved rounds.

    python -m bench.campaigns.layer_against_gemm [--rounds 7] [--tokens 2048] \
        [--json bench/results/layer_against_gemm.json]

Per format and number of threads: `layer` (the forward of a routed batch: widening, grouping,
products, activation, routed sum, reply) and `gemm` (the products alone, every expert with the mean
number of rows, all from the same few cached rows). Hidden size 1024, 32 experts of width 384 (512
for q4_k and q6_k), top-8. About one minute.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.campaigns.harness import command_line
from dflash_moe import _core, _measure
from dflash_moe.bench.expert_batch import FLOATS, ExpertShape, make_batch
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.results import timing_fields
from dflash_moe.telemetry.machine import usable_cores

FORMATS = ("f32", "f16", "bf16", "int8_g32", "q8_0", "int4_g32", "q4_k", "q6_k", "mxfp4")
# Each case makes so many forwards in a round.
FORWARDS = 2


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    parser = command_line(__doc__, "layer_against_gemm")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds [7]")
    parser.add_argument("--tokens", type=int, default=2048, help="rows of the batch [2048]")
    arguments = parser.parse_args()
    threads = sorted({1, usable_cores()})
    recorder = Recorder(arguments.json)
    result = recorder.begin("layer_against_gemm", {"tokens": arguments.tokens, "threads": threads, "isa": _core.best_isa()})
    with recorder.recording():
        for fmt in FORMATS:
            cases = [case for count in threads for case in _cases(fmt, count, arguments.tokens)]
            run_rounds(recorder, cases, rounds=arguments.rounds)
        result.summary = _ratios(result.rows)
    for line in result.summary:
        print(f"{line['format']:10} {line['threads']} threads: layer {line['gflops']:6.1f} GFLOP/s, of the products "
              f"{line['of_gemm']:.3f}, of one thread {line['of_one_thread']:.2f}")  # fmt: skip
    return 0


@dataclass(slots=True)
class _Case:
    """One thing that is measured. `forward(n)` returns the seconds of n runs, and `flops` are those
    of one run.
    """

    label: str
    fields: dict[str, Any]
    flops: float
    forward: Callable[[int], list[float]]
    rounds: int | None = None
    samples_s: list[float] = field(default_factory=list)

    def measure(self, *, keep: bool) -> None:
        samples = self.forward(FORWARDS)
        if keep:
            self.samples_s += samples

    def row(self) -> dict[str, Any] | None:
        if not self.samples_s:
            return None
        gflops = self.flops / statistics.median(self.samples_s) * 1e-9
        return {"name": self.label, **self.fields, "gflops": gflops} | timing_fields(self.samples_s, per_round=FORWARDS)


def _cases(fmt: str, threads: int, tokens: int) -> list[_Case]:
    shape = ExpertShape().for_format(fmt)
    spec = {"in_size": shape.hidden_size, "intermediate_size": shape.moe_intermediate_size, "out_size": shape.hidden_size}
    layers = _measure.LayerBenchmark(
        spec=spec, num_experts=shape.num_experts, num_layers=2, weight_dtype=fmt, isa=_core.best_isa(), num_threads=threads
    )
    batch = make_batch(shape, tokens, "uniform", 0)
    arrays = (batch.rows, batch.row_counts, batch.expert_ids, batch.weights)
    row_dtype = fmt if fmt in FLOATS else "bf16"
    rows_per_expert = tokens * shape.top_k // shape.num_experts
    products = 6.0 * shape.hidden_size * shape.moe_intermediate_size

    def layer(count: int) -> list[float]:
        return [ns * 1e-9 for ns in layers.run(*arrays, row_dtype=row_dtype, rounds=count)]

    def gemm(count: int) -> list[float]:
        return [ns * 1e-9 for ns in layers.run_gemm(rows_per_expert=rows_per_expert, rounds=count)]

    made = ("layer", layer, products * tokens * shape.top_k), ("gemm", gemm, products * rows_per_expert * shape.num_experts)
    return [
        _Case(f"{fmt} {kind}, {threads} threads", {"kind": kind, "format": fmt, "threads": threads}, flops, forward)
        for kind, forward, flops in made
    ]


def _ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rates = {(row["format"], row["threads"], row["kind"]): row["gflops"] for row in rows}
    return [
        {
            "format": fmt, "threads": threads, "gflops": rate, "of_gemm": rate / rates[fmt, threads, "gemm"],
            "of_one_thread": rate / rates[fmt, 1, "layer"],
        }
        for (fmt, threads, kind), rate in rates.items()
        if kind == "layer"
    ]  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
