"""Data paths that are worn while one of their workers stands still: what that holds up, and what
not.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from dflash_moe.errors import ConfigError, DflashError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.holders import path_keeper
from dflash_moe.holders.fleet import Fleet
from dflash_moe.model.spec import ModelSpec
from dflash_moe.topology import Topology
from tests.expert_cases import call, make_batch
from tests.fault.conftest import freeze, wait_until

# Far above what any of these needs, so that nothing of it passes within a test.
NEVER_S = 300.0


@contextmanager
def with_worn_paths(spec: ModelSpec) -> Iterator[ExpertRuntime]:
    """Both workers' paths are worn, and the first one stands still."""
    settings = {"call_timeout_s": NEVER_S, "stall_timeout_s": NEVER_S}
    with ExpertRuntime.start(Topology.local(num_workers=2), model=spec, **settings) as runtime:
        first, second = (process.pid for process in runtime.worker_processes())
        try:
            freeze(first)
            freeze(second)
            while path_of(runtime, "w1") != "worn":
                runtime.submit(0, *make_batch(8))._call.abandon()
            os.kill(second, signal.SIGCONT)
            yield runtime
        finally:
            for pid in (first, second):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def retire(runtime: ExpertRuntime) -> None:
    """As a change of mode does with the first worker's path."""
    runtime._client.retire_path(0, "the test renews it")
    runtime._parts.paths._begin_to_renew(0, "the test renews it")


def path_of(runtime: ExpertRuntime, worker: str) -> str:
    return str(runtime.stats()["workers"][worker]["path"])


@pytest.mark.timeout(120)
def test_a_worker_that_answers_gets_its_path_while_another_does_not(spec: ModelSpec) -> None:
    with with_worn_paths(spec) as runtime:
        assert wait_until(lambda: path_of(runtime, "w1") == "fresh", 60)
        assert path_of(runtime, "w0") == "worn"


@pytest.mark.timeout(200)
def test_closing_does_not_wait_for_a_path_that_is_being_renewed(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_keeper, "STOP_S", NEVER_S)
    with with_worn_paths(spec) as runtime:
        assert wait_until(lambda: path_of(runtime, "w1") == "fresh", 60)
        runtime.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("dflash-path")]


def test_a_worker_that_stands_still_when_its_path_is_to_be_renewed_is_replaced(spec: ModelSpec) -> None:
    """However long calls may take: nobody judges the pulses of a worker whose path is retired."""
    settings = {"call_timeout_s": NEVER_S, "stall_timeout_s": 0.5, "restart_backoff_ms": (10, 50)}
    with ExpertRuntime.start(Topology.local(num_workers=2), model=spec, **settings) as runtime:
        frozen = runtime.worker_processes()[0].pid
        freeze(frozen)
        retire(runtime)
        assert wait_until(lambda: (found := runtime.workers()[0]).state == "ready" and found.deaths == 1, 90)
        assert not os.path.exists(f"/proc/{frozen}")
        call(runtime)


@pytest.mark.timeout(120)
def test_a_change_of_mode_that_waits_for_another_ends_with_the_runtime(spec: ModelSpec) -> None:
    ended: list[DflashError] = []

    def change() -> None:
        try:
            runtime.set_mode("stream")
        except DflashError as error:
            ended.append(error)

    with ExpertRuntime.start(Topology.local(num_workers=1), model=spec, call_timeout_s=NEVER_S) as runtime:
        runtime._client.hold(60.0)
        changing = threading.Thread(target=change)
        changing.start()
        call = runtime.submit(0, *make_batch(8))
        assert not call.done()
    with pytest.raises(DflashError, match="the runtime was closed before this call was done"):
        call.result(timeout=60)
    changing.join(60)
    assert not changing.is_alive()
    assert isinstance(ended[0], ConfigError)


def test_a_path_that_could_not_be_renewed_at_first_comes_back(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    attach, failures = Fleet.attach, [DflashError("no descriptor is left"), RuntimeError("out of luck")]

    def attach_at_last(fleet: Fleet, *arguments: object) -> object:
        if failures:
            raise failures.pop()
        return attach(fleet, *arguments)  # type: ignore[arg-type]

    with ExpertRuntime.start(Topology.local(num_workers=1), model=spec) as runtime:
        monkeypatch.setattr(Fleet, "attach", attach_at_last)
        retire(runtime)
        assert wait_until(lambda: path_of(runtime, "w0") == "fresh", 60)
        assert not failures
        call(runtime)


def test_a_runtime_may_be_collected_on_a_thread_of_its_own(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[bool] = []
    is_dropped = threading.Event()

    def collect(_self: object, _index: int, _renewal: object) -> None:
        is_dropped.wait(60)
        gc.collect()
        collected.append(True)

    runtime = ExpertRuntime.start(Topology.local(num_workers=1), model=spec)
    pid = runtime.worker_processes()[0].pid
    monkeypatch.setattr(path_keeper.PathKeeper, "_renew_worn", collect)
    gc.disable()
    try:
        cycle: list[object] = [runtime]
        cycle.append(cycle)
        retire(runtime)
        del runtime, cycle
        is_dropped.set()
        assert wait_until(lambda: bool(collected), 60)
        assert wait_until(lambda: not os.path.exists(f"/proc/{pid}"), 60)
    finally:
        gc.enable()
