"""Workers whose pulse goes on and whose answers never come: a proxy on the way to one passes
handshakes, control and pulse, and no reply. Somebody answers in its place, it is given up, and once
it answers again it is used again.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest

from bench.campaigns.faults.proxies import DRIP, DROP, HALF, reached
from dflash_moe.errors import WorkerLost, WorkerTimeout
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from tests.expert_cases import call, expected_of
from tests.fault.conftest import state_of, wait_until

BACK_S = 90.0  # what has not happened by then does not happen


def used(runtime: ExpertRuntime) -> int:
    return int(runtime.stats()["workers"]["far"]["calls"])


@pytest.mark.parametrize("has_replica", [True, False])
@pytest.mark.parametrize("kind", [DROP, HALF, DRIP])
def test_every_call_is_answered_while_a_worker_answers_nothing(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, has_replica: bool
) -> None:
    monkeypatch.delenv("DFLASH_MOE_HOST_FALLBACK")
    with reached(spec, tmp_path, has_replica=has_replica, call_timeout_s=0.5) as (runtime, proxy):
        expected = expected_of(runtime)
        assert np.array_equal(call(runtime), expected)
        proxy.break_replies(kind)
        until = time.monotonic() + BACK_S
        # Twice, because it comes back and is as silent as before.
        while state_of(runtime, "far").deaths < 2 and time.monotonic() < until:
            assert np.array_equal(call(runtime), expected)
        assert state_of(runtime, "far").deaths >= 2
        proxy.heal()
        before = used(runtime)
        while used(runtime) < before + 10 and time.monotonic() < until:
            assert np.array_equal(call(runtime), expected)
        assert used(runtime) >= before + 10
        # On a busy machine it may just have been late once more.
        assert wait_until(lambda: state_of(runtime, "far").state == "ready", BACK_S)


def test_a_worker_that_comes_back_and_answers_nothing_again_and_again_is_left_alone(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DFLASH_MOE_HOST_FALLBACK")
    with reached(spec, tmp_path, has_replica=False, call_timeout_s=0.3, restart_deaths=3) as (runtime, proxy):
        expected = expected_of(runtime)
        assert np.array_equal(call(runtime), expected)
        proxy.break_replies(DROP)
        until = time.monotonic() + BACK_S
        while state_of(runtime, "far").state != "quarantined" and time.monotonic() < until:
            assert np.array_equal(call(runtime), expected)
        found = state_of(runtime, "far")
        assert (found.state, found.deaths) == ("quarantined", 3)
        assert "answers nothing although its pulse goes on" in found.reason
        assert np.array_equal(call(runtime), expected)
        proxy.heal()
        runtime.release("far")
        assert wait_until(lambda: state_of(runtime, "far").state == "ready", BACK_S)
        assert np.array_equal(call(runtime), expected)


def test_without_anybody_else_the_error_says_what_the_worker_does(spec: ModelSpec, tmp_path: Path) -> None:
    settings = {"host_fallback": "none", "restart": False, "park_s": 0}
    with reached(spec, tmp_path, has_replica=False, call_timeout_s=0.3, **settings) as (runtime, proxy):
        # From the first call on, because a busy machine may take longer for a whole one.
        proxy.break_replies(DROP)
        with pytest.raises(WorkerTimeout, match="worker far did not answer"):
            call(runtime)
        until = time.monotonic() + BACK_S
        while state_of(runtime, "far").state == "ready" and time.monotonic() < until:
            with contextlib.suppress(WorkerTimeout, WorkerLost):
                call(runtime)
        with pytest.raises(WorkerLost, match="answers nothing although its pulse goes on: no whole answer for 0"):
            call(runtime)
