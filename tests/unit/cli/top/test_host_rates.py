"""Two snapshots to rates, and whatever else may come in their place.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import random

import pytest

from dflash_moe.cli.top.host_rates import MAX_WORKERS, rates, read_snapshot
from dflash_moe.errors import ProtocolError

WORKER = {
    "name": "w0", "state": "ready", "reason": "", "transport": "shared", "rows": 100, "request_bytes": 1000, "reply_bytes": 500,
    "wait_ns": 10**9, "worker_compute_ns": 2 * 10**9, "worker_queue_ns": 0, "memory_bytes": 4096, "model_error": None,
}  # fmt: skip
ENGINE = {
    "steps": 10, "prompt_tokens": 5, "generated_tokens": 20, "running": 2, "waiting": 1,
    "blocks": {"total": 64, "free": 60, "cached": 3},
}  # fmt: skip
HOST = {
    "time_ns": 7 * 10**9, "pid": 4711, "model": "/m", "mode": "auto", "memory_bytes": 1 << 20, "workers": [WORKER],
    "engine": ENGINE,
}  # fmt: skip


def changed(**fields):
    return {**copy.deepcopy(HOST), **fields}


def test_rates_are_differences_per_time():
    later = {**WORKER, "rows": 300, "request_bytes": 5000, "wait_ns": 2 * 10**9, "worker_compute_ns": 5 * 10**9}
    later |= {"worker_queue_ns": 10**9, "model_error": 0.25}
    engine = {**ENGINE, "steps": 30, "generated_tokens": 60}
    after = changed(time_ns=9 * 10**9, workers=[later, {**WORKER, "name": "new"}], engine=engine)
    found = rates(read_snapshot(HOST), read_snapshot(after))
    assert (found.pid, found.seconds) == (4711, 2.0)
    one, new = found.workers
    assert (one.rows_per_s, one.request_bytes_per_s, one.reply_bytes_per_s) == (100.0, 2000.0, 0.0)
    assert (one.wait_share, one.busy_share, one.queued, one.model_error) == (0.5, 1.5, 0.5, 0.25)
    assert (new.name, new.rows_per_s, new.memory_bytes) == ("new", 0.0, 4096)
    assert found.engine is not None
    assert (found.engine.steps_per_s, found.engine.generated_per_s, found.engine.used_blocks) == (10.0, 20.0, 4)


def test_a_worker_that_counts_anew_and_equal_times_give_no_nonsense():
    found = rates(read_snapshot(HOST), read_snapshot(changed(workers=[{**WORKER, "rows": 1}], engine=None)))
    assert (found.workers[0].rows_per_s, found.engine) == (0.0, None)


def test_text_of_a_worker_cannot_command_a_terminal():
    found = read_snapshot(changed(workers=[{**WORKER, "reason": "\x1b[2J\nlost\udcff"}]))
    assert found.workers["w0"]["reason"] == "?[2J?lost?"


@pytest.mark.parametrize(
    "value",
    [
        None, [], "x", {}, changed(workers=None), changed(workers=[WORKER] * (MAX_WORKERS + 1)), changed(workers=[3]),
        changed(time_ns="1"), changed(time_ns=True), changed(time_ns=float("nan")), changed(pid=10**400), changed(pid=-1),
        changed(model="x" * 5000), changed(engine=[]), changed(engine={**ENGINE, "blocks": None}),
        changed(workers=[{**WORKER, "rows": float("inf")}]),
    ],
)  # fmt: skip
def test_what_is_no_snapshot_is_refused_by_name(value):
    with pytest.raises(ProtocolError, match="expected"):
        read_snapshot(value)


def test_any_damage_is_refused_or_read():
    """Each value of a snapshot is replaced by each of many, and nothing but ProtocolError comes."""
    wrong = [None, True, -1, 0, 1.5, 10**400, float("nan"), float("-inf"), "", "x" * 10**4, [], {}, [[]], {"a": {}}]
    rng = random.Random(1)
    places = [(), ("workers",), ("workers", 0), ("engine",), ("engine", "blocks")]
    for _ in range(3000):
        damaged = copy.deepcopy(HOST)
        at = damaged
        for key in rng.choice(places):
            at = at[key]
        key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        at[key] = rng.choice(wrong)
        try:
            rates(read_snapshot(HOST), read_snapshot(damaged))
        except ProtocolError as error:
            assert len(str(error)) < 300  # noqa: PT017 - either may happen
