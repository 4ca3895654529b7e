"""Measures how much of the time on a link slices hide, with one worker behind a slow link: whole
calls against what `auto` makes of them.

The stages of a whole call (send, compute, receive) follow each other, and ideal slices would take
as long as the longest stage alone. The result is the share of that gain which `auto` reaches. This
is case `overlap`. It needs nothing of a model but experts, and no torch.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_moe.bench.forward import counted
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.mode_summary import largest_predictions
from dflash_moe.bench.model_host import describe_topology
from dflash_moe.bench.results import BenchResult, timing_fields
from dflash_moe.bench.timeline import layer_timeline
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.testing.tiny import routed_batch, tiny_checkpoint
from dflash_moe.topology import Topology

WHOLE, AUTO = "one_slice", "auto"
# Layers are called in turn, so that no weights of a layer stay in a cache from the call before.
LAYERS = 4
# Mode auto gets so many unmeasured calls, from which the model of a worker is fitted.
LEARNING_CALLS = 12


@dataclass(frozen=True, slots=True)
class OverlapParams:
    """What is measured: calls of `num_tokens` tokens to one worker. The defaults have the shape of
    the campaigns' model.
    """

    num_tokens: int = 1024
    hidden_size: int = 1024
    moe_intermediate_size: int = 384
    num_experts: int = 32
    top_k: int = 8
    dtype: str = "bf16"
    repeat: int = 9
    calls_per_round: int = LAYERS
    mbit_s: float = 200.0
    delay_ms: float = 0.0


@dataclass(slots=True)
class OverlapCase:
    """Calls in one mode: a `harness.Case`. `stages` are those of every kept call, from its recorded
    slices.
    """

    runtime: ExpertRuntime
    name: str
    batch: Sequence[Any]
    calls_per_round: int
    rounds: int | None = None
    samples_s: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)
    num_slices: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    auto: Mapping[str, Any] | None = None

    @property
    def label(self) -> str:
        """The name of the case in reports of progress."""
        return self.name

    def measure(self, *, keep: bool) -> None:
        """Makes calls to the layers in turn, after some that are not measured. In warm-up there are
        as many of those as mode auto needs to learn from.
        """
        self.runtime.set_mode("auto" if self.name == AUTO else "batched")
        layers = [layer.index for layer in self.runtime.layers]
        for call in range(1 if keep else LEARNING_CALLS):
            # These calls let the runtime settle after the switch and are not measured.
            self.runtime.experts(layers[call % len(layers)], *self.batch)
        self.runtime.take_traces()
        before = counted(self.runtime)
        for call in range(self.calls_per_round):
            started = time.perf_counter()
            self.runtime.experts(layers[call % len(layers)], *self.batch)
            elapsed = time.perf_counter() - started
            slices = layer_timeline(self.runtime.take_traces(), list(self.runtime.stats()["workers"]), ())["slices"]
            if keep:
                self.samples_s.append(elapsed)
                self.stages.append(stage_times(slices))
                self.num_slices.append(len(slices))
        after = counted(self.runtime)
        self.counts = {key: (after[key] - before[key]) // self.calls_per_round for key in after}
        if self.name == AUTO:
            self.auto = self.runtime.stats().get("auto")

    def row(self) -> dict[str, Any] | None:
        """Returns the result row. Counts are those of a call, and stages are medians over calls,
        each summed over the slices of a call.
        """
        if not self.samples_s:
            return None
        stages = {key: statistics.median(one[key] for one in self.stages) for key in self.stages[0]}
        return {
            "name": self.name,
            **timing_fields(self.samples_s, per_round=self.calls_per_round),
            **self.counts,
            "tokens_per_s": len(self.batch[0]) / statistics.median(self.samples_s),
            "num_slices": statistics.median(self.num_slices),
            **stages,
            **({"auto": dict(self.auto)} if self.auto is not None else {}),
        }


def stage_times(slices: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the seconds in which the slices of a worker were sent, computed and received, and
    `wall_s`, from the first encode to the last arrival.
    """
    return {
        "send_s": sum(one["worker_received_ns"] - one["encode_start_ns"] for one in slices) / 1e9,
        "compute_s": sum(one["worker_finished_ns"] - one["worker_started_ns"] for one in slices) / 1e9,
        "receive_s": sum(one["arrived_ns"] - one["worker_finished_ns"] for one in slices) / 1e9,
        "wall_s": (max(one["arrived_ns"] for one in slices) - min(one["encode_start_ns"] for one in slices)) / 1e9,
    }


def run_overlap(params: OverlapParams, *, recorder: Recorder | None = None) -> BenchResult:
    """Measures the rows `one_slice` and `auto`, interleaved. The summary has the share of the ideal
    gain.
    """
    recorder = recorder or Recorder()
    topology = Topology.parse(
        "version: 1\nhost: {threads: 1}\nworkers:\n"
        "  - {name: w0, backend: cpu, threads: 1, address: unix, "
        f"emulate: {{mbit_s: {params.mbit_s}, delay_ms: {params.delay_ms}}}}}\n"
    )
    settings: dict[str, Any] = {"batch_capacity": params.num_tokens, "dtype": params.dtype, "profile": 1}
    result = recorder.begin("overlap", {key: getattr(params, key) for key in OverlapParams.__slots__})
    result.params |= describe_topology(topology, settings, recorder)
    with recorder.recording(), tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder:
        recorder.reporter.say("making experts and starting a worker")
        spec = tiny_checkpoint(
            Path(folder),
            hidden_size=params.hidden_size,
            moe_intermediate_size=params.moe_intermediate_size,
            num_experts=params.num_experts,
            top_k=params.top_k,
            num_layers=LAYERS,
            dtype=params.dtype,
        )
        batch = routed_batch(params.num_tokens, params.hidden_size, params.num_experts, params.top_k)
        with ExpertRuntime.start(topology, model=spec, mode="batched", **settings) as runtime:
            cases = [OverlapCase(runtime, name, batch, params.calls_per_round) for name in (WHOLE, AUTO)]
            run_rounds(recorder, cases, rounds=params.repeat)
        result.summary = [overlap_share(result.rows)]
    return result


def overlap_share(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns `share_of_ideal_gain`, which is (whole - auto) / (whole - ideal) of medians, where
    ideal is the longest stage of a whole call.

    It is None where a single stage is all there is, so that slices have nothing to hide.
    """
    whole, auto = (next(row for row in rows if row["name"] == name) for name in (WHOLE, AUTO))
    ideal_s = max(whole["send_s"], whole["compute_s"], whole["receive_s"])
    possible_s, gained_s = whole["median_s"] - ideal_s, whole["median_s"] - auto["median_s"]
    return {
        "whole_s": whole["median_s"],
        "auto_s": auto["median_s"],
        "ideal_s": ideal_s,
        "num_slices": auto["num_slices"],
        "share_of_ideal_gain": gained_s / possible_s if possible_s > 0 else None,
        "predictions": largest_predictions(auto.get("auto") or {}),
    }
