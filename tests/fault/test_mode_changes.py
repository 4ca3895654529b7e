"""Changes of mode while workers stand still, die, come back, come new, or while this process has no
descriptor left: they end, calls go on, and nobody is blamed for what the host lacks.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dflash_moe.errors import DflashError, WorkerTimeout
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.holders.renewal import RENEWALS
from dflash_moe.holders.session import HostSession
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol.failures import system_failure
from dflash_moe.topology import Topology
from tests.expert_cases import call, make_batch
from tests.fault.conftest import freeze, is_gone, kill, pids, wait_until
from tests.fault.test_replicas import expected, start

# Far above what any of these needs, so that nothing of it passes within a test.
NEVER_S = 300.0
SOON_S = 60.0
# Calls are small, and a mode whose slots take so many rows needs other ones.
SMALL = {"mode": "batched", "batch_capacity": 64}
WIDE = 4096

Attach = Callable[..., Any]


def state_of(runtime: ExpertRuntime, worker: str) -> tuple[str, int]:
    return next((one.state, one.deaths) for one in runtime.workers() if one.name == worker)


def path_of(runtime: ExpertRuntime, worker: str) -> str:
    return str(runtime.stats()["workers"][worker]["path"])


def num_asked(runtime: ExpertRuntime, worker: str) -> int:
    return int(runtime.stats()["workers"][worker]["calls"])


def on_attach(monkeypatch: pytest.MonkeyPatch, worker: str, before: Callable[[HostSession], None]) -> None:
    """Has `before` called whenever a worker is asked for a data path."""
    attach: Attach = HostSession.attach

    def attach_then(session: HostSession, *args: Any, **how: Any) -> Any:
        if session.name == worker:
            before(session)
        return attach(session, *args, **how)

    monkeypatch.setattr(HostSession, "attach", attach_then)


@pytest.mark.timeout(150)
def test_a_frozen_worker_holds_up_no_change_of_mode_and_no_call_that_another_can_answer(spec: ModelSpec) -> None:
    right = expected(spec, [7, 600])
    never = {"stall_timeout_s": NEVER_S, "call_timeout_s": NEVER_S}
    with start(spec, replicas=2, **SMALL, **never) as runtime:
        frozen = pids(runtime)["w1"]
        freeze(frozen)
        try:
            for mode in ("batched", "stream", "batched"):
                runtime.set_mode(mode, batch_capacity=WIDE)
                for size in (7, 600):
                    assert np.array_equal(call(runtime, size), right[size])
            assert path_of(runtime, "w1") == "worn"
        finally:
            os.kill(frozen, signal.SIGCONT)
        assert wait_until(lambda: path_of(runtime, "w1") != "worn", SOON_S)
        assert state_of(runtime, "w1") == ("ready", 0)
        assert runtime._fleet.members["w1"].slots.rows >= WIDE
        before = num_asked(runtime, "w1")
        assert np.array_equal(call(runtime, 600), right[600])
        assert num_asked(runtime, "w1") > before


@pytest.mark.timeout(150)
def test_the_host_stands_in_for_a_worker_whose_path_is_late(spec: ModelSpec) -> None:
    right = expected(spec, [7])[7]
    never = {"stall_timeout_s": NEVER_S, "call_timeout_s": NEVER_S, "host_fallback": "mapped"}
    with start(spec, replicas=1, **SMALL, **never) as runtime:
        frozen = pids(runtime)["w1"]
        freeze(frozen)  # nothing is asked of it, so that no call suspects it
        try:
            runtime.set_mode("batched", batch_capacity=WIDE)
            assert np.array_equal(call(runtime, 7), right)
            assert path_of(runtime, "w1") == "worn"
            assert runtime.stats()["fallback"]["calls"] > 0
        finally:
            os.kill(frozen, signal.SIGCONT)
        assert wait_until(lambda: path_of(runtime, "w1") != "worn", SOON_S)


@pytest.mark.timeout(150)
def test_a_slow_worker_that_runs_is_not_given_up_for_its_path(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[int] = []

    def too_late(session: HostSession) -> None:
        attempts.append(1)
        if len(attempts) < RENEWALS:
            time.sleep(0.3)
            raise WorkerTimeout(f"worker {session.name} did not answer", worker=session.name)

    with start(spec, replicas=1, **SMALL) as runtime:
        on_attach(monkeypatch, "w1", too_late)
        runtime.set_mode("batched", batch_capacity=WIDE)
        call(runtime, 600)
        assert len(attempts) == RENEWALS
        assert state_of(runtime, "w1") == ("ready", 0)


@pytest.mark.timeout(150)
def test_a_worker_that_does_not_answer_in_a_change_of_mode_is_lost_and_comes_back_with_the_new_slots(spec: ModelSpec) -> None:
    settings = {"stall_timeout_s": 2.0, "call_timeout_s": NEVER_S, "restart_backoff_ms": (10, 50), "park_s": SOON_S}
    right = expected(spec, [7, 600])
    with start(spec, replicas=1, **SMALL, **settings) as runtime:
        frozen = pids(runtime)["w1"]
        freeze(frozen)
        runtime.set_mode("batched", batch_capacity=WIDE)
        assert np.array_equal(call(runtime, 7), right[7])  # it waits until the worker is back
        assert is_gone(frozen)
        assert wait_until(lambda: state_of(runtime, "w1") == ("ready", 1), SOON_S)
        assert np.array_equal(call(runtime, 600), right[600])


def test_a_worker_that_dies_in_a_change_of_mode_ends_it_for_nobody(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    right = expected(spec, [7])[7]
    with start(spec, replicas=2, restart=False, **SMALL) as runtime:
        assert np.array_equal(call(runtime, 7), right)
        victim = pids(runtime)["w1"]

        def kill(_session: HostSession) -> None:
            os.kill(victim, signal.SIGKILL)
            assert wait_until(lambda: is_gone(victim), SOON_S)

        on_attach(monkeypatch, "w1", kill)
        runtime.set_mode("batched", batch_capacity=WIDE)
        assert runtime.settings.batch_capacity == WIDE
        for _ in range(5):
            assert np.array_equal(call(runtime, 7), right)
        assert wait_until(lambda: state_of(runtime, "w1")[0] == "quarantined", SOON_S)


@pytest.mark.timeout(150)
def test_what_this_host_lacks_leaves_the_former_settings_and_blames_nobody(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = expected(spec, [7, 600])
    with start(spec, replicas=1, mode="batched", batch_capacity=WIDE) as runtime:
        lacks = threading.Event()
        lacks.set()

        def refuse(session: HostSession) -> None:
            if lacks.is_set():
                raise system_failure(f"worker {session.name}: attach a data path", OSError(errno.EMFILE, "Too many open files"))

        on_attach(monkeypatch, "w1", refuse)
        former = runtime.settings
        for _ in range(2):
            with pytest.raises(DflashError, match=r"^the former settings stay in force: worker w1.*ulimit -n") as caught:
                runtime.set_mode("stream", stream_tokens=16)
            assert caught.value.code == "system"
            assert runtime.settings == former
            assert runtime.stats()["mode"] == "batched"
        waiting = runtime.submit(0, *make_batch(600))
        assert not waiting.done()
        lacks.clear()
        assert np.array_equal(np.asarray(waiting.result(timeout=SOON_S)), right[600])
        assert [one.deaths for one in runtime.workers()] == [0, 0]
        runtime.set_mode("stream", stream_tokens=16)
        assert np.array_equal(call(runtime, 7), right[7])
        assert runtime.stats()["mode"] == "stream"


def change_meanwhile(
    runtime: ExpertRuntime,
    monkeypatch: pytest.MonkeyPatch,
    worker: str,
    begin: Callable[[], None],
) -> None:
    """Changes the mode while a worker is asked for a path, which `begin` leads to, and does not
    answer before the end.
    """
    is_asked, may_answer = threading.Event(), threading.Event()

    def hold_up(_session: HostSession) -> None:
        is_asked.set()
        may_answer.wait(NEVER_S)

    on_attach(monkeypatch, worker, hold_up)
    begin()
    assert is_asked.wait(SOON_S)
    try:
        changing = threading.Thread(target=runtime.set_mode, args=("batched",), kwargs={"batch_capacity": WIDE})
        changing.start()
        changing.join(SOON_S)
        assert not changing.is_alive()
        assert runtime.settings.batch_capacity == WIDE
    finally:
        may_answer.set()


@pytest.mark.timeout(150)
def test_a_worker_that_comes_back_holds_up_no_change_of_mode_and_gets_the_new_slots(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = expected(spec, [600])[600]
    with start(spec, replicas=2, restart_backoff_ms=(10, 50), **SMALL) as runtime:
        change_meanwhile(runtime, monkeypatch, "w1", lambda: kill(runtime, "w1"))
        assert np.array_equal(call(runtime, 600), right)
        assert wait_until(lambda: state_of(runtime, "w1") == ("ready", 1), SOON_S)
        assert runtime._fleet.members["w1"].slots.rows >= WIDE
        assert np.array_equal(call(runtime, 600), right)


@pytest.mark.timeout(150)
def test_a_worker_that_is_added_holds_up_no_change_of_mode_and_gets_the_new_slots(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = expected(spec, [600])[600]
    with ExpertRuntime.start(Topology.local(num_workers=2), model=spec, **SMALL) as runtime:
        adding = threading.Thread(target=runtime.add_worker, args=({"name": "w2", "threads": 1},))
        change_meanwhile(runtime, monkeypatch, "w2", adding.start)
        adding.join(SOON_S)
        assert runtime._fleet.members["w2"].slots.rows >= WIDE
        assert np.array_equal(call(runtime, 600), right)
