"""The forecasts of mode `auto` in words and numbers: what the client knows about each worker, and
what it chose, predicted and measured for it.

The cost model itself is in csrc/client (cost_curve, slicing, worker_model), and
docs/modes.md describes it. This file only reports.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_moe.model.spec import LayerSpec

# A runtime that ran in mode auto logs its explanation here at INFO when it closes. The name is no
# module's, so that a user can switch on this report alone.
log = logging.getLogger("dflash_moe.auto")

NS = 1e-9
UNMEASURED = "nothing is measured yet: whole chunks"


@dataclass(frozen=True, slots=True)
class CostLine:
    """A fitted cost: seconds = fixed_s + units * s_per_unit + experts * s_per_expert.

    A unit is a byte on the link, and a (row, expert) pair in compute. `residual` is the relative
    error of recent predictions.
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
    """What is known of the chunks of one size (an octave of tokens) and one shape of experts at one
    worker.

    `taken` and `considered` describe the last such chunk. `predicted_s` and `measured_s` are
    medians over the last 16 chunks that had the worker to themselves, from submit to the last
    reply, and None before there is one. `deviation` is the median of |predicted / measured - 1|.
    `wait_s` is the part of a prediction that no stage explains: the wait for its turn at the host,
    and for a core where threads outnumber them. `is_auto` says that the model chose the slices, not
    the mode.
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
    """What is known of one worker: the cost lines of both directions of its link, the cost lines of
    its compute by class of layers (`cost_classes`), and its chunks, the shortest first.
    """

    name: str
    send: CostLine
    receive: CostLine
    compute: Mapping[int, CostLine]
    clock_offset_s: float
    chunks: tuple[ChunkForecast, ...]


def cost_classes(layers: Sequence[LayerSpec]) -> dict[int, int]:
    """Returns the cost class of every layer by the layer's index.

    Layers whose experts have equal shape, activation and format cost the same per pair and per
    expert, so that they share a class and what was measured of one holds for all.
    """
    classes: dict[tuple[object, ...], int] = {}
    found = {}
    for layer in layers:
        ffn = layer.ffn
        shape = (ffn.in_size, ffn.intermediate_size, ffn.out_size, ffn.activation, ffn.gate, layer.weight_dtype)
        found[layer.index] = classes.setdefault(shape, len(classes))
    return found


def worker_forecasts(records: Sequence[Mapping[str, Any]]) -> tuple[WorkerForecast, ...]:
    """Converts the records of `_core.Client.forecasts` from nanoseconds to seconds, and the codes
    of their reasons to words.
    """
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
    """Returns one sentence that says what `auto` took for the largest chunks of every worker, and
    why.
    """
    parts = []
    for forecast in forecasts:
        if forecast.chunks:
            parts.append(f"{forecast.name}: {largest_chunk(forecast).reason}")
    return "; ".join(parts) or UNMEASURED


def largest_chunk(forecast: WorkerForecast) -> ChunkForecast:
    """Returns the entry of the longest chunks; among several shapes of experts it is the one with
    the longest prediction. `forecast` must have chunks.
    """
    return max(forecast.chunks, key=lambda chunk: (chunk.num_tokens, chunk.taken.predicted_s))


def explain(forecasts: Sequence[WorkerForecast]) -> list[str]:
    """Returns the lines that `--explain-auto` prints: for every worker its model, then the
    prediction, choice and reason for every size of chunk.
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
    """Logs the explanation to `dflash_moe.auto`, one record a line."""
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
        if gain <= 0:
            # The client keeps its former choice until a change promises enough.
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
