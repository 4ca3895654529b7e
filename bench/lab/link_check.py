"""Compares an emulated link with a real one: the same calls go over TCP to a worker behind a shaped
network and to one behind `emulate:`.

This is case `emulated_link`. bench/campaigns/emulated_link.py makes the network and calls it
inside. There is a row for each link, number of tokens and of slices, and the summary has the ratio
of medians, real over emulated. It needs nothing of a model but experts, and no torch.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.results import BenchResult, timing_fields
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.testing.tiny import routed_batch
from dflash_moe.topology import Topology

REAL, EMULATED = "real", "emulated"


@dataclass(frozen=True, slots=True)
class LinkParams:
    """The link and the calls over it. A call is cut evenly into `slices`."""

    mbit_s: float
    delay_ms: float
    tokens: tuple[int, ...] = (1, 64, 1024)
    slices: tuple[int, ...] = (1, 2, 4, 8)
    repeat: int = 5
    calls_per_round: int = 2


@dataclass(slots=True)
class LinkCase:
    """Calls of one size in a number of slices over one link: a `harness.Case`."""

    runtime: ExpertRuntime
    link: str
    num_slices: int
    batch: Sequence[Any]
    calls: int
    rounds: int | None = None
    samples_s: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name of the case in reports of progress."""
        return f"{self.link}, {len(self.batch[0])} tokens in {self.num_slices}"

    def measure(self, *, keep: bool) -> None:
        """Measures `calls` calls after one that is not measured."""
        tokens = len(self.batch[0])
        self.runtime.set_mode("batched", batch_capacity=-(-tokens // self.num_slices))
        layers = [layer.index for layer in self.runtime.layers]
        for call in range(self.calls + 1):
            started = time.perf_counter()
            self.runtime.experts(layers[call % len(layers)], *self.batch)
            if keep and call:
                self.samples_s.append(time.perf_counter() - started)

    def row(self) -> dict[str, Any] | None:
        """Returns the result row."""
        if not self.samples_s:
            return None
        return {
            "name": self.link,
            "link": self.link,
            "tokens": len(self.batch[0]),
            "num_slices": self.num_slices,
            **timing_fields(self.samples_s, per_round=self.calls),
        }


def run_link_check(
    params: LinkParams, spec: ModelSpec, real: Topology, key_file: Path, *, recorder: Recorder | None = None
) -> BenchResult:
    """Measures both links. `real` has one worker, which runs already behind the shaped network; its
    emulated twin is started here, over TCP too.
    """
    recorder = recorder or Recorder()
    emulated = Topology.parse(
        "version: 1\nhost: {threads: 1}\nworkers:\n  - {name: twin, backend: cpu, threads: 1, address: tcp, "
        f"emulate: {{mbit_s: {params.mbit_s}, delay_ms: {params.delay_ms}}}}}\n"
    )
    recorder.begin("emulated_link", {key: getattr(params, key) for key in LinkParams.__slots__})
    with recorder.recording(), ExitStack() as stack:
        settings: dict[str, Any] = {"mode": "batched", "dtype": "bf16"}
        runtimes = {
            REAL: stack.enter_context(ExpertRuntime.start(real, model=spec, key_file=key_file, **settings)),
            EMULATED: stack.enter_context(ExpertRuntime.start(emulated, model=spec, **settings)),
        }
        layer = spec.layers[0]
        cases = [
            LinkCase(runtimes[link], link, slices, batch, params.calls_per_round)
            for tokens in params.tokens
            for batch in [routed_batch(tokens, layer.ffn.in_size, layer.num_experts, layer.top_k)]
            for slices in params.slices
            if slices <= tokens
            for link in (REAL, EMULATED)
        ]
        run_rounds(recorder, cases, rounds=params.repeat)
        if recorder.result is None:
            raise ValueError("the recorder has no result")
        recorder.result.summary = link_ratios(recorder.result.rows)
    return recorder.result


def link_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns for each number of tokens and slices the median time over the real link, divided by
    that over the emulated one.
    """
    found: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        found.setdefault((row["tokens"], row["num_slices"]), {})[row["link"]] = statistics.median(row["samples_s"])
    return [
        {"tokens": tokens, "num_slices": slices, "ratio": times[REAL] / times[EMULATED]}
        for (tokens, slices), times in found.items()
        if len(times) == len((REAL, EMULATED))
    ]
