"""Workers that go wrong on purpose, and what the audit makes of them: one that flips a mantissa bit
in one of 100 rows must be out within 200 audited rows in every run, a healthy one never, and the
rows that every worker computes when it joins must not slow a start. One JSON.

    python -m bench.campaigns.audit [--runs 20] [--healthy-rows 20000] [--starts 5]
        [--json bench/results/audit.json]

Two worker processes hold all shards of a tiny model. In a drifting run the replies of one of them
pass a channel that flips one bit of the lowest mantissa byte of a value in every 100th row, with
checksums that fit; what seed, value and row vary. Calls of 1 to 100 rows are made until that worker
is taken out. Its audited rows until then are counted, those of the healthy one too. The start of a
larger model is timed with and without golden rows. Exit status 1 where a run is not as it must be;
times are the machine's and decide nothing.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.campaigns.harness import command_line
from dflash_moe import _core
from dflash_moe.bench.results import BenchResult, percentile
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.holders.audit.golden import GoldenRows
from dflash_moe.model.make import MakeOptions, make_checkpoint
from dflash_moe.model.spec import ModelSpec, model_spec
from dflash_moe.topology import Topology

ONE_IN, WITHIN = 100, 200
# A run takes a second or two, and much more on a busy machine.
LIMIT_S = 120.0
MOST_TOKENS = 100


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments()
    params = {"runs": given.runs, "healthy_rows": given.healthy_rows, "starts": given.starts, "one_in_rows": ONE_IN}
    result = BenchResult("audit", params | {"within_rows": WITHIN, "load_before": os.getloadavg()[0]})
    with tempfile.TemporaryDirectory() as folder:
        spec = _model(Path(folder) / "tiny", num_layers=2, hidden_size=96, num_experts=8, top_k=3, moe_intermediate_size=64)
        drifting = [_drifting(spec, seed) for seed in range(1, given.runs + 1)]
        rows = [one["audited_rows"] for one in drifting]
        num_out = sum(one["is_out"] and one["audited_rows"] <= WITHIN for one in drifting)
        healthy_wrong = sum(one["healthy_mismatches"] for one in drifting)
        result.rows.append(
            {
                "name": "drifting", "runs": given.runs, "out_in_time": num_out, "audited_rows": rows,
                "p50_rows": percentile(rows, 0.5), "most_rows": max(rows), "healthy_mismatches": healthy_wrong,
            }
        )  # fmt: skip
        print(f"drifting: {num_out} of {given.runs} out within {WITHIN} audited rows, at most {max(rows)}", flush=True)
        healthy = _healthy(spec, given.healthy_rows)
        result.rows.append({"name": "healthy", **healthy})
        print(f"healthy: {healthy['audited_rows']} rows audited, {healthy['mismatches']} mismatches", flush=True)
        larger = _model(
            Path(folder) / "larger", num_layers=4, hidden_size=1024, num_experts=32, top_k=4, moe_intermediate_size=512
        )
        starts = _starts(larger, given.starts)
        result.rows.append({"name": "golden", **starts})
        print(f"golden rows: {starts['golden_ms_median']:.0f} ms of a start of {starts['start_ms_median']:.0f} ms", flush=True)
    result.complete = True
    result.write(given.json)
    is_clean = num_out == given.runs and healthy_wrong == 0 and healthy["mismatches"] == 0 and not healthy["deaths"]
    return 0 if is_clean else 1


def _model(directory: Path, **sizes: int) -> ModelSpec:
    make_checkpoint(MakeOptions("qwen3_moe", dtype="f32", seed=0, **sizes), directory)
    return model_spec(directory)


def _start(spec: ModelSpec, decorate: Any = None, **overrides: Any) -> ExpertRuntime:
    topology = Topology.local(num_workers=2)
    placement = dataclasses.replace(topology.placement, replicas=2)
    settings = {"audit_cpu": "100%", "call_timeout_s": LIMIT_S, "stall_timeout_s": LIMIT_S, **overrides}
    return ExpertRuntime.start(
        dataclasses.replace(topology, placement=placement), model=spec, _channel_decorator=decorate, **settings
    )


class Caller:
    """Makes calls of drawn sizes for a model of these shapes."""

    def __init__(self, runtime: ExpertRuntime, seed: int) -> None:
        self._runtime = runtime
        self._layers = runtime.spec.layers
        self._draw = np.random.default_rng(seed)

    def call(self) -> None:
        layer = self._layers[self._draw.integers(len(self._layers))]
        num_tokens = int(self._draw.integers(1, MOST_TOKENS + 1))
        rows = self._draw.standard_normal((num_tokens, layer.ffn.in_size), np.float32)
        scores = self._draw.random((num_tokens, layer.num_experts))
        ids = np.argsort(scores, axis=1)[:, : layer.top_k].astype(np.int32)
        weights = self._draw.random((num_tokens, layer.top_k), np.float32)
        self._runtime.experts(layer.index, rows, ids, weights)


def _drifting(spec: ModelSpec, seed: int) -> dict[str, Any]:
    def decorate(name: str, channel: _core.Channel) -> _core.Channel:
        return _core.make_drifting(channel, one_in=ONE_IN, seed=seed) if name == "w1" else channel

    # Without restarts the worker that is out stays out, so that its rows are counted to that point.
    with _start(spec, decorate, restart=False) as runtime:
        caller = Caller(runtime, seed)
        until = time.monotonic() + LIMIT_S
        while not (is_out := _state(runtime, "w1") == "quarantined") and time.monotonic() < until:
            caller.call()
        workers = runtime.stats()["audit"]["workers"]
        return {
            "is_out": is_out,
            "audited_rows": workers["w1"]["audited_rows"],
            "healthy_mismatches": workers["w0"]["mismatches"],
        }


def _healthy(spec: ModelSpec, num_rows: int) -> dict[str, Any]:
    with _start(spec) as runtime:
        caller = Caller(runtime, random.randrange(1 << 30))
        until = time.monotonic() + LIMIT_S
        while (told := runtime.stats()["audit"])["audited_rows"] < num_rows and time.monotonic() < until:
            caller.call()
        kept = ("audited_rows", "mismatches", "undecided", "host_wrong", "golden_rows", "golden_mismatches")
        return {name: told[name] for name in kept} | {"deaths": sum(one.deaths for one in runtime.workers())}


def _state(runtime: ExpertRuntime, name: str) -> str:
    return next(one.state for one in runtime.workers() if one.name == name)


def _starts(spec: ModelSpec, count: int) -> dict[str, Any]:
    """Times whole starts, and the part of them in which golden rows are compared: the longest of
    the workers', which run side by side.
    """
    took: list[float] = []
    honest = GoldenRows.check

    def timed(self: GoldenRows, *given: Any, **named: Any) -> None:
        began = time.monotonic()
        try:
            honest(self, *given, **named)
        finally:
            took.append(1000 * (time.monotonic() - began))

    starts, golden = [], []
    GoldenRows.check = timed  # type: ignore[method-assign]
    try:
        for _ in range(count):
            took.clear()
            began = time.monotonic()
            with _start(spec):
                starts.append(1000 * (time.monotonic() - began))
            golden.append(max(took))
    finally:
        GoldenRows.check = honest  # type: ignore[method-assign]
    num_bytes = sum(layer.expert_bytes * layer.num_experts for layer in spec.layers)
    return {
        "start_ms": starts, "golden_ms": golden, "start_ms_median": percentile(starts, 0.5),
        "golden_ms_median": percentile(golden, 0.5), "expert_bytes": num_bytes, "holders": 2,
    }  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, "audit")
    parser.add_argument("--runs", type=int, default=20, help="runs with a drifting worker [20]")
    parser.add_argument("--healthy-rows", type=int, default=20_000, help="audited rows of healthy workers [20000]")
    parser.add_argument("--starts", type=int, default=5, help="starts that are timed [5]")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
