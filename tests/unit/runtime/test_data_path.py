"""Slot sizes: full slices fit where the arena allows it, and shrink evenly where it does not.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

from dflash_moe import _core
from dflash_moe.errors import ConfigError
from dflash_moe.runtime.data_path import (
    DEFAULT_ARENA_BYTES,
    ShardShape,
    SlotPlan,
    plan_arena,
    plan_slices,
    plan_slots,
)

WIDE = ShardShape(in_size=2048, out_size=2048, top_k=8, num_experts=16)
SMALL = ShardShape(in_size=64, out_size=32, top_k=8, num_experts=2)
CAPS = {"batch_capacity": 1024, "stream_tokens": 4, "stream_tokens_max": 32}


def test_auto_is_bounded_by_the_capacity_and_stream_has_its_own_slice_and_window() -> None:
    auto, batched = plan_slices("auto", **CAPS), plan_slices("batched", **CAPS)
    assert auto.is_measured
    assert not batched.is_measured
    assert (auto.slice_tokens, auto.slot_rows) == (batched.slice_tokens, batched.slot_rows)
    assert auto.window > batched.window
    stream = plan_slices("stream", **CAPS)
    assert (stream.slice_tokens, stream.slot_rows) == (4, 32)
    assert stream.window > plan_slices("batched", **CAPS).window


@pytest.mark.parametrize("change", [{"stream_tokens": 33}, {"stream_tokens": 0}])
def test_a_stream_slice_outside_its_bounds_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"outside 1\.\.32"):
        plan_slices("stream", **{**CAPS, **change})


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="'turbo' is not one of auto, batched, stream"):
        plan_slices("turbo", **CAPS)


@pytest.mark.parametrize("rows", [1, 7, 1024])
def test_a_slot_holds_a_full_slice_of_the_widest_layer(rows: int) -> None:
    slots = plan_slots([SMALL, WIDE], rows, 3, "f32", "bf16")
    request = 64 + _core.request_layout(rows, rows * 8, 2048, "f32")["payload_bytes"]
    reply = 64 + _core.reply_layout(rows, 2048, "bf16")["payload_bytes"]
    assert 0 <= slots.request_bytes - request < 64
    assert slots.reply_bytes >= reply
    assert slots.request_bytes % 64 == slots.reply_bytes % 64 == 0


def test_pairs_are_bounded_by_the_experts_of_the_shard() -> None:
    few = plan_slots([SMALL], 100, 3, "f32", "f32").request_bytes
    many = plan_slots([ShardShape(64, 32, 8, 8)], 100, 3, "f32", "f32").request_bytes
    assert many - few == pytest.approx(100 * 6 * 6, abs=64)


def test_an_error_text_fits_where_a_reply_does() -> None:
    slots = plan_slots([SMALL], 1, 2, "bf16", "bf16")
    assert slots.reply_bytes >= 64 + 4 + _core.wire_limits()["max_error_text_bytes"]


def test_full_slices_where_the_arena_is_large_enough() -> None:
    plans = plan_arena({"w0": [WIDE], "w1": [WIDE]}, plan_slices("batched", **CAPS), "f32", "f32")
    assert {plan.rows for plan in plans.values()} == {1024}
    assert sum(plan.arena_bytes for plan in plans.values()) <= DEFAULT_ARENA_BYTES


def test_many_workers_share_the_arena_by_fewer_rows_each() -> None:
    workers = {f"w{index}": [WIDE] for index in range(64)}
    slices = plan_slices("batched", **CAPS)
    plans = plan_arena(workers, slices, "f32", "f32")
    (rows,) = {plan.rows for plan in plans.values()}
    assert 1 <= rows < 1024
    assert sum(plan.arena_bytes for plan in plans.values()) <= DEFAULT_ARENA_BYTES
    more = {name: plan_slots(own, rows + 1, slices.window + 1, "f32", "f32") for name, own in workers.items()}
    assert sum(plan.arena_bytes for plan in more.values()) > DEFAULT_ARENA_BYTES


def test_shared_bytes_raises_the_limit_and_never_lowers_it() -> None:
    workers = {f"w{index}": [WIDE] for index in range(64)}
    slices = plan_slices("batched", **CAPS)
    computed = plan_arena(workers, slices, "f32", "f32")
    assert plan_arena(workers, slices, "f32", "f32", 1 << 20) == computed
    assert plan_arena(workers, slices, "f32", "f32", 1 << 30)["w0"].rows > computed["w0"].rows


def test_not_even_one_row_is_an_error_with_the_numbers() -> None:
    widest = ShardShape(65536, 65536, 8, 16)
    with pytest.raises(ConfigError, match=r"one row per slot for 400 workers needs \d+ bytes, allowed are 268435456"):
        plan_arena({f"w{index}": [widest] for index in range(400)}, plan_slices("batched", **CAPS), "f32", "f32")


def test_a_path_serves_smaller_plans_only() -> None:
    large, small = SlotPlan(9, 8, 6400, 6400), SlotPlan(3, 8, 640, 6400)
    assert large.holds(small)
    assert large.holds(large)
    assert not small.holds(large)


@pytest.mark.parametrize(("hidden", "num_workers"), [(512, 2), (4096, 2), (4096, 8)])
def test_auto_narrows_its_window_before_it_gives_up_full_slices(hidden: int, num_workers: int) -> None:
    shards = {f"w{i}": [ShardShape(hidden, hidden, 8, 16)] for i in range(num_workers)}
    auto = plan_arena(shards, plan_slices("auto", **CAPS), "f32", "f32")
    batched = plan_arena(shards, plan_slices("batched", **CAPS), "f32", "f32")
    assert sum(slots.arena_bytes for slots in auto.values()) <= DEFAULT_ARENA_BYTES
    for name, slots in auto.items():
        assert slots.rows >= batched[name].rows
        assert slots.num_slots >= batched[name].num_slots
    assert (auto["w0"].num_slots > batched["w0"].num_slots) == (hidden == 512)


def test_auto_takes_fewer_slots_where_one_row_each_of_the_wide_window_would_not_fit() -> None:
    widest = ShardShape(in_size=65536, out_size=65536, top_k=1, num_experts=1)
    shards = {f"w{i}": [widest] for i in range(150)}
    plans = plan_arena(shards, plan_slices("auto", **CAPS), "f32", "f32")
    assert {slots.num_slots for slots in plans.values()} == {3}
    assert sum(slots.arena_bytes for slots in plans.values()) <= DEFAULT_ARENA_BYTES
