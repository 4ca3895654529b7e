"""What mode `auto` knows about each worker, what it chose, predicted and measured: the client's
forecasts in words and numbers.

The model itself is csrc/client (cost_curve, slicing, worker_model); docs/architecture.md describes
it.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_moe.model.spec import LayerSpec

# at INFO: the explanation, when a runtime that ran in mode auto closes
log = logging.getLogger("dflash_moe.auto")

NS = 1e-9
UNMEASURED = "nothing is measured yet: whole chunks"


@dataclass(frozen=True, slots=True)
class CostLine:
    """A cost: seconds = fixed_s + units * s_per_unit + experts * s_per_expert.

    Units are bytes on the link, (row, expert) pairs in compute. `residual` is how far recent
    predictions were off, relatively.
    """

    fixed_s: float
    s_per_unit: float
    s_per_expert: float
    residual: float


@dataclass(frozen=True, slots=True)
class SliceForecast:
    """A number of slices and the time that was predicted for it."""

    num_slices: int
    window: int
    predicted_s: float


@dataclass(frozen=True, slots=True)
class ChunkForecast:
    """Chunks of one size (an octave of tokens) and one shape of experts at one worker.

    `taken` and `considered` are of the last one. `predicted_s` and `measured_s` are medians over
    the last 16 chunks that had the worker to themselves, from submit to the last reply; None before
    there is one. `deviation` is the median of |predicted / measured - 1|. `wait_s` is the part of a
    prediction that no stage explains: the wait for its turn at the host, and for a core where
    threads outnumber them. `is_auto`: the model chose, not the mode.
    """

    cost_class: int
    num_tokens: int
    num_chunks: int
    taken: SliceForecast
    considered: tuple[SliceForecast, ...]
    wait_s: float
    send_s: float
    compute_s: float
    receive_s: float
    predicted_s: float | None
    measured_s: float | None
    deviation: float | None
    reason: str
    is_auto: bool


@dataclass(frozen=True, slots=True)
class WorkerForecast:
    """One worker: cost lines of both directions of its link, and of its compute by class of layers;
    its chunks, small first.
    """

    name: str
    send: CostLine
    receive: CostLine
    compute: Mapping[int, CostLine]
    clock_offset_s: float
    chunks: tuple[ChunkForecast, ...]


def cost_classes(layers: Sequence[LayerSpec]) -> dict[int, int]:
    """Layer index -> class: layers whose experts have equal shape, activation and format cost the
    same per pair and expert.
    """
    classes: dict[tuple[object, ...], int] = {}
    found = {}
    for layer in layers:
        ffn = layer.ffn
        shape = (ffn.in_size, ffn.intermediate_size, ffn.out_size, ffn.activation, ffn.gate, layer.weight_dtype)
        found[layer.index] = classes.setdefault(shape, len(classes))
    return found


def worker_forecasts(records: Sequence[Mapping[str, Any]]) -> tuple[WorkerForecast, ...]:
    """The client's records (`_core.Client.forecasts`), in seconds and with reasons in words."""
    return tuple(
        WorkerForecast(
            name=record["name"],
            send=_cost_line(record["send"]),
            receive=_cost_line(record["receive"]),
            compute={cost_class: _cost_line(line) for cost_class, line in record["compute"].items()},
            clock_offset_s=record["clock_offset_ns"] * NS,
            chunks=tuple(_chunk(chunk) for chunk in record["chunks"]),
        )
        for record in records
    )


def mode_reason(forecasts: Sequence[WorkerForecast]) -> str:
    """One sentence: what `auto` took for the largest chunks of every worker, and why."""
    parts = []
    for forecast in forecasts:
        if forecast.chunks:
            parts.append(f"{forecast.name}: {largest_chunk(forecast).reason}")
    return "; ".join(parts) or UNMEASURED


def largest_chunk(forecast: WorkerForecast) -> ChunkForecast:
    """The entry of the longest chunks; of several shapes of experts the one that takes longest."""
    return max(forecast.chunks, key=lambda chunk: (chunk.num_tokens, chunk.taken.predicted_s))


def explain(forecasts: Sequence[WorkerForecast]) -> list[str]:
    """Lines for `--explain-auto`: per worker the model, then for every size of chunk prediction,
    choice and reason.
    """
    lines = []
    for forecast in forecasts:
        sends, receives = _link_text(forecast.send), _link_text(forecast.receive)
        lines.append(f"auto, worker {forecast.name}: sends {sends}, receives {receives}")
        for cost_class, line in forecast.compute.items():
            which = f" (layers of class {cost_class})" if len(forecast.compute) > 1 else ""
            lines.append(
                f"  compute{which}: {_time(line.fixed_s)} + {_time(line.s_per_unit)} per (row, expert) + "
                f"{_time(line.s_per_expert)} per expert read; off by {line.residual:.0%} lately"
            )
        lines += [f"  {_chunk_text(chunk)}" for chunk in forecast.chunks]
    return lines or [f"auto: {UNMEASURED}"]


def log_explanation(forecasts: Sequence[WorkerForecast]) -> None:
    """Hands the explanation to the logger `dflash_moe.auto`, line by line."""
    if forecasts and log.isEnabledFor(logging.INFO):
        for line in explain(forecasts):
            log.info("%s", line)


def _cost_line(found: Mapping[str, float]) -> CostLine:
    per_unit = found["ns_per_byte"] if "ns_per_byte" in found else found["ns_per_pair"]
    return CostLine(found["fixed_ns"] * NS, per_unit * NS, found.get("ns_per_expert", 0.0) * NS, found["residual"])


def _chunk(record: Mapping[str, Any]) -> ChunkForecast:
    considered = tuple(SliceForecast(slices, window, ns * NS) for slices, window, ns in record["considered"])
    taken = SliceForecast(record["num_slices"], record["window"], record["forecast_ns"] * NS)
    predicted, measured = record["predicted_ns"], record["measured_ns"]
    return ChunkForecast(
        cost_class=record["cost_class"],
        num_tokens=record["num_tokens"],
        num_chunks=record["num_chunks"],
        taken=taken,
        considered=considered,
        wait_s=record["wait_ns"] * NS,
        send_s=record["send_ns"] * NS,
        compute_s=record["compute_ns"] * NS,
        receive_s=record["receive_ns"] * NS,
        predicted_s=statistics.median(predicted) * NS if predicted else None,
        measured_s=statistics.median(measured) * NS if measured else None,
        deviation=statistics.median(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)) if measured else None,
        reason=_reason(record["reason"], taken, considered, record["num_tokens"]),
        is_auto=record["reason"] != "fixed",
    )


def _reason(kind: str, taken: SliceForecast, considered: Sequence[SliceForecast], num_tokens: int) -> str:
    chunk = f"{num_tokens} {'token' if num_tokens == 1 else 'tokens'} in {_slices(taken.num_slices)}"
    if kind == "fixed":
        return f"{chunk}, as the mode asks"
    if kind == "unmeasured":
        return UNMEASURED
    if kind == "small":
        return f"{chunk}: too few to cut"
    whole = considered[0]
    if kind == "sliced":
        gain = 1 - taken.predicted_s / whole.predicted_s
        if gain <= 0:  # what was taken before stays until a change promises enough
            return f"{chunk} are kept: {_slices(whole.num_slices)} would save only {-gain:.1%}"
        return f"{chunk} hide transfer: {gain:.0%} less than in {_slices(whole.num_slices)}"
    others = [one for one in considered if one.num_slices != taken.num_slices]
    if not others:
        return f"{chunk}: smaller ones are not known well enough yet"
    best = min(others, key=lambda one: one.predicted_s)
    change = best.predicted_s / taken.predicted_s - 1
    effect = f"cost {change:.0%} more" if change >= 0 else f"save only {-change:.1%}"
    return f"{chunk}: {best.num_slices} would {effect}"


def _slices(count: int) -> str:
    return "one slice" if count == 1 else f"{count} slices"


def _chunk_text(chunk: ChunkForecast) -> str:
    text = f"{chunk.reason}; {chunk.taken.window} under way; {chunk.num_chunks} chunks"
    if chunk.measured_s is not None and chunk.predicted_s is not None:
        text += (
            f"; predicted {_time(chunk.predicted_s)} ({_time(chunk.wait_s)} of it waiting), measured {_time(chunk.measured_s)}"
        )
    if chunk.considered:
        text += "; considered " + ", ".join(f"{one.num_slices}: {_time(one.predicted_s)}" for one in chunk.considered)
    return text


def _link_text(line: CostLine) -> str:
    rate = f" + {1e-6 / line.s_per_unit:.0f} MB/s" if line.s_per_unit > 0 else ""
    return f"{_time(line.fixed_s)}{rate}"


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
