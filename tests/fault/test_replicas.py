"""Workers that die or freeze while another one holds their shards: no call fails, no bit changes,
and what happened is counted.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from dflash_moe.errors import WorkerLost
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from tests.expert_cases import call, local_topology, make_batch
from tests.fault.conftest import FAR, freeze, kill, pids


def start(spec: ModelSpec, *, replicas: int, address: str | None = None, **overrides: Any) -> ExpertRuntime:
    return ExpertRuntime.start(local_topology(replicas=replicas, address=address), model=spec, **{**FAR, **overrides})


def call_often(runtime: ExpertRuntime) -> None:
    """A killed worker may still answer what it has."""
    for _ in range(1000):
        call(runtime, 7)


def expected(spec: ModelSpec, sizes: list[int]) -> dict[int, np.ndarray[Any, Any]]:
    """The results of the same shards without replicas and without a fault."""
    with start(spec, replicas=1) as runtime:
        return {size: call(runtime, size) for size in sizes}


@pytest.mark.parametrize("address", [None, "unix", "tcp"])
def test_a_killed_worker_costs_no_call_and_no_bit(spec: ModelSpec, address: str | None) -> None:
    sizes = [1, 7, 200]
    right = expected(spec, sizes)
    with start(spec, replicas=2, address=address) as runtime:
        for size in sizes:
            assert np.array_equal(call(runtime, size), right[size])
        before = runtime.stats()["totals"]
        assert before["failovers"] == 0
        waiting = [runtime.submit(0, *make_batch(200)) for _ in range(3)]
        kill(runtime, "w1")
        for one in waiting:
            assert np.array_equal(np.asarray(one.result()), right[200])
        for _ in range(5):
            for size in sizes:
                assert np.array_equal(call(runtime, size), right[size])


def test_replicas_cost_neither_bytes_nor_calls_without_a_fault(spec: ModelSpec) -> None:
    counted = {}
    for replicas in (1, 2):
        with start(spec, replicas=replicas) as runtime:
            for _ in range(20):
                call(runtime, 16)
            totals = runtime.stats()["totals"]
        counted[replicas] = {key: totals[key] for key in ("calls", "rows", "pairs", "request_bytes", "floor_bytes")}
        # On a busy machine a second holder may have been asked, and have answered first.
        counted[replicas]["all reply bytes"] = totals["reply_bytes"] + totals["hedge_reply_bytes"]
    assert counted[1] == counted[2]


def test_a_frozen_worker_is_answered_for_and_is_not_given_up(spec: ModelSpec) -> None:
    right = expected(spec, [7])[7]
    with start(spec, replicas=2) as runtime:
        assert np.array_equal(call(runtime, 7), right)
        frozen = pids(runtime)["w1"]
        freeze(frozen)
        try:
            for _ in range(10):
                assert np.array_equal(call(runtime, 7), right)
            assert runtime.stats()["totals"]["hedges_won"] >= 1
        finally:
            os.kill(frozen, signal.SIGCONT)
        until = time.monotonic() + 60
        while runtime.stats()["workers"]["w1"]["state"] != "ready" and time.monotonic() < until:
            assert np.array_equal(call(runtime, 7), right)
        assert runtime.stats()["workers"]["w1"]["state"] == "ready"
        assert np.array_equal(call(runtime, 7), right)


def test_with_all_holders_gone_the_error_names_them(spec: ModelSpec) -> None:
    with start(spec, replicas=2, restart=False) as runtime:
        call(runtime, 7)
        kill(runtime, "w0", "w1")
        with pytest.raises(WorkerLost) as caught:
            call_often(runtime)
        assert "worker w0 was lost" in str(caught.value)
        assert "worker w1 was lost" in str(caught.value)
