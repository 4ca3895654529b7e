"""Workers that die, freeze, or answer garbage in a call: a typed error within its deadline, and no
process left.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from dflash_moe import _core
from dflash_moe.errors import DflashError, ProtocolError, WorkerError, WorkerLost, WorkerTimeout
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.topology import Emulate, Topology
from tests.expert_cases import call, expected_of, local_topology, make_batch
from tests.fault.conftest import FAR, freeze, is_gone, kill, pids, states, wait_until

SOON_S = 45.0  # half of FAR's limits; a busy machine is not that slow
SLOW = Emulate(slowdown=3000.0)  # a call takes a second at least; no test waits for its end


def start(spec: ModelSpec, *, address: str | None = None, emulate: Emulate | None = None, **overrides: Any) -> ExpertRuntime:
    # Calls do not wait for a worker to come back: this is about how they end.
    topology = local_topology(address=address, emulate=emulate)
    return ExpertRuntime.start(topology, model=spec, **{"park_s": 0, **overrides})


def call_until_lost(runtime: ExpertRuntime) -> None:
    """A killed worker may answer what it already has; the loss is seen within a second."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        call(runtime)


@pytest.mark.parametrize(("address", "encryption"), [(None, "auto"), ("unix", "auto"), ("tcp", "auto"), ("tcp", "on")])
def test_a_worker_killed_in_a_call_is_lost_with_its_name_signal_and_log(
    spec: ModelSpec, address: str | None, encryption: str
) -> None:
    with start(spec, address=address, emulate=SLOW, encryption=encryption, **FAR) as runtime:
        victims = pids(runtime)
        waiting = runtime.submit(0, *make_batch(200))
        os.kill(victims["w1"], signal.SIGKILL)
        with pytest.raises(WorkerLost) as caught:
            waiting.result(timeout=SOON_S)
        text = str(caught.value)
        assert "w1" in text
        assert "layers.0.experts" in text
        assert "was killed by SIGKILL" in text
        assert "session opened" in text  # the log's last lines
    assert all(is_gone(pid) for pid in victims.values())


def test_an_error_names_its_worker_in_a_field_and_quotes_that_workers_log_only(spec: ModelSpec) -> None:
    """`w1` begins the name of `w10`: whoever looks for names in words finds the wrong worker."""
    topology = Topology.local(num_workers=2, address="unix")
    names = ("w1", "w10")
    workers = tuple(dataclasses.replace(worker, name=name) for worker, name in zip(topology.workers, names, strict=True))
    with ExpertRuntime.start(dataclasses.replace(topology, workers=workers), model=spec, park_s=0) as runtime:
        victims = pids(runtime)
        os.kill(victims["w10"], signal.SIGKILL)
        with pytest.raises(WorkerLost) as caught:
            call_until_lost(runtime)
        assert (caught.value.worker, caught.value.layer, caught.value.code) == ("w10", 0, "worker_lost")
        assert f"process {victims['w10']} was killed by SIGKILL" in str(caught.value)
        assert f"process {victims['w1']} " not in str(caught.value)


def test_calls_after_a_loss_fail_at_once_and_leaving_the_block_raises_nothing(spec: ModelSpec) -> None:
    with start(spec, restart=False, **FAR) as runtime:
        call(runtime)
        kill(runtime, "w0")
        started = time.monotonic()
        for _ in range(3):
            with pytest.raises(WorkerLost, match="w0"):
                call(runtime)
        assert time.monotonic() - started < SOON_S
        assert runtime.stats()["workers"]["w0"]["state"] == "lost"


@pytest.mark.parametrize("overrides", [{}, {"address": "tcp", "encryption": "on"}], ids=["shared", "tls"])
def test_a_stopped_worker_is_lost_after_the_stall_timeout_not_earlier(spec: ModelSpec, overrides: dict[str, Any]) -> None:
    with start(spec, stall_timeout_s=1.0, call_timeout_s=90.0, **overrides) as runtime:
        call(runtime)
        victims = pids(runtime)
        freeze(victims["w1"])
        started = time.monotonic()
        with pytest.raises(WorkerLost, match="w1"):
            call(runtime)
        assert 0.8 < time.monotonic() - started < SOON_S
        assert wait_until(lambda: is_gone(victims["w1"]), SOON_S)  # it is no use any more
    assert all(is_gone(pid) for pid in victims.values())


def test_a_mode_that_needs_new_slots_is_taken_without_a_lost_worker_and_fits_it_when_it_is_back(spec: ModelSpec) -> None:
    with start(spec, stall_timeout_s=0.5, call_timeout_s=90.0, batch_capacity=64, restart=False) as runtime:
        expected = expected_of(runtime, 600)
        call(runtime)
        freeze(pids(runtime)["w1"])
        with pytest.raises(WorkerLost, match="w1"):
            call(runtime)
        started = time.monotonic()
        runtime.set_mode("batched", batch_capacity=4096)
        assert time.monotonic() - started < SOON_S
        assert runtime.stats()["slice_tokens"] == 4096
        with pytest.raises(WorkerLost, match="w1"):
            call(runtime)
        assert wait_until(lambda: states(runtime)["w1"] == "quarantined", SOON_S)
        runtime.release("w1")
        assert wait_until(lambda: states(runtime)["w1"] == "ready", SOON_S)
        assert np.array_equal(call(runtime, 600), expected)


def test_a_slow_but_working_worker_is_never_declared_dead(spec: ModelSpec) -> None:
    # Many rows, and a stall that is longer than a worker ever waits for its core on a busy machine.
    slow = Emulate(slowdown=1000.0)
    with start(spec, emulate=slow, stall_timeout_s=1.0, call_timeout_s=90.0, batch_capacity=4096) as runtime:
        started = time.monotonic()
        result = call(runtime, 4000)
        assert time.monotonic() - started > 1.1, "the emulated worker was too quick for this test to mean anything"
        assert np.array_equal(result, expected_of(runtime, 4000))


def test_a_call_past_its_deadline_names_worker_layer_and_limit(spec: ModelSpec) -> None:
    with start(spec, emulate=SLOW, call_timeout_s=0.2) as runtime:
        with pytest.raises(WorkerTimeout) as caught:
            call(runtime, 200)
        assert "layers.0.experts" in str(caught.value)
        assert "0.2" in str(caught.value)


def test_a_wait_limit_leaves_the_call_running(spec: ModelSpec) -> None:
    with start(spec, emulate=Emulate(delay_ms=100.0)) as runtime:
        waiting = runtime.submit(0, *make_batch(100))
        with pytest.raises(WorkerTimeout, match="goes on"):
            waiting.result(timeout=0.001)
        assert np.array_equal(waiting.result(timeout=100), expected_of(runtime, 100))


@pytest.mark.parametrize(
    ("point", "kind"),
    [
        ("publish", "truncate"), ("poll", "corrupt"), ("poll", "fail"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("publish", "fail"), ("publish", "corrupt"), ("poll", "truncate"))
        ),
    ],
)  # fmt: skip
def test_garbage_on_the_data_path_is_a_typed_error_and_never_a_number(spec: ModelSpec, kind: str, point: str) -> None:
    seeds = iter(range(1000))

    def decorate(name: str, channel: _core.Channel) -> _core.Channel:
        if name != "w0":
            return channel
        return _core.make_faulty(channel, kind=kind, point=point, nth=2, seed=next(seeds))

    for _ in range(3):
        with ExpertRuntime.start(
            Topology.local(num_workers=2), model=spec, _channel_decorator=decorate, park_s=0, **FAR
        ) as runtime:
            assert np.array_equal(call(runtime), expected_of(runtime))
            with pytest.raises((WorkerError, ProtocolError), match="w0"):
                call(runtime)


def test_a_dropped_reply_times_out_and_the_next_call_is_right(spec: ModelSpec) -> None:
    def decorate(name: str, channel: _core.Channel) -> _core.Channel:
        return _core.make_faulty(channel, kind="drop", point="poll", nth=1) if name == "w0" else channel

    with ExpertRuntime.start(
        Topology.local(num_workers=2), model=spec, _channel_decorator=decorate, call_timeout_s=3.0
    ) as runtime:
        with pytest.raises(WorkerTimeout, match="w0"):
            call(runtime)
        assert np.array_equal(call(runtime), expected_of(runtime))
        assert runtime.stats()["workers"]["w0"]["quarantined_slots"] == 1


def test_quarantined_slots_are_renewed_before_they_run_out(spec: ModelSpec) -> None:
    generation = 0

    def decorate(name: str, channel: _core.Channel) -> _core.Channel:
        nonlocal generation
        generation += 1
        # On the first data path every reply is lost; its slots never come back by themselves.
        for nth in range(1, 9 if generation == 1 else 1):
            channel = _core.make_faulty(channel, kind="drop", point="poll", nth=1 if nth else nth)
        return channel

    with ExpertRuntime.start(
        Topology.local(num_workers=1), model=spec, mode="batched", _channel_decorator=decorate, **FAR
    ) as runtime:
        for _ in range(2):  # callers who give up long before the worker is missed
            with pytest.raises(WorkerTimeout, match="goes on"):
                runtime.submit(0, *make_batch(20)).result(timeout=0.1)
        assert np.array_equal(call(runtime), expected_of(runtime))
        assert generation == 2
        assert runtime.stats()["workers"]["w0"]["quarantined_slots"] == 0


def test_ctrl_c_in_a_call_leaves_no_process(spec: ModelSpec) -> None:
    victims: dict[str, int] = {}
    main = threading.main_thread().ident
    assert main is not None

    def interrupted() -> None:
        with start(spec, emulate=SLOW, **FAR) as runtime:
            victims.update(pids(runtime))
            timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
            timer.start()
            call(runtime, 400)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - started < SOON_S
    assert len(victims) == 2
    assert all(is_gone(pid) for pid in victims.values())


def test_a_runtime_that_nobody_closed_ends_its_workers_when_it_is_collected(spec: ModelSpec) -> None:
    runtime = start(spec)
    victims = list(pids(runtime).values())
    del runtime
    assert wait_until(lambda: all(is_gone(pid) for pid in victims), SOON_S)


def test_stats_of_a_lost_worker_say_so_instead_of_hanging(spec: ModelSpec) -> None:
    with start(spec, start_timeout_s=90.0, restart=False, **FAR) as runtime:
        kill(runtime, "w0")
        started = time.monotonic()
        with pytest.raises(DflashError, match="w0"):
            runtime.worker_stats()
        assert time.monotonic() - started < SOON_S
