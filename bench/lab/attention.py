"""`attention` measures the operator of paged attention against the limits of the machine: one
layer in a call, over the pages of so many layers and sequences that no cache holds them.

Rows named `decode` have one query row, rows named `prefill` a chunk of a prompt; both are the last
tokens of `context`. Read speed and the peak of multiply-adds are measured again in every round.
Rows named `append...` store the keys and values of many tokens in one layer, with one call and with
one call each.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.lab.attention_append import AppendCase, append_cases
from bench.lab.attention_pages import AttentionShape, LayerStack, Rows
from dflash_moe import _core, _measure
from dflash_moe.bench.harness import Case, Recorder, run_rounds
from dflash_moe.bench.read_speed import ReadSpeed, read_buffer_bytes
from dflash_moe.bench.results import BenchResult, timing_fields
from dflash_moe.config import BLOCK_TOKENS
from dflash_moe.config.settings import DTYPES
from dflash_moe.errors import ConfigError
from dflash_moe.holders.threads import SPIN_NS
from dflash_moe.telemetry.machine import memory_available, usable_cores

# One measurement takes as many calls as need about this long.
SAMPLE_S = 0.06
MAX_CALLS = 200


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What is measured. Empty `threads` mean one thread, and as many as there are usable cores.
    `chunks` are (rows, context) of prefills.
    """

    shape: AttentionShape = field(default_factory=AttentionShape)
    contexts: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    chunks: tuple[tuple[int, int], ...] = ((512, 4096),)
    dtypes: tuple[str, ...] = ("bf16", "f16", "f32")
    threads: tuple[int, ...] = ()
    append_tokens: int = 64
    isa: str = ""
    repeat: int = 5
    seed: int = 0

    def thread_counts(self) -> tuple[int, ...]:
        """Returns the numbers of threads to measure with."""
        return self.threads or tuple(sorted({1, usable_cores()}))


@dataclass(slots=True)
class MultiplyAddPeak:
    """Multiply-adds of float32 from registers, in every round so far: attention has the arithmetic
    of the default numerics class whatever the pages keep.
    """

    isa: str
    threads: int
    gflops: list[float] = field(default_factory=list)
    rounds: int | None = None

    @property
    def label(self) -> str:
        """The name of the case in reports of progress."""
        return f"multiply-add peak, {self.threads} threads"

    def measure(self, *, keep: bool) -> None:
        """Measures it with as many threads as the operator has."""
        found = _measure.multiply_add_per_s(self.isa, self.threads, 5)
        if keep:
            self.gflops += [value / 1e9 for value in found]

    def row(self) -> dict[str, Any] | None:
        """Returns None, because the peak stands in the rows that it bounds."""
        return None


@dataclass(slots=True)
class AttentionCase:
    """One operator over the last `rows` of `context` tokens. `call` makes one call, over the next
    layer or sequence.
    """

    name: str
    shape: AttentionShape
    kv_dtype: str
    rows: int
    context: int
    read: ReadSpeed
    peak: MultiplyAddPeak
    call: Callable[[], None]
    samples_s: list[float] = field(default_factory=list)
    rounds: int | None = None
    calls: int = 0

    @property
    def label(self) -> str:
        """The name of the case in reports of progress."""
        return f"{self.name} {self.kv_dtype}, {self.rows} of {self.context:,} tokens, {self.read.threads} threads"

    def measure(self, *, keep: bool) -> None:
        """Measures one round. The first, which is not kept, also finds how many calls one
        measurement takes.
        """
        if not self.calls:
            self._time(1)
            self.calls = max(1, min(MAX_CALLS, round(SAMPLE_S / max(1e-7, min(self._time(2))))))
        samples = self._time(self.calls)
        if keep:
            self.samples_s += samples

    def _time(self, calls: int) -> list[float]:
        samples = []
        for _ in range(calls):
            started = time.perf_counter()
            self.call()
            samples.append(time.perf_counter() - started)
        return samples

    def row(self) -> dict[str, Any] | None:
        """Returns the result row. Rates are those of the median call."""
        read = self.read.median
        if not self.samples_s or read is None or not self.peak.gflops:
            return None
        timing = timing_fields(self.samples_s, per_round=self.calls)
        median, peak = timing["median_s"], statistics.median(self.peak.gflops)
        bytes_per_s = self.context * self.shape.token_bytes(self.kv_dtype) / median
        gflops = 1e-9 * self.shape.operations(self.rows, self.context) / median
        return {
            "name": self.name,
            "kv_dtype": self.kv_dtype,
            "rows": self.rows,
            "context": self.context,
            "num_heads": self.shape.num_heads,
            "num_kv_heads": self.shape.num_kv_heads,
            "head_size": self.shape.head_size,
            "threads": self.read.threads,
            "isa": self.peak.isa,
            "us": median * 1e6,
            "bytes_per_s": bytes_per_s,
            "read_bytes_per_s": read,
            "share_of_read": bytes_per_s / read,
            "gflops": gflops,
            "peak_gflops": peak,
            "share_of_peak": gflops / peak,
            **timing,
        }


def run_attention(params: AttentionParams, *, recorder: Recorder | None = None) -> BenchResult:
    """Measures every case. For one dtype and number of threads all cases and the peaks are
    interleaved, and then the appends. One dtype at a time is in memory.

    Raises ConfigError for an unknown dtype, a context that is no number of tokens, or too little
    memory for the pages.
    """
    recorder = recorder or Recorder()
    isa = params.isa or _core.best_isa()
    _check(params)
    result = recorder.begin("attention", _describe(params, isa))
    with recorder.recording():
        for kv_dtype in params.dtypes:
            stack = LayerStack(params.shape, kv_dtype, _num_tokens(params, kv_dtype), params.seed)
            for threads in params.thread_counts():
                run_rounds(recorder, _cases(params, stack, isa, threads), rounds=params.repeat)
            appends = append_cases(stack, params.append_tokens)
            run_rounds(recorder, appends, rounds=params.repeat)
            result.summary += AppendCase.ratios(appends)
    return result


def _check(params: AttentionParams) -> None:
    for dtype in params.dtypes:
        if dtype not in DTYPES:
            raise ConfigError(f"keys and values are kept in {', '.join(DTYPES)}; {dtype!r} is not allowed")
    for rows, context in [(1, context) for context in params.contexts] + list(params.chunks):
        if not 1 <= rows <= context:
            raise ConfigError(
                f"a context of {context} tokens has no last {rows}; give at least 1, and no more rows than tokens"
            )
    needed = max(
        params.shape.num_layers * _num_tokens(params, dtype) * params.shape.token_bytes(dtype) for dtype in params.dtypes
    )
    if needed > memory_available():
        raise ConfigError(
            f"the pages need {needed / 2**30:.1f} GiB, {memory_available() / 2**30:.1f} are available; measure shorter "
            "contexts (--contexts)"
        )


def _num_tokens(params: AttentionParams, kv_dtype: str) -> int:
    """Returns the tokens that each layer has pages for: whole sequences of every context, and more
    bytes in all layers than caches hold.
    """
    longest = max([*params.contexts, *(context for _, context in params.chunks)])
    longest = -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS
    layer_bytes = read_buffer_bytes(1) / params.shape.num_layers
    return max(1, -(-int(layer_bytes / params.shape.token_bytes(kv_dtype)) // longest)) * longest


def _cases(params: AttentionParams, stack: LayerStack, isa: str, threads: int) -> list[Case]:
    pool = _core.HostPool(threads=threads, spin_ns=SPIN_NS if threads <= usable_cores() else 0, isa=isa)
    read, peak = ReadSpeed(threads, isa), MultiplyAddPeak(isa, threads)
    wanted = [("decode", 1, context) for context in params.contexts]
    wanted += [("prefill", rows, context) for rows, context in params.chunks]
    shape, kv_dtype = params.shape, stack.kv_dtype
    own = [
        AttentionCase(name, shape, kv_dtype, rows, context, read, peak, _bind(pool, stack, rows, context, params.seed))
        for name, rows, context in wanted
    ]
    return [read, peak, *own]


def _bind(pool: _core.HostPool, stack: LayerStack, rows: int, context: int, seed: int) -> Callable[[], None]:
    """Returns what makes one call, with queries and output in the dtype of the pages."""
    shape = stack.shape
    queries = Rows.random(rows, shape.num_heads * shape.head_size, stack.kv_dtype, seed + 2)
    out = Rows.random(rows, shape.num_heads * shape.head_size, stack.kv_dtype, seed + 3)
    steps: Iterator[tuple[_core.KvLayer, _core.AttentionPlan]] = stack.steps(rows, context)
    given, taken, scale = queries.described, out.described, shape.head_size**-0.5

    def call(keep: Sequence[Rows] = (queries, out)) -> None:
        # The arrays live as long as the call does.
        del keep
        layer, plan = next(steps)
        _core.paged_attention(pool, layer, plan, *given, shape.num_heads, *taken, scale=scale)

    return call


def _describe(params: AttentionParams, isa: str) -> dict[str, Any]:
    shape = params.shape
    return {
        "isa": isa,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_size": shape.head_size,
        "num_layers": shape.num_layers,
        "contexts": list(params.contexts),
        "chunks": [list(chunk) for chunk in params.chunks],
        "dtypes": list(params.dtypes),
        "threads": list(params.thread_counts()),
        "append_tokens": params.append_tokens,
        "pages_bytes": {
            dtype: shape.num_layers * _num_tokens(params, dtype) * shape.token_bytes(dtype) for dtype in params.dtypes
        },
        "repeat": params.repeat,
        "seed": params.seed,
    }
