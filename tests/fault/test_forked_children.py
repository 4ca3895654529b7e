"""A forked child has copies of a runtime's connections and child processes, and touches none of
them: what it asks raises there, and the parent's conversations go on undisturbed.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_moe.errors import DflashError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.topology import Topology
from tests.expert_cases import call
from tests.fault.conftest import StartWorker, far_topology, is_gone

NUM_QUESTIONS = 100
LOCKS = (type(threading.Lock()), type(threading.RLock()))
CHILD_ENDS_S = 60.0


def in_child(do: Callable[[], None]) -> int:
    """Starts `do` in a forked child, which exits with 0 where every use of it raised a
    DflashError.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            do()
            code = 0
        finally:
            os._exit(code)
    return pid


def refuses(use: Callable[[], object]) -> None:
    with pytest.raises(DflashError, match=r"belongs to the parent process; start one of your own after fork\(\)"):
        use()


def test_questions_of_a_child_raise_there_and_do_not_disturb_the_parents(spec: ModelSpec) -> None:
    with ExpertRuntime.start(Topology.local(num_workers=2), model=spec) as runtime:

        def ask_on() -> None:
            for _ in range(NUM_QUESTIONS):
                refuses(runtime.worker_stats)
            refuses(runtime.worker_processes)
            refuses(lambda: call(runtime))

        child = in_child(ask_on)
        for _ in range(NUM_QUESTIONS):
            assert set(runtime.worker_stats()) == {"w0", "w1"}
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        runtime.set_mode("stream")
        assert set(runtime.worker_stats()) == {"w0", "w1"}


@pytest.mark.parametrize("is_started", [True, False], ids=["started", "by hand"])
def test_endings_of_a_child_leave_the_parents_sessions_alone(
    spec: ModelSpec, tmp_path: Path, start_worker: StartWorker, is_started: bool
) -> None:
    topology = Topology.local()
    if not is_started:
        worker = start_worker(Path(spec.path), f"unix://{tmp_path}/far.sock")
        topology = far_topology(worker.address, has_near=False)
    with ExpertRuntime.start(topology, model=spec) as runtime:
        before = call(runtime)
        pid = runtime.worker_processes()[0].pid

        def end_all() -> None:
            for member in runtime._fleet.members.values():
                assert member.session is not None
                member.session.say_bye()
                member.session.hang_up()
                member.session.kill()
                member.session.close(seconds=0.0)
            runtime._fleet.kill()
            runtime._fleet.close()
            runtime.close()

        assert os.waitstatus_to_exitcode(os.waitpid(in_child(end_all), 0)[1]) == 0
        assert not is_gone(pid)
        assert len(runtime.worker_stats()) == 1
        assert np.array_equal(call(runtime), before)


def locks_of(runtime: ExpertRuntime) -> list[Any]:
    """Returns all locks that objects of this package hold which can be reached from a runtime."""
    found: list[Any] = []
    seen, pending = set(), [runtime._parts]
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, LOCKS):
            found.append(one)
        elif isinstance(one, (dict, list, tuple, set, threading.Event, threading.Condition)) or type(one).__module__.startswith(
            "dflash_moe"
        ):
            pending += gc.get_referents(one)
    return found


@contextmanager
def held_by_another_thread(locks: list[Any]) -> Iterator[int]:
    """Holds those that are free, which is any moment of the parent's threads at once."""
    num_held, is_held, is_over = 0, threading.Event(), threading.Event()

    def hold() -> None:
        nonlocal num_held
        with ExitStack() as held:
            for lock in locks:
                if lock.acquire(blocking=False):
                    held.callback(lock.release)
                    num_held += 1
            is_held.set()
            is_over.wait(CHILD_ENDS_S)

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait(CHILD_ENDS_S)
    try:
        yield num_held
    finally:
        is_over.set()
        holder.join()


def test_a_child_whose_copies_of_all_locks_are_held_ends(spec: ModelSpec) -> None:
    with ExpertRuntime.start(Topology.local(num_workers=2), model=spec) as runtime:
        before = call(runtime)

        def use_and_end() -> None:
            refuses(runtime.workers)
            refuses(runtime.stats)
            refuses(runtime.worker_stats)
            refuses(lambda: call(runtime))
            runtime.close()

        with held_by_another_thread(locks_of(runtime)) as num_held:
            assert num_held > 10
            child = in_child(use_and_end)
        until = time.monotonic() + CHILD_ENDS_S
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                pytest.fail("the child waits for a lock that nobody gives back in it")
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        assert np.array_equal(call(runtime), before)
