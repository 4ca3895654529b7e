"""`bench prefill` measures the table of the modes: long prompts and a short decode for each mode
and dtype, with the bytes of both directions.

Rounds interleave the modes, so that a noisy machine disturbs all of them alike. The row `local`
computes every expert in the host process (loopback transport, same kernels) with as many threads as
all workers together.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_moe.bench.forward import Sample, measure_once, random_prompt, settle
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.mode_summary import largest_predictions, summarise
from dflash_moe.bench.model_host import LOCAL, MeasuredHost, describe_topology, open_hosts, resident_memory
from dflash_moe.bench.results import BenchResult, described, timing_fields
from dflash_moe.bench.timeline import capture_timeline
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.topology import Topology

if TYPE_CHECKING:
    from dflash_moe.forward.host_model import HostModel

# From this number of tokens on, slices of four rows take seconds, and behind a slow worker a
# minute.
LONG_PROMPT = 1024
__all__ = ["LOCAL", "PrefillParams", "Sample", "Series", "measure_round", "resident_memory", "run_prefill"]


@dataclass(frozen=True, slots=True)
class PrefillParams:
    """What is measured, over every length in `prompt_tokens` (random ids drawn with `seed`).

    `stream_repeat` is the number of rounds of mode stream over prompts longer than LONG_PROMPT, if
    they are to be fewer. `with_timeline` records one more prefill of the longest prompt in each
    mode.
    """

    model: Path
    prompt_tokens: tuple[int, ...] = (2048,)
    new_tokens: int = 32
    modes: tuple[str, ...] = ("stream", "batched", "auto")
    dtypes: tuple[str, ...] = ()
    repeat: int = 3
    stream_repeat: int | None = None
    with_local: bool = True
    with_timeline: bool = False
    seed: int = 0


@dataclass(slots=True)
class Series:
    """The samples of one mode and dtype."""

    mode: str
    dtype: str
    samples: list[Sample] = field(default_factory=list)
    # The runtime says here why it took the mode it took.
    reason: str = ""
    # In mode auto each worker has its model, choice and prediction of the last round here.
    auto: Mapping[str, Any] | None = None
    # Every kept round has the predictions of each worker.
    predictions: list[dict[str, dict[str, Any]]] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """Returns the result row. Counts are those of the last prefill, and only those of `auto`
        may vary between rounds.
        """
        last = self.samples[-1]
        moved = last.prefill["request_bytes"] + last.prefill["reply_bytes"]
        row: dict[str, Any] = {"name": self.mode, "mode": self.mode, "dtype": self.dtype, "prompt_tokens": last.prompt_tokens}
        row["mode_reason"] = self.reason
        row |= timing_fields([sample.prefill_s for sample in self.samples])
        row |= last.prefill
        row["tokens_per_s"] = last.prompt_tokens / row["median_s"]
        row["wire_efficiency"] = last.prefill["floor_bytes"] / moved if moved else None
        row["decode_calls"] = last.decode["calls"]
        row["decode_bytes"] = last.decode["request_bytes"] + last.decode["reply_bytes"]
        if last.token_s:
            row["decode_tokens_per_s"] = len(last.token_s) / statistics.median(sum(sample.token_s) for sample in self.samples)
        row["digests"] = sorted({sample.digest for sample in self.samples})
        if self.auto is not None:
            row["auto"] = dict(self.auto)
            row["predictions"] = self.predictions
        return row


def measure_round(
    host: HostModel, runtime: ExpertRuntime, input_ids: Any, series: Sequence[Series], new_tokens: int, *, keep: bool = True
) -> None:
    """Takes one sample of every series in order over one runtime, each after its mode has settled.
    Without `keep`, in warm-up, it measures and forgets.
    """
    for one in series:
        runtime.set_mode(one.mode, dtype=one.dtype, reply_dtype=one.dtype)
        settle(host, runtime, input_ids)
        _measure(host, runtime, input_ids, one, new_tokens, keep=keep)


def _measure(host: HostModel, runtime: ExpertRuntime, input_ids: Any, series: Series, new_tokens: int, *, keep: bool) -> None:
    sample = measure_once(host, runtime, input_ids, new_tokens)
    stats = runtime.stats()
    series.reason = str(stats["mode_reason"])
    if series.mode == "auto":
        series.auto = stats.get("auto")
    if keep:
        series.samples.append(sample)
        if series.auto is not None:
            series.predictions.append(largest_predictions(series.auto))


@dataclass(slots=True)
class PrefillCase:
    """A series with its prompt and the host on which it is measured: a `harness.Case`."""

    host: MeasuredHost
    series: Series
    input_ids: Any
    new_tokens: int
    rounds: int | None = None

    @property
    def label(self) -> str:
        """The name of the case in reports of progress."""
        return f"{self.series.mode} {self.series.dtype}, {self.input_ids.shape[1]:,} tokens"

    def measure(self, *, keep: bool) -> None:
        """Switches the mode, lets it settle, and takes one sample."""
        self.prepare()
        _measure(self.host.model, self.host.runtime, self.input_ids, self.series, self.new_tokens, keep=keep)

    def prepare(self) -> None:
        """Puts the host into the mode and dtype of this case, without measuring."""
        mode = "batched" if self.series.mode == LOCAL else self.series.mode
        self.host.runtime.set_mode(mode, dtype=self.series.dtype, reply_dtype=self.series.dtype)
        settle(self.host.model, self.host.runtime, self.input_ids)

    def row(self) -> dict[str, Any] | None:
        """Returns the row of the series, once it has a sample."""
        return self.series.row() if self.series.samples else None


def run_prefill(
    params: PrefillParams,
    topology: Topology,
    *,
    recorder: Recorder,
    overrides: Mapping[str, Any],
) -> BenchResult:
    """Measures every prompt, dtype and mode. Rows are in that order, with the `local` row after its
    modes.

    `overrides` are settings (flags) for the runtime. Errors are those of `ExpertRuntime.start` and
    of the calls, and the recorder keeps what was measured before one.
    """
    overrides = dict(overrides)
    result = recorder.begin("prefill", described(params, "with_local", "with_timeline"))
    result.params |= describe_topology(topology, overrides, recorder)
    if params.with_timeline:
        overrides["profile"] = 1
    with (
        recorder.recording(),
        open_hosts(params.model, topology, overrides, recorder, with_local=params.with_local) as (remote, local),
    ):
        cases = prefill_cases(params, remote, local)
        run_rounds(recorder, cases, rounds=params.repeat)
        result.summary = summarise(result.rows)
        if params.with_timeline:
            for case in cases:
                if case.host is remote and case.input_ids.shape[1] == max(params.prompt_tokens):
                    recorder.reporter.say(f"timeline: {case.label}")
                    case.prepare()
                    timeline = capture_timeline(remote.model, remote.runtime, case.input_ids, topology)
                    result.timelines.append({"mode": case.series.mode, "dtype": case.series.dtype, **timeline})
    return result


def prefill_cases(params: PrefillParams, remote: MeasuredHost, local: MeasuredHost | None) -> list[PrefillCase]:
    """Returns the cases of every prompt, dtype and mode over `remote`, and those of `local`, in the
    order of the rows.
    """
    dtypes = params.dtypes or (remote.runtime.spec.dtype,)
    longest = random_prompt(remote.model, max(params.prompt_tokens), params.seed)
    cases = []
    for num_tokens in params.prompt_tokens:
        for dtype in dtypes:
            for mode in params.modes:
                rounds = params.stream_repeat if mode == "stream" and num_tokens > LONG_PROMPT else None
                cases.append(PrefillCase(remote, Series(mode, dtype), longest[:, :num_tokens], params.new_tokens, rounds))
            if local is not None:
                cases.append(PrefillCase(local, Series(LOCAL, dtype), longest[:, :num_tokens], params.new_tokens))
    return cases
