"""Traces to timelines: one origin, foreign clocks aligned, stages summed.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from bench.lab.overlap import stage_times
from dflash_moe.bench.timeline import MAX_SLICES, clock_offset, layer_timeline

OFFSET = 5_000_000_000  # the worker's clock is five seconds ahead


def trace(start, *, worker=0, out=1000, back=1000, offset=0, slice_=0):
    """Encode 10 ns, `out` on the way, 50 ns in the queue, 400 ns of work, `back` on the way
    home.
    """
    received = start + 10 + out
    return {
        "call_id": 1, "layer": 2, "shard": worker, "worker": worker, "slice": slice_, "num_rows": 4, "encode_start_ns": start,
        "published_ns": start + 10, "worker_received_ns": received + offset, "worker_started_ns": received + 50 + offset,
        "worker_finished_ns": received + 450 + offset, "arrived_ns": received + 450 + back, "combined_ns": start + 9_000,
    }  # fmt: skip


def test_times_count_from_the_first_encode_in_order_of_encoding():
    timeline = layer_timeline([trace(700, slice_=1), trace(500)], ["w0"], ())
    assert [one["encode_start_ns"] for one in timeline["slices"]] == [0, 200]
    assert timeline["slices"][0]["worker_received_ns"] == 1010
    assert timeline["slices"][1]["slice"] == 1
    assert timeline["clock_offsets_ns"] == {"w0": 0}


def test_a_foreign_clock_is_aligned_at_the_quickest_round_trip():
    slow_way_out = trace(2000, worker=1, out=90_000, offset=OFFSET)
    quick = trace(5000, worker=1, out=800, back=1000, offset=OFFSET)
    # half the asymmetry of the quickest
    assert abs(clock_offset([slow_way_out, quick]) - OFFSET) <= 100
    timeline = layer_timeline([trace(0), slow_way_out, quick], ["w0", "w1"], {"w1"})
    assert timeline["clock_offsets_ns"]["w0"] == 0
    for one in timeline["slices"]:
        assert one["published_ns"] < one["worker_received_ns"] < one["worker_finished_ns"] < one["arrived_ns"]


def test_clocks_of_one_machine_are_taken_as_they_are():
    asymmetric = trace(0, out=10, back=5000)
    assert layer_timeline([asymmetric], ["w0"], ())["slices"][0]["worker_received_ns"] == 20


def test_slices_over_the_bound_are_counted():
    timeline = layer_timeline([trace(at) for at in range(MAX_SLICES + 3)], ["w0"], ())
    assert (len(timeline["slices"]), timeline["slices_left_out"]) == (MAX_SLICES, 3)


def test_stage_times_are_sums_and_the_wall():
    stages = stage_times(layer_timeline([trace(0), trace(100)], ["w0"], ())["slices"])
    assert stages == {"send_s": 2 * 1010e-9, "compute_s": 2 * 400e-9, "receive_s": 2 * 1000e-9, "wall_s": 2560e-9}
