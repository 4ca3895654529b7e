"""Workers that are lost come back by themselves: started again or dialled again, with the same
weights, and their answers have the same bits. What does not come back says why.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_moe.errors import ConfigError, DflashError, WorkerError, WorkerLost
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.holders.fleet import Fleet
from dflash_moe.model.spec import ModelSpec
from dflash_moe.topology import Topology
from tests.expert_cases import call, expected_of, make_batch, make_checkpoint, tiny_spec
from tests.fault.conftest import (
    StartWorker,
    calls_of_two,
    children_of,
    far_topology,
    flip_a_bit,
    freeze,
    is_gone,
    kill,
    pids,
    state_of,
    wait_until,
)

# A busy machine starts a worker in much less; a test that does not fail never waits so long.
BACK_S = 90.0
# Pauses that no test has to wait for, and deaths that none of them reaches.
QUICK: dict[str, Any] = {"restart_backoff_ms": (10, 50), "restart_deaths": 1000}


def start(spec: ModelSpec, num_workers: int = 2, *, address: str | None = None, **overrides: Any) -> ExpertRuntime:
    topology = Topology.local(num_workers=num_workers, address=address)
    return ExpertRuntime.start(topology, model=spec, **{**QUICK, **overrides})


def is_away(runtime: ExpertRuntime, worker: str) -> bool:
    return state_of(runtime, worker).state != "ready"


def is_back(runtime: ExpertRuntime, worker: str, deaths: int) -> Callable[[], bool]:
    return lambda: (found := state_of(runtime, worker)).state == "ready" and found.deaths == deaths


@pytest.mark.parametrize("address", [None, "unix", "tcp"])
def test_calls_wait_for_a_killed_worker_and_none_of_them_fails(spec: ModelSpec, address: str | None) -> None:
    with start(spec, address=address, park_s=BACK_S, call_timeout_s=2 * BACK_S) as runtime:
        expected = expected_of(runtime)
        with calls_of_two(partial(call, runtime)) as found:
            for deaths in (1, 2):
                kill(runtime, "w0", "w1")
                for worker in ("w0", "w1"):
                    assert wait_until(is_back(runtime, worker, deaths), BACK_S)
        assert found
        assert all(np.array_equal(one, expected) for one in found), [one for one in found if isinstance(one, Exception)]


@pytest.mark.parametrize("address", [None, "unix", "tcp"])
def test_a_started_worker_killed_under_load_is_back_by_itself_with_equal_bits(spec: ModelSpec, address: str | None) -> None:
    with start(spec, address=address, park_s=0) as runtime:
        expected = expected_of(runtime)
        victims = []
        with calls_of_two(partial(call, runtime)) as found:
            for deaths in (1, 2, 3):
                victims.append(pids(runtime)["w1"])
                os.kill(victims[-1], signal.SIGKILL)
                assert wait_until(is_back(runtime, "w1", deaths), BACK_S)
        errors = [one for one in found if isinstance(one, Exception)]
        assert all(isinstance(error, WorkerLost) and error.worker == "w1" for error in errors), errors
        assert all(np.array_equal(one, expected) for one in found if not isinstance(one, Exception))
        assert np.array_equal(call(runtime), expected)
        # No zombie is left of those that were replaced.
        assert not any(os.path.exists(f"/proc/{pid}") for pid in victims)
        assert len(children_of(os.getpid())) == 2
        assert state_of(runtime, "w0").deaths == 0


def test_the_loss_says_what_is_done_about_it(spec: ModelSpec) -> None:
    with start(spec, park_s=0) as runtime:
        pid = pids(runtime)["w1"]
        freeze(pid)
        waiting = runtime.submit(0, *make_batch(20))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLost) as caught:
            waiting.result(timeout=BACK_S)
        text = str(caught.value)
        assert "it is being started again" in text
        assert "was killed by SIGKILL" in text
        assert "anew" not in text


def test_an_idle_worker_that_dies_is_back_before_anybody_calls(spec: ModelSpec) -> None:
    with start(spec) as runtime:
        expected = expected_of(runtime)
        kill(runtime, "w0")
        assert wait_until(is_back(runtime, "w0", 1), BACK_S)
        assert np.array_equal(call(runtime), expected)


def test_a_stopped_worker_is_replaced_and_its_process_does_not_stay(spec: ModelSpec) -> None:
    with start(spec, stall_timeout_s=0.5, park_s=0) as runtime:
        expected = expected_of(runtime)
        pid = pids(runtime)["w1"]
        freeze(pid)
        with pytest.raises(WorkerLost, match="no progress"):
            call(runtime)
        assert wait_until(is_back(runtime, "w1", 1), BACK_S)
        assert not os.path.exists(f"/proc/{pid}")
        assert np.array_equal(call(runtime), expected)


def test_a_crash_loop_is_left_alone_and_release_starts_it_again(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker that is started again is killed while it loads."""
    load, is_sick = Fleet.load_again, True

    def die(fleet: Fleet, member: Any, shards: Any) -> None:
        if is_sick:
            os.kill(member.session.pid, signal.SIGKILL)
        load(fleet, member, shards)

    monkeypatch.setattr(Fleet, "load_again", die)
    with start(spec, restart_deaths=4) as runtime:
        expected = expected_of(runtime)
        kill(runtime, "w1")
        assert wait_until(lambda: state_of(runtime, "w1").state == "quarantined", BACK_S)
        found = state_of(runtime, "w1")
        assert found.deaths == 4
        assert "4 deaths within 60 s" in found.reason
        with pytest.raises(WorkerLost, match=r"left alone.*4 deaths.*runtime\.release\('w1'\)"):
            call(runtime)
        assert len(children_of(os.getpid())) == 1
        with pytest.raises(ConfigError, match="worker w0 is ready and not quarantined"):
            runtime.release("w0")
        with pytest.raises(ConfigError, match="no worker is named 'w9'"):
            runtime.release("w9")
        is_sick = False
        runtime.release("w1")
        assert wait_until(lambda: state_of(runtime, "w1").state == "ready", BACK_S)
        assert np.array_equal(call(runtime), expected)


def test_a_loading_that_never_answers_ends_at_its_limit_and_is_tried_again(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, frozen = Fleet.load_again, []

    def hang(fleet: Fleet, member: Any, shards: Any) -> None:
        if not frozen:
            frozen.append(member.session.pid)
            freeze(member.session.pid)
        load(fleet, member, shards)

    monkeypatch.setattr(Fleet, "load_again", hang)
    with start(spec, start_timeout_s=5.0) as runtime:
        kill(runtime, "w1")
        assert wait_until(is_back(runtime, "w1", 2), BACK_S)
        assert is_gone(frozen[0])
        assert np.array_equal(call(runtime), expected_of(runtime))


@pytest.mark.parametrize("at", ["start_again", "load_again", "attach"])
def test_close_in_the_middle_of_a_return_leaves_nothing(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """The worker that comes back stands still, so that only `close` ends its return."""
    step, frozen, is_started = getattr(Fleet, at), [], threading.Event()

    def hang(fleet: Fleet, member: Any, *arguments: Any) -> Any:
        if is_started.is_set() and at != "start_again":
            freeze(member.session.pid)
            frozen.append(member.session.pid)
        elif is_started.is_set():
            frozen.append(0)
        return step(fleet, member, *arguments)

    monkeypatch.setattr(Fleet, at, hang)
    runtime = start(spec)
    try:
        is_started.set()
        kill(runtime, "w1")
        assert wait_until(lambda: bool(frozen), BACK_S)
    finally:
        started = time.monotonic()
        runtime.close()
    assert time.monotonic() - started < BACK_S / 2
    assert all(pid == 0 or is_gone(pid) for pid in frozen)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("dflash-")]
    assert not children_of(os.getpid())


def test_a_runtime_that_nobody_closed_leaves_no_returning_worker(spec: ModelSpec) -> None:
    runtime = start(spec)
    kill(runtime, "w1")
    assert wait_until(partial(is_away, runtime, "w1"), BACK_S)
    del runtime
    gc.collect()
    assert wait_until(lambda: not children_of(os.getpid()), BACK_S)


def test_a_forked_child_is_refused_and_disturbs_no_return(spec: ModelSpec) -> None:
    with start(spec) as runtime:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                runtime.workers()
            except DflashError as error:
                code = 0 if "parent process" in str(error) else 2
            runtime.close()
            os._exit(code)
        kill(runtime, "w1")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert wait_until(is_back(runtime, "w1", 1), BACK_S)
        assert np.array_equal(call(runtime), expected_of(runtime))


# -- workers that somebody starts by hand ----------------------------------------------------------


def reach(spec: ModelSpec, address: str, **overrides: Any) -> ExpertRuntime:
    return ExpertRuntime.start(far_topology(address), model=spec, **{**QUICK, **overrides})


def test_a_worker_started_by_hand_is_dialled_until_it_is_back(
    spec: ModelSpec, tmp_path: Path, start_worker: StartWorker
) -> None:
    address = f"unix://{tmp_path}/far.sock"
    worker = start_worker(Path(spec.path), address)
    # More tries than deaths are allowed: out of reach is no death.
    with reach(spec, address, restart_deaths=2, park_s=0) as runtime:
        expected = expected_of(runtime)
        assert np.array_equal(call(runtime), expected)
        worker.process.kill()
        worker.process.wait(60)
        assert wait_until(lambda: "cannot be reached" in state_of(runtime, "far").reason, BACK_S)
        with pytest.raises(WorkerLost, match="dialled again until it is back"):
            call(runtime)
        assert state_of(runtime, "far").deaths == 1
        start_worker(Path(spec.path), address)
        assert wait_until(is_back(runtime, "far", 1), BACK_S)
        assert np.array_equal(call(runtime), expected)


def test_a_worker_started_by_hand_that_was_stopped_is_back_once_it_goes_on(
    spec: ModelSpec, tmp_path: Path, start_worker: StartWorker
) -> None:
    address = f"unix://{tmp_path}/far.sock"
    worker = start_worker(Path(spec.path), address)
    with reach(spec, address, stall_timeout_s=0.5, park_s=0) as runtime:
        expected = expected_of(runtime)
        freeze(worker.process.pid)
        with pytest.raises(WorkerLost, match="no progress"):
            call(runtime)
        assert wait_until(partial(is_away, runtime, "far"), BACK_S)
        os.kill(worker.process.pid, signal.SIGCONT)
        assert wait_until(lambda: not is_away(runtime, "far"), BACK_S)
        assert np.array_equal(call(runtime), expected)
        assert worker.process.poll() is None


def test_a_worker_whose_checkpoint_changed_meanwhile_is_refused_and_says_so(tmp_path: Path, start_worker: StartWorker) -> None:
    spec = tiny_spec(make_checkpoint(tmp_path / "ours"))
    theirs = tmp_path / "theirs"
    shutil.copytree(spec.path, theirs)
    address = f"unix://{tmp_path}/far.sock"
    worker = start_worker(theirs, address)
    with reach(spec, address) as runtime:
        expected = expected_of(runtime)
        worker.process.kill()
        worker.process.wait(60)
        flip_a_bit(theirs)
        second = start_worker(theirs, address)
        assert wait_until(lambda: state_of(runtime, "far").state == "quarantined", BACK_S)
        reason = state_of(runtime, "far").reason
        assert "worker far has loaded content checksum" in reason
        assert "its checkpoint has changed meanwhile" in reason
        with pytest.raises(WorkerError, match="left alone.*its checkpoint has changed meanwhile"):
            call(runtime)
        second.process.kill()
        second.process.wait(60)
        flip_a_bit(theirs)
        start_worker(theirs, address)
        runtime.release("far")
        assert wait_until(lambda: state_of(runtime, "far").state == "ready", BACK_S)
        assert np.array_equal(call(runtime), expected)
