"""`bench experts` measures the expert kernels against the limits of the machine, one layer at a
time and without a transport around them.

A row has a format, number of tokens, routing, source of the weights and number of threads. It gives
multiply-adds and weight bytes a second beside the peaks of the same run, which are measured again
in every round. Weights come from memory (several layers in rotation, far beyond the caches) or from
the cache (one layer). `kernel` is the numerics class, and the peak that of its arithmetic: float32,
int8 products, bf16 products. Rows named `torch...` are the same work in torch on the same threads:
a loop of linear layers, and `grouped_mm` where this torch has it on the CPU.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_moe import _core, _measure
from dflash_moe.bench.expert_batch import FLOATS, Batch, ExpertShape, Kernel, make_batch
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.results import BenchResult, timing_fields
from dflash_moe.bench.torch_experts import TorchLayers, torch_kernels
from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.telemetry.machine import memory_available, usable_cores
from dflash_moe.topology.numerics import CLASSES, DEFAULT_NUMERICS, takes_weights

# These formats are measured unless others are named.
FORMATS = ("f32", "f16", "bf16", "int8_g32", "int4_g32", "q8_0", "q4_k", "q6_k", "mxfp4")
# These classes are measured unless others are named, each with the formats it takes: those that
# processors compute.
NUMERICS = tuple(name for name, facts in CLASSES.items() if not facts.is_bounded)
# The weights in rotation are several times larger than the share of one core in the largest
# last-level caches.
ROTATION_BYTES = 512 << 20
# Each thread reads so many bytes when the peak is measured.
PEAK_READ_BYTES = 256 << 20
# One measurement takes as many forwards as need about this long.
SAMPLE_S = 0.06
MAX_FORWARDS = 200


@dataclass(frozen=True, slots=True)
class ExpertsParams:
    """What is measured. Empty `threads` mean one thread, and as many as there are usable cores."""

    shapes: tuple[ExpertShape, ...] = (ExpertShape(),)
    formats: tuple[str, ...] = FORMATS
    tokens: tuple[int, ...] = (1, 4, 16, 64, 512, 2048)
    zipf_tokens: tuple[int, ...] = (64, 512)
    cache_tokens: tuple[int, ...] = (1, 4, 512)
    threads: tuple[int, ...] = ()
    isa: str = ""
    numerics: tuple[str, ...] = NUMERICS
    repeat: int = 5
    with_torch: bool = True
    seed: int = 0

    def thread_counts(self) -> tuple[int, ...]:
        """Returns the numbers of threads to measure with."""
        return self.threads or tuple(sorted({1, usable_cores()}))


@dataclass(slots=True)
class Peaks:
    """The limits of one number of threads in every round so far."""

    isa: str
    threads: int
    numerics: str = DEFAULT_NUMERICS
    gflops: list[float] = field(default_factory=list)
    bytes_per_s: list[float] = field(default_factory=list)
    label: str = "peaks"
    rounds: int | None = None

    def measure(self, *, keep: bool) -> None:
        """Measures multiply-adds from registers and reads from memory, with as many threads as the
        kernels have.
        """
        flops = operation_peak(self.numerics, self.isa, self.threads)
        read = _measure.read_bytes_per_s(self.isa, self.threads, 3, PEAK_READ_BYTES)
        if keep:
            self.gflops += [value / 1e9 for value in flops]
            self.bytes_per_s += read

    def row(self) -> dict[str, Any] | None:
        """Returns None, because peaks stand in the rows that they bound."""
        return None


def operation_peak(numerics: str, isa: str, threads: int) -> list[float]:
    """Measures operations a second in the arithmetic of a class, or in float32 where the
    instruction set has no loop for that.
    """
    loops = {"int8": _measure.integer_multiply_add_per_s, "bf16": _measure.bf16_multiply_add_per_s}
    try:
        return loops.get(CLASSES[numerics].inputs, _measure.multiply_add_per_s)(isa, threads, 5)
    except UnsupportedError:
        return _measure.multiply_add_per_s(isa, threads, 5)


@dataclass(slots=True)
class ExpertsCase:
    """One kernel on one batch. `forward(n)` runs it n times and returns the seconds of each run."""

    name: str
    kernel: str
    backend: str
    fmt: str
    shape: ExpertShape
    tokens: int
    routing: str
    source: str
    batch: Batch
    peaks: Peaks
    forward: Callable[[int], list[float]]
    samples_s: list[float] = field(default_factory=list)
    rounds: int | None = None
    forwards: int = 0

    @property
    def label(self) -> str:
        """The name of the case in reports of progress."""
        return f"{self.name}, {self.tokens} tokens, {self.routing}, {self.source}, {self.peaks.threads} threads"

    def measure(self, *, keep: bool) -> None:
        """Measures one round. The first round, which is not kept, also finds how many forwards one
        measurement takes.
        """
        if not self.forwards:
            # The first forward touches everything once.
            self.forward(1)
            self.forwards = max(1, min(MAX_FORWARDS, round(SAMPLE_S / max(1e-6, min(self.forward(2))))))
        samples = self.forward(self.forwards)
        if keep:
            self.samples_s += samples

    def row(self) -> dict[str, Any] | None:
        """Returns the result row. Rates are those of the median forward."""
        if not self.samples_s or not self.peaks.gflops:
            return None
        shape, timing = self.shape, timing_fields(self.samples_s, per_round=self.forwards)
        pairs = self.tokens * shape.top_k
        median = timing["median_s"]
        gflops = 6e-9 * pairs * shape.hidden_size * shape.moe_intermediate_size / median
        weight_bytes = self.batch.num_distinct * shape.expert_bytes(self.fmt)
        peak_gflops, peak_bytes = statistics.median(self.peaks.gflops), statistics.median(self.peaks.bytes_per_s)
        return {
            "name": self.name,
            "format": self.fmt,
            "tokens": self.tokens,
            "rows_per_expert": pairs / self.batch.num_distinct,
            "hidden_size": shape.hidden_size,
            "moe_intermediate_size": shape.moe_intermediate_size,
            "num_experts": shape.num_experts,
            "top_k": shape.top_k,
            "threads": self.peaks.threads,
            "isa": self.peaks.isa,
            "routing": self.routing,
            "weights_from": self.source,
            "backend": self.backend,
            "kernel": self.kernel,
            "gflops": gflops,
            "bytes_per_s": weight_bytes / median,
            "peak_gflops": peak_gflops,
            "peak_bytes_per_s": peak_bytes,
            "of_peak_gflops": gflops / peak_gflops,
            "of_peak_bytes": weight_bytes / median / peak_bytes,
            **timing,
        }


def run_experts(params: ExpertsParams, *, recorder: Recorder | None = None) -> BenchResult:
    """Measures every case. For one shape, number of threads and format all cases, torch and the
    peaks are interleaved.

    It saves after every round. One format at a time is in memory. An intermediate size that a
    format cannot cut into blocks is rounded up for it, and the rows say so.

    Raises ConfigError for an unknown format or too little memory for the layers in rotation.
    """
    recorder = recorder or Recorder()
    isa = params.isa or _core.best_isa()
    _check(params)
    result = recorder.begin(
        "experts",
        {
            "isa": isa, "formats": list(params.formats), "tokens": list(params.tokens), "threads": list(params.thread_counts()),
            "repeat": params.repeat, "torch": params.with_torch, "numerics": list(params.numerics),
            "rotation_bytes": ROTATION_BYTES, "seed": params.seed,
            "reply_dtype": "that of the rows: the weights' own, bf16 for quantised ones",
        },
    )  # fmt: skip
    with recorder.recording():
        for shape in params.shapes:
            for threads in params.thread_counts():
                for fmt in params.formats:
                    cases = _cases(params, shape.for_format(fmt), fmt, isa, threads)
                    peaks = {id(case.peaks): case.peaks for case in cases}
                    run_rounds(recorder, [*peaks.values(), *cases], rounds=params.repeat)
                    result.summary = ratios(result.rows)
    return result


def _check(params: ExpertsParams) -> None:
    for fmt in params.formats:
        if fmt not in _core.weight_formats():
            raise ConfigError(f"format {fmt!r} has no kernel to measure; formats here: {', '.join(_core.weight_formats())}")
    for fmt in params.formats:
        if not _classes(params, fmt):
            raise ConfigError(
                f"none of the numerics classes {', '.join(params.numerics)} takes format {fmt!r} on this processor; "
                f"classes here: {', '.join(_core.numerics_classes(params.isa or _core.best_isa()))}"
            )
    needed = max(_needed_bytes(shape.for_format(fmt), fmt, params) for shape in params.shapes for fmt in params.formats)
    if needed > memory_available():
        raise ConfigError(
            f"the layers in rotation need {needed / 2**30:.1f} GiB, {memory_available() / 2**30:.1f} are available; "
            "measure formats with fewer bytes (--formats) or without torch (--no-torch)"
        )


def _needed_bytes(shape: ExpertShape, fmt: str, params: ExpertsParams) -> int:
    copies = len(_classes(params, fmt)) + (params.with_torch and fmt in FLOATS)
    return _num_layers(shape, fmt) * shape.layer_bytes(fmt) * copies


def _classes(params: ExpertsParams, fmt: str) -> list[str]:
    """Returns the classes in which a format is measured."""
    here = _core.numerics_classes(params.isa or _core.best_isa())
    return [numerics for numerics in params.numerics if numerics in here and takes_weights(numerics, fmt)]


def _num_layers(shape: ExpertShape, fmt: str) -> int:
    """Returns the number of layers in rotation. What one token touches of them all must exceed the
    caches.
    """
    touched = shape.top_k * shape.expert_bytes(fmt)
    return max(2, min(64, -(-ROTATION_BYTES // touched), -(-4 * ROTATION_BYTES // shape.layer_bytes(fmt))))


def _cases(params: ExpertsParams, shape: ExpertShape, fmt: str, isa: str, threads: int) -> list[ExpertsCase]:
    peaks = {numerics: Peaks(isa, threads, numerics) for numerics in _classes(params, fmt)}
    wanted = [(tokens, "uniform", "dram") for tokens in params.tokens]
    wanted += [(tokens, "zipf", "dram") for tokens in params.zipf_tokens]
    wanted += [(tokens, "uniform", "cache") for tokens in params.cache_tokens]
    batches = {(tokens, routing): make_batch(shape, tokens, routing, params.seed) for tokens, routing, _ in wanted}
    kernels = [_own_kernel(shape, fmt, isa, threads, numerics) for numerics in peaks]
    if params.with_torch and fmt in FLOATS and DEFAULT_NUMERICS not in peaks:
        # The roof of torch is that of float32.
        peaks[DEFAULT_NUMERICS] = Peaks(isa, threads)
    if params.with_torch and fmt in FLOATS:
        kernels += torch_kernels(TorchLayers.create(shape, fmt, _num_layers(shape, fmt)), threads)
    return [
        ExpertsCase(
            kernel.name, kernel.kernel, kernel.backend, fmt, shape, tokens, routing, source, batches[tokens, routing],
            peaks[kernel.kernel if kernel.backend == "cpu" else DEFAULT_NUMERICS],
            kernel.bind(batches[tokens, routing], source),
        )
        for tokens, routing, source in wanted
        for kernel in kernels
    ]  # fmt: skip


def _own_kernel(shape: ExpertShape, fmt: str, isa: str, threads: int, numerics: str) -> Kernel:
    spec = {"in_size": shape.hidden_size, "intermediate_size": shape.moe_intermediate_size, "out_size": shape.hidden_size}
    layers = {
        source: _measure.LayerBenchmark(
            spec=spec,
            num_experts=shape.num_experts,
            num_layers=count,
            weight_dtype=fmt,
            isa=isa,
            num_threads=threads,
            numerics=numerics,
        )
        for source, count in (("dram", _num_layers(shape, fmt)), ("cache", 1))
    }

    def bind(batch: Batch, source: str) -> Callable[[int], list[float]]:
        arrays = (batch.rows, batch.row_counts, batch.expert_ids, batch.weights)
        row_dtype = fmt if fmt in FLOATS else "bf16"
        return lambda count: [ns * 1e-9 for ns in layers[source].run(*arrays, row_dtype=row_dtype, rounds=count)]

    return Kernel(fmt if numerics == DEFAULT_NUMERICS else f"{fmt}_{numerics}", numerics, "cpu", bind)


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns for every case the median of the fastest row of torch divided by ours, so that ours
    is faster above 1.
    """
    found = []
    for row in rows:
        if row["backend"] != "cpu":
            continue
        same = ("format", "tokens", "routing", "weights_from", "threads", "hidden_size", "num_experts")
        others = [other for other in rows if other["backend"] == "torch" and all(other[key] == row[key] for key in same)]
        if others:
            best = min(others, key=lambda other: other["median_s"])
            compared = {"against": best["name"], "ratio": best["median_s"] / row["median_s"]}
            found.append({key: row[key] for key in same} | {"kernel": row["kernel"]} | compared)
    return found
