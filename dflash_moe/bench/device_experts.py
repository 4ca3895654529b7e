"""`bench experts --backend cuda | hip | sim`: one MoE layer on a card, from host rows to host replies.

Weights rotate over several layers, so that the card's caches do not help. Ceilings (a copy inside the card's memory, a large
matrix product) are measured in the same rounds where torch drives the card; where it does not, the rows have none. One format
at a time is on the card.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dflash_moe import _core
from dflash_moe.bench.expert_batch import FLOATS, Batch, ExpertShape, make_batch
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.results import BenchResult, timing_fields
from dflash_moe.errors import ConfigError

DEVICE_BACKENDS = ("cuda", "hip", "sim")
CARD_SHAPE = ExpertShape(hidden_size=2048, moe_intermediate_size=768, num_experts=128, top_k=8)  # Qwen3-30B-A3B
SIM_SHAPE = ExpertShape(hidden_size=256, moe_intermediate_size=256, num_experts=8, top_k=2)  # of a simulated one
SAMPLE_S = 0.3
MAX_FORWARDS = 100
COPY_BYTES = 2 << 30
PRODUCT_WIDTH = 8192


@dataclass(frozen=True, slots=True)
class DeviceParams:
    """What is measured. `shape` None: that of the backend."""

    backend: str
    device: int = 0
    shape: ExpertShape | None = None
    formats: tuple[str, ...] = ("bf16", "fp8_e4m3_b128", "int4_g32", "f32")
    tokens: tuple[int, ...] = (1, 8, 64, 4096)
    num_layers: int = 4
    repeat: int = 5
    seed: int = 0

    def layer_shape(self) -> ExpertShape:
        """The layer that is measured."""
        return self.shape or (SIM_SHAPE if self.backend == "sim" else CARD_SHAPE)


@dataclass(slots=True)
class Ceilings:
    """What torch reaches on the same card: bytes per second read and written by a copy, bf16 operations per second."""

    copy: Callable[[], float] | None
    product: Callable[[], float] | None
    bytes_per_s: list[float] = field(default_factory=list)
    gflops: list[float] = field(default_factory=list)
    label: str = "ceilings"
    rounds: int | None = None

    def measure(self, *, keep: bool) -> None:
        """One copy and one product."""
        for measured, kept in ((self.copy, self.bytes_per_s), (self.product, self.gflops)):
            if measured is not None:
                value = measured()
                if keep:
                    kept.append(value)

    def row(self) -> dict[str, Any] | None:
        """None: ceilings stand in the rows that they bound."""
        return None


@dataclass(slots=True)
class DeviceCase:
    """One batch on the layers of one format."""

    benchmark: _core.LayerBenchmark
    fmt: str
    shape: ExpertShape
    batch: Batch
    tokens: int
    label: str
    facts: dict[str, Any]
    ceilings: Ceilings
    samples_s: list[float] = field(default_factory=list)
    rounds: int | None = None
    forwards: int = 0

    def measure(self, *, keep: bool) -> None:
        """The first, unkept round also finds how many forwards one measurement takes."""
        if not self.forwards:
            self.forwards = max(1, min(MAX_FORWARDS, round(SAMPLE_S / max(1e-6, min(self._forward(2))))))
        samples = self._forward(self.forwards)
        if keep:
            self.samples_s += samples

    def _forward(self, rounds: int) -> list[float]:
        batch, dtype = self.batch, self.fmt if self.fmt in FLOATS else "bf16"
        taken = self.benchmark.run(
            batch.rows, batch.row_counts, batch.expert_ids, batch.weights, row_dtype=dtype, rounds=rounds
        )
        return [nanoseconds / 1e9 for nanoseconds in taken]

    def row(self) -> dict[str, Any] | None:
        """The result row; rates are of the median forward, copies of rows and replies included."""
        if not self.samples_s:
            return None
        timing = timing_fields(self.samples_s, per_round=self.forwards)
        pairs, shape = self.tokens * self.shape.top_k, self.shape
        gflops = 6e-9 * pairs * shape.hidden_size * shape.moe_intermediate_size / timing["median_s"]
        rate = self.batch.num_distinct * shape.expert_bytes(self.fmt) / timing["median_s"]
        row = self.facts | {
            "name": f"{self.fmt} {self.tokens}", "format": self.fmt, "tokens": self.tokens,
            "rows_per_expert": pairs / self.batch.num_distinct, "hidden_size": shape.hidden_size,
            "moe_intermediate_size": shape.moe_intermediate_size, "num_experts": shape.num_experts, "top_k": shape.top_k,
            "threads": 1, "routing": "uniform", "weights_from": "dram", "kernel": "f32-canonical", "gflops": gflops,
            "bytes_per_s": rate,
        }  # fmt: skip
        if self.ceilings.bytes_per_s:
            peak = statistics.median(self.ceilings.bytes_per_s)
            row |= {"peak_bytes_per_s": peak, "of_peak_bytes": rate / peak}
        if self.ceilings.gflops:
            peak = statistics.median(self.ceilings.gflops)
            row |= {"peak_gflops": peak, "of_peak_gflops": gflops / peak}
        return row | timing


def run_device_experts(params: DeviceParams, *, recorder: Recorder | None = None) -> BenchResult:
    """Measures every format and batch; saves after every round, so that an interrupted run keeps what it has.

    Errors: ConfigError for an unknown format or too little memory on the device; those of opening the device.
    """
    recorder = recorder or Recorder()
    for fmt in params.formats:
        if fmt not in _core.weight_formats():
            raise ConfigError(f"format {fmt!r} has no kernel to measure; formats here: {', '.join(_core.weight_formats())}")
    device = _core.BackendDevice(backend=params.backend, device=params.device)
    facts = {"backend": params.backend, "device": device.label, "isa": device.arch}
    result = recorder.begin(
        "experts",
        facts | {"formats": list(params.formats), "tokens": list(params.tokens), "layers": params.num_layers,
                 "repeat": params.repeat, "seed": params.seed, "timed": "rows at the host to replies at the host"},
    )  # fmt: skip
    ceilings = _ceilings(params)
    with recorder.recording():
        for fmt in params.formats:
            shape = params.layer_shape().for_format(fmt)
            benchmark = _load(params, shape, fmt, device)
            cases = [
                DeviceCase(benchmark, fmt, shape, make_batch(shape, tokens, "uniform", params.seed), tokens,
                           f"{fmt}, {tokens} tokens", facts, ceilings)
                for tokens in params.tokens
            ]  # fmt: skip
            run_rounds(recorder, [ceilings, *cases], rounds=params.repeat)
    return result


def _load(params: DeviceParams, shape: ExpertShape, fmt: str, device: _core.BackendDevice) -> _core.LayerBenchmark:
    spec = {"in_size": shape.hidden_size, "intermediate_size": shape.moe_intermediate_size, "out_size": shape.hidden_size}
    each, free = device.layer_bytes(spec=spec, num_experts=shape.num_experts, weight_dtype=fmt), device.free_bytes()
    if params.num_layers * each > free:
        raise ConfigError(
            f"device {device.label}: {params.num_layers} layers in {fmt} need {params.num_layers * each / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} are free; {free // each} such layers fit"
        )
    return _core.LayerBenchmark(
        spec=spec, num_experts=shape.num_experts, num_layers=params.num_layers, weight_dtype=fmt, isa=_core.best_isa(),
        num_threads=1, seed=params.seed, device=device,
    )  # fmt: skip


def _ceilings(params: DeviceParams) -> Ceilings:
    try:
        import torch
    except ImportError:
        return Ceilings(None, None)
    if params.backend == "sim" or not torch.cuda.is_available() or torch.cuda.device_count() <= params.device:
        return Ceilings(None, None)
    place = f"cuda:{params.device}"  # torch's name for both vendors
    source = torch.randn(COPY_BYTES // 4, device=place)
    target = torch.empty_like(source)
    left, right = (torch.randn(PRODUCT_WIDTH, PRODUCT_WIDTH, device=place, dtype=torch.bfloat16) for _ in range(2))

    def timed(work: Callable[[], object]) -> float:
        torch.cuda.synchronize(place)
        began = time.perf_counter()
        work()
        torch.cuda.synchronize(place)
        return time.perf_counter() - began

    return Ceilings(
        lambda: 2 * COPY_BYTES / timed(lambda: target.copy_(source)),
        lambda: 2e-9 * PRODUCT_WIDTH**3 / timed(lambda: torch.matmul(left, right)),
    )
