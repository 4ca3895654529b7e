"""A forked child has copies of a runtime's connections and child processes, and touches none of
them: what it asks raises there, and the parent's conversations go on undisturbed.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dflash_moe.errors import DflashError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.topology import Topology
from tests.expert_cases import call
from tests.fault.conftest import StartWorker, far_topology, is_gone

NUM_QUESTIONS = 100


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
