"""What `verify` measured of a model, and which of it is beyond its bound.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from dflash_moe.proofs.rounded_inputs import rounds_below
from dflash_moe.proofs.two_passes import Bounds, logits_difference

if TYPE_CHECKING:
    from dflash_moe.model.spec import LayerSpec
    from dflash_moe.operators.report import TakeoverReport
    from dflash_moe.proofs.layer_parity import LayerParity

# The reply of every shard is rounded, and then their sum. With independent errors of equal size
# that is the root of two, and the rest is for chance.
ROUNDING_FACTOR = 1.5
# This is half a unit of float32, for a class that computes in float32 whatever it is given.
MIN_ROUNDING = 2.0**-24
# Some intermediate values are so near the edge of a step that float32 crosses it. They add at most
# this share of what rounding inputs moves (0012).
FLIPPED_STEPS = 0.1
# Where rounding is not judged, rows at far positions may differ so many times as much as others.
# Healthy tiny models in bf16 showed 0.7 to 1.0 times, and a wrong scale of queries 13 times.
FARTHER = 3.0
# So much is never too much: where rounding has one early token choose another expert, all rows that
# see it move by a part of this.
LEAST_FARTHER = 0.1


@dataclass(frozen=True, slots=True)
class GreedyParity:
    """Our greedy tokens beside those that eager takes best at the same places, in one pass over the
    prompt and our tokens.
    """

    tokens: int
    equal: int
    # At so many places the gap of eager's two largest logits, divided by the standard deviation of
    # its logits at all these places, exceeds the tolerance: there the tokens must be equal.
    compared: int
    # This is the largest gap at a place where they are not; None where all are equal.
    flip_gap: float | None

    @classmethod
    def of(cls, ours: list[int], theirs: list[int], gaps: list[float], tie: float | None) -> GreedyParity:
        """Compares tokens place by place; `gaps` are those of eager there."""
        flipped = [gap for our, their, gap in zip(ours, theirs, gaps, strict=True) if our != their]
        compared = len(gaps) if tie is None else sum(gap > tie for gap in gaps)
        return cls(len(ours), len(ours) - len(flipped), compared, max(flipped, default=None))


@dataclass(frozen=True, slots=True)
class PositionParity:
    """The logits of `count` rows at positions up to `last`, at which code may begin to compute
    something else; differences are those of `VerifyReport`.
    """

    count: int
    last: int
    logits_rms: float
    logits_max: float
    rows_rms: float

    @classmethod
    def of(cls, positions: list[int], ours: Any, theirs: Any) -> PositionParity:
        """Compares logits [num_rows, vocab_size]."""
        return cls(len(positions), positions[-1], *logits_difference(ours, theirs))


@dataclass(slots=True)
class VerifyReport:
    """Everything that was measured. `excesses` has one sentence for whatever is beyond its bound,
    and is empty where there is parity.
    """

    directory: str
    class_name: str
    dtype: str
    request_dtype: str
    reply_dtype: str
    # Policy, class by holder and layers of several classes are those of `ExpertRuntime.stats`.
    numerics: dict[str, Any]
    seed: int
    bounds: Bounds
    layers: list[LayerParity] = field(default_factory=list)
    # What became of the modules of the host's own model.
    host: TakeoverReport | None = None
    # The classes of the host's linear layers, and the dtype of its pages; both are empty where the
    # model keeps its own operators.
    host_numerics: tuple[str, ...] = ()
    kv_dtype: str = ""
    # The differences are divided by the standard deviation of the eager logits.
    logits_rms: float = math.nan
    logits_max: float = math.nan
    # The rms that a quarter of the rows exceed.
    rows_rms: float = math.nan
    # Says why logits and greedy tokens are reported and not judged; empty where they are judged.
    not_judged: str = ""
    greedy: GreedyParity | None = None
    # None where attention is not paged: then the model's own code knows the positions.
    positions: PositionParity | None = None
    remote_calls: int = 0
    # Each holder keeps weights in these formats, that of most experts first.
    formats: dict[str, list[str]] = field(default_factory=dict)
    excesses: list[str] = field(default_factory=list)
    # So many shards have the content checksums of the host's own copy; None where nobody asked.
    compared_shards: int | None = None

    @property
    def is_paged(self) -> bool:
        """Whether the model's attention reads pages."""
        return self.host is not None and not self.host.not_paged

    @property
    def is_independent(self) -> bool:
        """Whether rows were proven not to depend on the batch that they are computed in. Nobody
        tries where attention is not paged.
        """
        return self.is_paged and self.host is not None and not self.host.not_independent

    def to_json(self) -> dict[str, Any]:
        """Returns all fields, and the schema and case that result files have."""
        found = asdict(self)
        greedy, positions = found.pop("greedy") or {}, found.pop("positions") or {}
        found |= {f"greedy_{key}": value for key, value in greedy.items()}
        found |= {f"positions_{key}": value for key, value in positions.items()}
        found |= {"attention_paged": self.is_paged, "rows_independent": self.is_independent}
        return {"schema": 1, "case": "verify", **found}


def judge(report: VerifyReport, layers: tuple[LayerSpec, ...]) -> None:
    """Adds a sentence to the report for everything that is beyond its bound. `layers` are those
    that have experts.
    """
    if len(report.layers) != len(layers):
        report.excesses.append(f"the forward pass called {len(report.layers)} of {len(layers)} layers with experts")
    for layer in report.layers:
        _judge_layer(report, layer)
    report.not_judged = _why_not_judged(report)
    _judge_positions(report)
    if report.not_judged:
        return
    bounds, greedy = report.bounds, report.greedy
    _check(report, "rms difference of the logits", report.logits_rms, bounds.logits_rms)
    _check(report, "largest difference of the logits", report.logits_max, bounds.logits_max)
    if greedy is not None and greedy.flip_gap is not None:
        _check(report, "gap of eager's top two logits where a greedy token differs", greedy.flip_gap, bounds.tie)


def _judge_positions(report: VerifyReport) -> None:
    found, bounds = report.positions, report.bounds
    if found is None:
        return
    what, where = "difference of the logits", f"at positions up to {found.last}"
    if not report.not_judged:
        _check(report, f"rms {what} {where}", found.logits_rms, bounds.logits_rms)
        _check(report, f"largest {what} {where}", found.logits_max, bounds.logits_max)
    elif report.rows_rms > 0.0:
        # Rounding by choice moves rows at the first positions as much.
        _check(report, f"{what} of a quarter of rows {where}", found.rows_rms, max(LEAST_FARTHER, FARTHER * report.rows_rms))


def _judge_layer(report: VerifyReport, layer: LayerParity) -> None:
    bounds, where = report.bounds, f"layer {layer.index} ({layer.name})"
    # Half of eager's error is out of reach where a class computes in float32 and rounds once. Such
    # a class is measured by its rounding.
    limit = max(bounds.error_ratio * layer.eager_error, ROUNDING_FACTOR * layer.rounding_error, MIN_ROUNDING,
                FLIPPED_STEPS * layer.activation_error)  # fmt: skip
    _check(report, f"{where}: error against float64", layer.remote_error, limit)
    is_coarser = layer.is_requantised or any(rounds_below(numerics, report.dtype) for numerics in layer.numerics)
    # A class whose rounding is no coarser than that of the model must be no further from the truth
    # than eager is.
    if not is_coarser and layer.is_rounded:
        _check(report, f"{where}: error against float64 with exact inputs", layer.class_error, layer.eager_error)
    if not is_coarser and layer.widened_rms is not None and layer.widened_judged_max is not None:
        # Eager has other weights than the checkpoint, and its difference says more of them.
        _check(report, f"{where}: rms difference from eager in float32", layer.widened_rms, bounds.difference_rms)
        _check(report, f"{where}: largest difference from eager in float32", layer.widened_judged_max, bounds.difference_max)
    elif not is_coarser:
        _check(report, f"{where}: rms difference from eager", layer.difference_rms, bounds.difference_rms)
        _check(report, f"{where}: largest difference from eager", layer.judged_max, bounds.difference_max)
    if not layer.equal_in_stream:
        report.excesses.append(f"{where}: stream mode gave other bits than batched mode")
    if layer.calls == 0 or layer.expected_calls not in (None, layer.calls):
        report.excesses.append(f"{where}: made {layer.calls} calls to workers, expected {layer.expected_calls}")


def _why_not_judged(report: VerifyReport) -> str:
    """Returns why the whole model may differ from eager by more than its bound, else nothing."""
    if report.bounds.logits_max is None:
        return f"the model runs in {report.dtype}"
    if any(layer.is_requantised for layer in report.layers):
        return "workers hold requantised weights"
    if any(layer.is_rounded for layer in report.layers):
        return "experts round their inputs"
    rounded = [numerics for numerics in report.host_numerics if rounds_below(numerics, report.dtype)]
    if rounded:
        return f"the host's linear layers round their inputs ({', '.join(rounded)})"
    if report.kv_dtype not in ("", report.dtype, "f32"):
        return f"keys and values are kept in {report.kv_dtype}"
    return ""


def _check(report: VerifyReport, what: str, found: float, limit: float | None) -> None:
    if limit is not None and not found <= limit:
        report.excesses.append(f"{what}: {found:.3g}, allowed {limit:.3g}")
