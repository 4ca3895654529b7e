"""`bench experts --backend cuda | hip | sim` measures one MoE layer on a card, from rows of the
host to its replies.

Weights rotate over several layers, so that the card's caches do not help. Each row has the time
that the caller waits and the time that the device computes (copies aside); rates and shares are of
the latter. Ceilings (a copy inside the card's memory, a large matrix product) and torch's grouped
products are measured in the same rounds where torch drives the card. One format at a time is on the
card.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dflash_moe import _core, _measure
from dflash_moe.bench.expert_batch import FLOATS, Batch, ExpertShape, make_batch
from dflash_moe.bench.harness import Case, Recorder, run_rounds
from dflash_moe.bench.results import BenchResult, timing_fields
from dflash_moe.bench.torch_experts import TorchLayers, torch_kernels
from dflash_moe.errors import ConfigError
from dflash_moe.topology.numerics import takes_weights

# The shape on a card is that of Qwen3-30B-A3B.
CARD_SHAPE = ExpertShape(hidden_size=2048, moe_intermediate_size=768, num_experts=128, top_k=8)
# A simulated card is thousands of times slower, so that its shape is small.
SIM_SHAPE = ExpertShape(hidden_size=256, moe_intermediate_size=256, num_experts=8, top_k=2)
SAMPLE_S = 0.1
MAX_FORWARDS = 100
COPY_BYTES = 2 << 30
PRODUCT_WIDTH = 8192


@dataclass(frozen=True, slots=True)
class DeviceParams:
    """What is measured. A `shape` of None is that of the backend, and empty `numerics` mean every
    class of the device that takes a format.
    """

    backend: str
    device: int = 0
    shape: ExpertShape | None = None
    formats: tuple[str, ...] = ("bf16", "fp8_e4m3_b128", "int8_g32", "int4_g32", "f32")
    tokens: tuple[int, ...] = (1, 4, 8, 16, 64, 256, 1024, 4096)
    zipf_tokens: tuple[int, ...] = (1024, 4096)
    numerics: tuple[str, ...] = ()
    num_layers: int = 4
    repeat: int = 5
    with_torch: bool = True
    seed: int = 0

    def layer_shape(self) -> ExpertShape:
        """The layer that is measured."""
        return self.shape or (SIM_SHAPE if self.backend == "sim" else CARD_SHAPE)

    def place(self) -> str:
        """The name that torch has for the device, whichever the vendor."""
        return f"cuda:{self.device}"

    def batches(self) -> list[tuple[int, str]]:
        """Returns (tokens, routing) of every row."""
        return [(tokens, "uniform") for tokens in self.tokens] + [(tokens, "zipf") for tokens in self.zipf_tokens]


@dataclass(slots=True)
class Ceilings:
    """What torch reaches on the same card: the bytes that a copy reads and writes in a second, and
    bf16 operations in a second.
    """

    copy: Callable[[], float] | None
    product: Callable[[], float] | None
    bytes_per_s: list[float] = field(default_factory=list)
    gflops: list[float] = field(default_factory=list)
    label: str = "ceilings"
    rounds: int | None = None

    def measure(self, *, keep: bool) -> None:
        """Measures one copy and one product."""
        for measured, kept in ((self.copy, self.bytes_per_s), (self.product, self.gflops)):
            if measured is not None:
                value = measured()
                if keep:
                    kept.append(value)

    def row(self) -> dict[str, Any] | None:
        """Returns None, because ceilings stand in the rows that they bound."""
        return None


@dataclass(slots=True)
class DeviceCase:
    """One batch on the layers of one format.

    `forward(n)` returns the caller's seconds of each of n forwards, and the device's seconds of all
    of them, which are 0 where the caller's are the device's.
    """

    # The facts are backend, device, isa and kernel.
    facts: dict[str, Any]
    fmt: str
    shape: ExpertShape
    batch: Batch
    tokens: int
    routing: str
    ceilings: Ceilings
    forward: Callable[[int], tuple[list[float], float]]
    samples_s: list[float] = field(default_factory=list)
    # Each round has one sample, the mean of its forwards.
    device_samples_s: list[float] = field(default_factory=list)
    rounds: int | None = None
    forwards: int = 0

    @property
    def label(self) -> str:
        """The name of the case in reports of progress."""
        return f"{self.facts['kernel']}, {self.fmt}, {self.tokens} tokens, {self.routing}"

    def measure(self, *, keep: bool) -> None:
        """Measures one round. The first round, which is not kept, also finds how many forwards one
        measurement takes.
        """
        if not self.forwards:
            self.forwards = max(1, min(MAX_FORWARDS, round(SAMPLE_S / max(1e-6, min(self.forward(2)[0])))))
        samples, device_s = self.forward(self.forwards)
        if keep:
            self.samples_s += samples
            self.device_samples_s.append(device_s / self.forwards or statistics.mean(samples))

    def row(self) -> dict[str, Any] | None:
        """Returns the result row. Rates are those of the device's time in the median round."""
        if not self.samples_s:
            return None
        pairs, shape, device_s = self.tokens * self.shape.top_k, self.shape, statistics.median(self.device_samples_s)
        gflops = 6e-9 * pairs * shape.hidden_size * shape.moe_intermediate_size / device_s
        rate = self.batch.num_distinct * shape.expert_bytes(self.fmt) / device_s
        row = self.facts | {
            "name": f"{self.facts['kernel']} {self.fmt} {self.tokens}", "format": self.fmt, "tokens": self.tokens,
            "rows_per_expert": pairs / self.batch.num_distinct, "hidden_size": shape.hidden_size,
            "moe_intermediate_size": shape.moe_intermediate_size, "num_experts": shape.num_experts, "top_k": shape.top_k,
            "threads": 1, "routing": self.routing, "weights_from": "dram",
            "device_median_s": device_s, "gflops": gflops, "bytes_per_s": rate,
        }  # fmt: skip
        if self.ceilings.bytes_per_s:
            peak = statistics.median(self.ceilings.bytes_per_s)
            row |= {"peak_bytes_per_s": peak, "of_peak_bytes": rate / peak}
        if self.ceilings.gflops:
            peak = statistics.median(self.ceilings.gflops)
            row |= {"peak_gflops": peak, "of_peak_gflops": gflops / peak}
        return row | timing_fields(self.samples_s, per_round=self.forwards)


def run_device_experts(params: DeviceParams, *, recorder: Recorder | None = None) -> BenchResult:
    """Measures every format, class and batch. It saves after every round, so that an interrupted
    run keeps what it has.

    Errors: ConfigError for an unknown format, a class that the device does not compute or too
    little memory there; those of opening the device.
    """
    recorder = recorder or Recorder()
    for fmt in params.formats:
        if fmt not in _core.weight_formats():
            raise ConfigError(f"format {fmt!r} has no kernel to measure; formats here: {', '.join(_core.weight_formats())}")
    device = _core.BackendDevice(backend=params.backend, device=params.device)
    classes = {fmt: _classes(params, fmt, device) for fmt in params.formats}
    result = recorder.begin(
        "experts",
        _facts(params, device)
        | {"formats": list(params.formats), "tokens": list(params.tokens), "layers": params.num_layers, "repeat": params.repeat,
           "numerics": classes, "seed": params.seed, "timed": "median_s: rows at the host to replies at the host; "
           "device_median_s: the device's kernels"},
    )  # fmt: skip
    ceilings = _ceilings(params)
    with recorder.recording():
        for fmt in params.formats:
            shape = params.layer_shape().for_format(fmt)
            batches = {key: make_batch(shape, *key, params.seed) for key in params.batches()}
            for numerics in classes[fmt]:
                own = _own_cases(params, shape, fmt, numerics, device, batches, ceilings)
                torch = _torch_cases(params, shape, fmt, batches, ceilings) if numerics == classes[fmt][-1] else []
                run_rounds(recorder, [ceilings, *own, *torch], rounds=params.repeat)
    return result


def _facts(params: DeviceParams, device: _core.BackendDevice) -> dict[str, Any]:
    return {"backend": params.backend, "device": device.label, "isa": device.arch}


def _classes(params: DeviceParams, fmt: str, device: _core.BackendDevice) -> list[str]:
    here = device.numerics_classes()
    for numerics in params.numerics:
        if numerics not in here:
            raise ConfigError(f"device {device.label} does not compute {numerics!r}; its classes: {', '.join(here)}")
    found = [numerics for numerics in params.numerics or here if takes_weights(numerics, fmt)]
    if not found:
        raise ConfigError(f"none of the numerics classes {', '.join(params.numerics)} takes format {fmt!r}")
    return found


def _own_cases(
    params: DeviceParams, shape: ExpertShape, fmt: str, numerics: str, device: _core.BackendDevice,
    batches: dict[tuple[int, str], Batch], ceilings: Ceilings,
) -> list[Case]:  # fmt: skip
    benchmark = _load(params, shape, fmt, numerics, device)
    dtype = fmt if fmt in FLOATS else "bf16"

    def bind(batch: Batch) -> Callable[[int], tuple[list[float], float]]:
        arrays = (batch.rows, batch.row_counts, batch.expert_ids, batch.weights)

        def forward(rounds: int) -> tuple[list[float], float]:
            before = benchmark.device_ns()
            taken = benchmark.run(*arrays, row_dtype=dtype, rounds=rounds)
            return [nanoseconds / 1e9 for nanoseconds in taken], (benchmark.device_ns() - before) / 1e9

        return forward

    facts = _facts(params, device) | {"kernel": numerics}
    return [
        DeviceCase(facts, fmt, shape, batch, tokens, routing, ceilings, bind(batch))
        for (tokens, routing), batch in batches.items()
    ]


def _load(
    params: DeviceParams, shape: ExpertShape, fmt: str, numerics: str, device: _core.BackendDevice
) -> _measure.LayerBenchmark:
    spec = {"in_size": shape.hidden_size, "intermediate_size": shape.moe_intermediate_size, "out_size": shape.hidden_size}
    each = device.layer_bytes(spec=spec, num_experts=shape.num_experts, weight_dtype=fmt, numerics=numerics)
    free = device.free_bytes()
    if params.num_layers * each > free:
        raise ConfigError(
            f"device {device.label}: {params.num_layers} layers in {fmt} need {params.num_layers * each / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} are free; {free // each} such layers fit"
        )
    return _measure.LayerBenchmark(
        spec=spec, num_experts=shape.num_experts, num_layers=params.num_layers, weight_dtype=fmt, isa=_core.best_isa(),
        num_threads=1, seed=params.seed, numerics=numerics, device=device,
    )  # fmt: skip


def _torch_drives(params: DeviceParams) -> bool:
    """Says whether torch is here and drives this card."""
    try:
        import torch
    except ImportError:
        return False
    return params.backend != "sim" and torch.cuda.is_available() and torch.cuda.device_count() > params.device


def _torch_cases(
    params: DeviceParams, shape: ExpertShape, fmt: str, batches: dict[tuple[int, str], Batch], ceilings: Ceilings
) -> list[Case]:
    """Returns the cases of torch: grouped products and a loop over the experts, with activation and
    combine. Sorting the rows is not timed.
    """
    if not params.with_torch or fmt not in FLOATS or not _torch_drives(params):
        return []
    layers = TorchLayers.create(shape, fmt, params.num_layers, params.place())
    kernels = torch_kernels(layers, 1)

    def bind(forward: Callable[[int], list[float]]) -> Callable[[int], tuple[list[float], float]]:
        def timed(rounds: int) -> tuple[list[float], float]:
            samples = forward(rounds)
            return samples, sum(samples)

        return timed

    facts = {"backend": "torch", "device": params.place(), "isa": "torch"}
    return [
        DeviceCase(
            facts | {"kernel": kernel.kernel}, fmt, shape, batch, tokens, routing, ceilings, bind(kernel.bind(batch, "dram"))
        )
        for kernel in kernels
        for (tokens, routing), batch in batches.items()
    ]


def _ceilings(params: DeviceParams) -> Ceilings:
    if not _torch_drives(params):
        return Ceilings(None, None)
    import torch

    place = params.place()
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
