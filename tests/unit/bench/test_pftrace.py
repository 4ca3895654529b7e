"""Recordings to traces, read back with the message classes: nesting, flows, counters, clocks, and
a file that is whole or not there.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("perfetto", reason="the perfetto package is the extra `trace`")

from dflash_moe.bench.pftrace import trace_bytes, write_trace
from dflash_moe.bench.recording import RecordedRequest, RecordedWorker, Recording
from dflash_moe.engine.engine_stats import StepTimes
from dflash_moe.errors import DflashError
from tests.trace_reading import read_trace


def one_slice(start, *, call=1, worker=0, slice_=0, out=100, back=100):
    """Encode 10 ns, `out` on the way, 50 ns in the queue, 400 ns of work, `back` on the way
    home, combined 30 ns later.
    """
    received = start + 10 + out
    finished = received + 450
    return {
        "call_id": call, "layer": 2, "shard": worker, "worker": worker, "slice": slice_, "num_rows": 4,
        "begun_ns": start - 5, "encode_start_ns": start, "published_ns": start + 10,
        "worker_received_ns": received, "worker_started_ns": received + 50,
        "worker_finished_ns": finished, "arrived_ns": finished + back, "combined_ns": finished + back + 30,
    }  # fmt: skip


def recording(slices, steps=()):
    workers = (RecordedWorker("w0", "shared", 0, 0), RecordedWorker("far", "stream", 5000, 40))
    request = RecordedRequest(12, 1000, 1500, (4000, 6000))
    return Recording("/m", "auto", "f32", request, tuple(steps), workers, tuple(slices), is_cut=False)


def test_every_stage_of_a_slice_is_a_span_and_one_flow_leads_through_them():
    tracks = read_trace(trace_bytes(recording([one_slice(2000), one_slice(2020, worker=1, slice_=3)])))
    where = {(track.parent, track.name): track for track in tracks}
    assert list(where) == [
        (None, "host"), ("host", "request"), ("host", "calls"), ("host", "encode"), ("host", "wait"),
        ("host", "combine"), (None, "w0 (shared)"), ("w0 (shared)", "link out"), ("w0 (shared)", "queue"),
        ("w0 (shared)", "compute"), ("w0 (shared)", "link back"), ("w0 (shared)", "slices in flight"),
        ("w0 (shared)", "rows in flight"), (None, "far (stream)"), ("far (stream)", "link out"), ("far (stream)", "queue"),
        ("far (stream)", "compute"), ("far (stream)", "link back"), ("far (stream)", "slices in flight"),
        ("far (stream)", "rows in flight"),
    ]  # fmt: skip
    (compute,) = where["far (stream)", "compute"].spans
    assert (compute.begin, compute.end) == (2180, 2580)
    assert compute.arguments == {
        "call": 1, "layer": 2, "shard": 1, "slice": 3, "num_rows": 4, "clock_offset_ns": 5000, "clock_uncertainty_ns": 40,
        "measured_ns": 400,
    }  # fmt: skip
    stages = ("link out", "queue", "compute", "link back")
    flows = [where["far (stream)", stage].spans[0].flows for stage in stages]
    assert flows == [compute.flows] * 4
    assert where["host", "encode"].spans[1].flows == compute.flows
    (combine,) = where["host", "combine"].spans
    assert set(compute.flows) < set(combine.flows)
    assert (combine.begin, combine.end) == (2680, 2710)
    (wait,) = where["host", "wait"].spans
    assert (wait.begin, wait.end) == (2030, 2680)
    assert where["w0 (shared)", "rows in flight"].values == [(2010, 4), (2660, 0)]
    assert where["w0 (shared)", "slices in flight"].values == [(2010, 1), (2660, 0)]


def test_requests_and_steps_have_their_parts_within_them():
    steps = [StepTimes(1e-6, 1.5e-6, 3e-6, 3.5e-6, 4e-6, 12, 1), StepTimes(4e-6, 4.1e-6, 5e-6, 5.5e-6, 6e-6, 1, 1)]
    tracks = {(one.parent, one.name): one for one in read_trace(trace_bytes(recording([one_slice(2000)], steps)))}
    (request,) = tracks["host", "request"].spans
    assert [(one.name, one.begin, one.end) for one in request.children] == [
        ("queue", 1000, 1500), ("prefill", 1500, 4000), ("decode", 4000, 6000),
    ]  # fmt: skip
    first, second = tracks["host", "steps"].spans
    assert (first.name, first.begin, first.end, first.arguments) == ("step: 12 rows", 1000, 4000, {"rows": 12, "sequences": 1})
    assert [one.name for one in second.children] == ["plan", "forward", "sample", "commit"]


def test_spans_that_overlap_lie_in_tracks_of_their_own():
    slices = [one_slice(2000 + 100 * place, slice_=place) for place in range(5)]
    tracks = [one for one in read_trace(trace_bytes(recording(slices))) if one.name == "compute"]
    assert len(tracks) == 4
    assert sum(len(one.spans) for one in tracks) == 5


def test_a_way_that_seems_to_end_before_it_began_is_a_moment_beside_the_worker():
    slices = [one_slice(2000, worker=1, out=-30, back=-20)]
    tracks = {(one.parent, one.name): one for one in read_trace(trace_bytes(recording(slices)))}
    (out,), (back,) = tracks["far (stream)", "link out"].spans, tracks["far (stream)", "link back"].spans
    assert (out.begin, out.end, out.arguments["measured_ns"]) == (1980, 1980, -30)
    assert (back.begin, back.end, back.arguments["measured_ns"]) == (2430, 2430, -20)
    (compute,) = tracks["far (stream)", "compute"].spans
    assert compute.end - compute.begin == 400


def test_a_file_that_cannot_be_written_leaves_the_former_one(tmp_path):
    out = tmp_path / "run.pftrace"
    assert write_trace(recording([one_slice(2000)]), out) == out.stat().st_size
    before = out.read_bytes()
    (tmp_path / "run.pftrace.partial").mkdir()
    with pytest.raises(DflashError, match=r"run\.pftrace: cannot be written"):
        write_trace(recording([one_slice(3000)]), out)
    assert out.read_bytes() == before


def test_the_message_classes_bring_neither_network_nor_processes():
    found = subprocess.run(
        [
            sys.executable, "-c",
            "import sys\n"
            "said = ('socket.', 'subprocess.', 'urllib.')\n"
            "sys.addaudithook(lambda name, _: sys.exit(name) if name.startswith(said) else None)\n"
            "from dflash_moe.bench.pftrace import check_perfetto\n"
            "check_perfetto()\n"
            "assert not [one for one in sys.modules if one.startswith('perfetto.trace_processor')]\n",
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
