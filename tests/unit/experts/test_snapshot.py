"""What a snapshot has of workers that are there, were removed or are coming, and how much of it
travels.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from dflash_moe.cli.top.host_rates import MAX_WORKERS, read_snapshot
from dflash_moe.experts.auto import worker_forecasts
from dflash_moe.experts.snapshot import COUNTED, brief, snapshot
from dflash_moe.holders.holder import WorkerState
from dflash_moe.protocol.control import MAX_LINE_BYTES

# About as much as a worker's log adds to a reason.
LONG_REASON = "its process has ended; last lines of its log: " + "x" * 4096


def holder(name: str, client_index: int, deaths: int = 0) -> Any:
    life = SimpleNamespace(num_deaths=deaths)
    return SimpleNamespace(name=name, client_index=client_index, transport="tcp", session=None, life=life)


def fleet(*members: Any, former: tuple[Any, ...] = (), arriving: tuple[Any, ...] = ()) -> Any:
    everybody = {one.name: one for one in (*former, *arriving, *members)}
    return SimpleNamespace(
        members={one.name: one for one in members}, former={one.name: one for one in former}, everybody=lambda: everybody
    )


def state(name: str, reason: str = "") -> WorkerState:
    return WorkerState(name, "lost" if reason else "ready", reason, 1.5, 3, None)


def counted(*workers: int, layers: int = 3) -> dict[tuple[int, int], dict[str, int]]:
    keys = (*COUNTED, "pairs")
    return {(worker, layer): dict.fromkeys(keys, 10 * worker + layer) for worker in workers for layer in range(layers)}


def taken(holders: Any, **changed: Any) -> dict[str, Any]:
    given = {
        "states": [state(name) for name in holders.members], "counted": counted(0, 1), "reports": [], "forecasts": (),
        "engine": None, **changed,
    }  # fmt: skip
    return snapshot("/m", "auto", holders, **given)


def chunk(cost_class: int, deviation: float) -> dict[str, Any]:
    return {
        "cost_class": cost_class, "num_tokens": 1, "num_chunks": 1, "num_slices": 1, "window": 2, "reason": "fixed",
        "forecast_ns": 1.0, "wait_ns": 0.0, "send_ns": 0.0, "compute_ns": 1.0, "receive_ns": 0.0, "considered": [],
        "predicted_ns": [1.0 + deviation], "measured_ns": [1.0],
    }  # fmt: skip


def test_counters_are_sums_over_layers() -> None:
    found = taken(fleet(holder("w0", 0), holder("w1", 1), holder("idle", 2)))
    assert [[row[key] for key in COUNTED] for row in found["workers"]] == [[n] * len(COUNTED) for n in (3, 33, 0)]
    assert found["others"] == []


def test_a_worker_that_was_removed_keeps_what_was_counted() -> None:
    found = taken(fleet(holder("w0", 0), former=(holder("w1", 1, deaths=2),)))
    assert [row["name"] for row in found["workers"]] == ["w0"]
    (former,) = found["others"]
    assert [former[key] for key in ("name", "state", "deaths", "rows", "floor_bytes")] == ["w1", "gone", 2, 33, 33]


def test_a_worker_that_leaves_or_joins_meanwhile_is_there_once() -> None:
    holders = fleet(holder("w0", 0), former=(holder("w1", 1),), arriving=(holder("w2", 2),))
    reports = [{"name": "w1", "state": "lost"}, {"name": "w2", "state": "ready"}]
    found = taken(holders, states=[state("w0"), state("w1")], reports=reports)
    assert [row["name"] for row in found["workers"]] == ["w0"]
    assert {row["name"]: row["state"] for row in found["others"]} == {"w1": "gone", "w2": "ready"}


def test_errors_of_predictions_are_medians_by_class_of_layers() -> None:
    line = {"fixed_ns": 0.0, "ns_per_byte": 1.0, "residual": 0.0}
    chunks = [chunk(1, 0.5), chunk(0, 0.25), chunk(0, 0.75), chunk(0, 0.25)]
    record = {"name": "w0", "send": line, "receive": line, "compute": {}, "clock_offset_ns": 0, "chunks": chunks}
    found = taken(fleet(holder("w0", 0)), forecasts=worker_forecasts([record]))
    assert found["prediction_errors"] == {"w0": [(0, 0.25), (1, 0.5)]}
    assert found["workers"][0]["model_error"] == 0.375


def test_what_travels_fits_an_answer_however_many_workers_were_lost_and_removed() -> None:
    members = [holder(f"worker-{place}", place) for place in range(MAX_WORKERS)]
    former = tuple(holder(f"former-{place}", MAX_WORKERS + place) for place in range(4 * MAX_WORKERS))
    large = {(one.client_index, 0): dict.fromkeys(COUNTED, 2**53) for one in members}
    states = [state(one.name, LONG_REASON) for one in members]
    blocks = {"total": 64, "free": 60, "cached": 3, "evicted": 0}
    engine: dict[str, Any] = {
        **dict.fromkeys(("steps", "failed_steps", "prompt_tokens", "cached_tokens", "generated_tokens"), 7), "blocks": blocks,
        **dict.fromkeys(("waiting", "running", "preemptions"), 1), "histograms": {"step_s": [0] * 10**6},
    }  # fmt: skip
    whole = taken(fleet(*members, former=former), states=states, counted=large, engine=lambda: engine)
    sent = brief(whole)
    assert len(json.dumps({"result": sent})) < MAX_LINE_BYTES / 2
    read = read_snapshot(json.loads(json.dumps(sent)))
    assert (len(read.workers), read.workers["worker-0"]["rows"]) == (MAX_WORKERS, 2**53)
    assert read.engine is not None
    assert read.engine["free"] == 60
    assert whole["workers"][0]["reason"] == LONG_REASON
