"""Sizes of data paths: from a mode and the layers of a worker to slots, rows per slot and (slice,
window). Pure functions.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.errors import ConfigError

if TYPE_CHECKING:
    from dflash_moe.config import Settings

DEFAULT_ARENA_BYTES = 256 << 20  # all workers together; `ipc.shared_bytes` raises it
BATCHED_WINDOW = 2  # one slice computing while the next travels
# at most: one slice on its way, one computing, one coming back, and one for the latency between
AUTO_WINDOW = 4
# small slices: enough in flight to cover a round trip of a worker that computes four rows a time
STREAM_WINDOW = 8
# room for another caller's slice, or for one quarantined slot before the path is renewed
SPARE_SLOTS = 1


@dataclass(frozen=True, slots=True)
class ShardShape:
    """What one shard of one layer contributes to a worker's slot size."""

    in_size: int
    out_size: int
    top_k: int
    num_experts: int  # in the shard


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """A mode, resolved: rows per slice, slices in flight, and rows a slot must hold."""

    mode: str
    slice_tokens: int
    window: int
    slot_rows: int

    @property
    def is_measured(self) -> bool:
        """True where `slice_tokens` and `window` are upper bounds and every worker's model chooses
        within them.
        """
        return self.mode == "auto"


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Geometry of one worker's data path, in bytes and slots, and the rows it was made for."""

    num_slots: int
    rows: int
    request_bytes: int
    reply_bytes: int

    @property
    def arena_bytes(self) -> int:
        """Both directions together."""
        return self.num_slots * (self.request_bytes + self.reply_bytes)

    def holds(self, other: SlotPlan) -> bool:
        """True when a path of this geometry serves what `other` was planned for."""
        return (
            self.num_slots >= other.num_slots
            and self.request_bytes >= other.request_bytes
            and self.reply_bytes >= other.reply_bytes
        )


def plan_slices(mode: str, *, batch_capacity: int, stream_tokens: int, stream_tokens_max: int) -> SlicePlan:
    """ConfigError on a mode that does not exist or when the stream's slice exceeds its maximum."""
    if mode == "auto":
        return SlicePlan("auto", batch_capacity, AUTO_WINDOW, batch_capacity)
    if mode == "batched":
        return SlicePlan("batched", batch_capacity, BATCHED_WINDOW, batch_capacity)
    if mode != "stream":
        raise ConfigError(f"mode {mode!r} is not one of auto, batched, stream")
    if not 1 <= stream_tokens <= stream_tokens_max:
        raise ConfigError(f"stream_tokens {stream_tokens} is outside 1..{stream_tokens_max} (stream_tokens_max)")
    return SlicePlan("stream", stream_tokens, STREAM_WINDOW, stream_tokens_max)


def slices_of(settings: Settings) -> SlicePlan:
    """What the settings make of calls. Errors as `plan_slices`."""
    return plan_slices(
        settings.mode,
        batch_capacity=settings.batch_capacity,
        stream_tokens=settings.stream_tokens,
        stream_tokens_max=settings.stream_tokens_max,
    )


def plan_slots(shards: Sequence[ShardShape], rows: int, num_slots: int, request_dtype: str, reply_dtype: str) -> SlotPlan:
    """The slots of one worker for messages of `rows` rows, wide enough for its widest layer.
    ConfigError over a limit.
    """
    header = _core.wire_limits()["frame_header_bytes"]
    max_pairs, max_pairs_per_row = _core.wire_limits()["max_pairs"], _core.wire_limits()["max_pairs_per_row"]
    request_bytes = reply_bytes = 0
    for shard in shards:
        pairs = min(max_pairs, rows * max(1, min(shard.top_k, shard.num_experts, max_pairs_per_row)))
        request = _core.request_layout(rows, pairs, shard.in_size, request_dtype)["payload_bytes"]
        reply = _core.reply_layout(rows, shard.out_size, reply_dtype)["payload_bytes"]
        request_bytes = max(request_bytes, header + request)
        reply_bytes = max(reply_bytes, header + reply)
    # an error must fit wherever a reply does
    error_bytes = header + 4 + _core.wire_limits()["max_error_text_bytes"]
    slots = SlotPlan(num_slots, rows, _round_up(request_bytes), _round_up(max(reply_bytes, error_bytes)))
    largest, limit = max(slots.request_bytes, slots.reply_bytes), _core.wire_limits()["max_slot_bytes"]
    if largest > limit:
        raise ConfigError(f"slots of {rows} rows need {largest} bytes, allowed are {limit}; lower batch_capacity")
    return slots


def plan_arena(
    shards: Mapping[str, Sequence[ShardShape]],
    slices: SlicePlan,
    request_dtype: str,
    reply_dtype: str,
    shared_bytes: int | None = None,
) -> dict[str, SlotPlan]:
    """The slots of every worker, together within max(256 MiB, `shared_bytes`).

    Where the arena is too small for full slices, all workers get fewer rows per slot; the client
    then splits slices and counts that. ConfigError when not even one row fits.
    """
    limit = max(DEFAULT_ARENA_BYTES, shared_bytes or 0)
    num_slots = slices.window + SPARE_SLOTS
    if slices.is_measured:
        return _plan_widest(shards, slices, request_dtype, reply_dtype, shared_bytes)

    def plan(rows: int) -> dict[str, SlotPlan]:
        return {name: plan_slots(own, rows, num_slots, request_dtype, reply_dtype) for name, own in shards.items()}

    def fits(rows: int) -> bool:
        try:
            return sum(slots.arena_bytes for slots in plan(rows).values()) <= limit
        except ConfigError:  # more than one message may carry
            return False

    if fits(slices.slot_rows):
        return plan(slices.slot_rows)
    if not fits(1):
        needed = sum(slots.arena_bytes for slots in plan(1).values())
        raise ConfigError(
            f"shared_bytes: one row per slot for {len(shards)} workers needs {needed} bytes, allowed are {limit}; "
            "raise ipc.shared_bytes"
        )
    low, high = 1, slices.slot_rows
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return plan(low)


def _plan_widest(
    shards: Mapping[str, Sequence[ShardShape]],
    slices: SlicePlan,
    request_dtype: str,
    reply_dtype: str,
    shared_bytes: int | None,
) -> dict[str, SlotPlan]:
    """The widest window whose slots still hold full slices; else the narrowest: whole chunks matter
    more than wide windows.
    """
    narrowest = min(BATCHED_WINDOW, slices.window)
    for window in range(slices.window, narrowest - 1, -1):
        fixed = SlicePlan("batched", slices.slice_tokens, window, slices.slot_rows)
        try:
            plans = plan_arena(shards, fixed, request_dtype, reply_dtype, shared_bytes)
        except ConfigError:  # not one row a slot: fewer slots may do
            if window == narrowest:
                raise
            continue
        if all(slots.rows == slices.slot_rows for slots in plans.values()):
            break
    return plans


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64
