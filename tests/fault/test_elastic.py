"""Workers that are added, removed and started anew while calls go on: no call fails, no bit
changes, and nothing is left behind.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_moe.errors import CheckpointError, ConfigError, DflashError, ProtocolError, TopologyError, WorkerLost
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.holders.fleet import Fleet
from dflash_moe.model.spec import ModelSpec
from dflash_moe.topology import WorkerSpec
from tests.expert_cases import NUM_EXPERTS, call, local_topology, make_batch, make_checkpoint, tiny_spec
from tests.fault.conftest import (
    FAR,
    StartWorker,
    children_of,
    flip_a_bit,
    freeze,
    is_gone,
    kill,
    pids,
    state_of,
    states,
    wait_until,
)

SOON_S = 60.0
ADDRESSES = [None, "unix", "tcp"]
SIZES = (1, 7, 200)


def start(
    spec: ModelSpec,
    *,
    replicas: int = 1,
    workers: int = 2,
    address: str | None = None,
    **how: Any,
) -> ExpertRuntime:
    topology = local_topology(workers, replicas=replicas, address=address)
    return ExpertRuntime.start(topology, model=spec, **{**FAR, "restart_backoff_ms": (10.0, 100.0), **how})


def holders(runtime: ExpertRuntime) -> list[tuple[str, ...]]:
    return [shard.holders for shards in runtime.placement.layers for shard in shards]


class Load:
    """What two threads saw that called all the while."""

    def __init__(self, runtime: ExpertRuntime) -> None:
        self._runtime = runtime
        self.right = {size: call(runtime, size) for size in SIZES}
        self.num_calls = 0
        self.wrong: list[Any] = []
        self.is_over = threading.Event()

    def drive(self) -> None:
        turn = 0
        while not self.is_over.is_set():
            size = SIZES[turn % len(SIZES)]
            turn += 1
            try:
                if not np.array_equal(call(self._runtime, size), self.right[size]):
                    self.wrong.append(f"wrong bits at {size} tokens")
            except DflashError as error:
                self.wrong.append(error)
                self.is_over.wait(0.01)
            self.num_calls += 1

    def go_on(self) -> None:
        """Returns once calls have begun and ended that began after this one."""
        seen = self.num_calls
        assert wait_until(lambda: self.num_calls >= seen + 8, SOON_S)


@contextlib.contextmanager
def load_of(runtime: ExpertRuntime) -> Iterator[Load]:
    load = Load(runtime)
    threads = [threading.Thread(target=load.drive) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        load.go_on()
        yield load
        load.go_on()
    finally:
        load.is_over.set()
        for thread in threads:
            thread.join(SOON_S)
    assert not load.wrong, load.wrong[:3]


def descriptors_beside(spec: ModelSpec) -> int:
    """Counts what this process has open, but for the files of the checkpoint: the audit opens them
    some time after the first call.
    """
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # such as that of the listing itself
            count += not os.readlink(f"/proc/self/fd/{entry}").startswith(str(spec.path))
    return count


def calls_at(runtime: ExpertRuntime, name: str) -> int:
    return int(runtime.stats()["workers"][name]["calls"])


# -- adding ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_worker_added_under_load_becomes_a_holder_of_all_that_fits(spec: ModelSpec, address: str | None) -> None:
    with start(spec, address=address) as runtime:
        before = holders(runtime)
        with load_of(runtime):
            runtime.add_worker(WorkerSpec("w2", threads=1, address=address))
            assert states(runtime) == {"w0": "ready", "w1": "ready", "w2": "ready"}
            assert wait_until(lambda: calls_at(runtime, "w2") > 0, SOON_S)
        assert holders(runtime) == [(*names, "w2") for names in before]
        assert len(children_of(os.getpid())) == 3
        right = call(runtime, 200)
        kill(runtime, "w0", "w1")
        assert np.array_equal(call(runtime, 200), right)


def test_a_worker_that_somebody_started_by_hand_is_dialled(spec: ModelSpec, tmp_path: Path, start_worker: StartWorker) -> None:
    address = f"unix://{tmp_path}/far.sock"
    far = start_worker(Path(spec.path), address)
    with start(spec) as runtime:
        with load_of(runtime):
            runtime.add_worker({"name": "far", "address": address})
            runtime.remove_worker("w0")
            runtime.remove_worker("w1")
        assert holders(runtime) == [("far",)] * len(holders(runtime))
        assert children_of(os.getpid()) == [far.process.pid]
        with pytest.raises(ConfigError, match="somebody else starts worker far"):
            runtime.restart_worker("far")
        with pytest.raises(ConfigError, match="worker far has the same address"):
            runtime.add_worker({"name": "twin", "address": address})


def test_a_worker_added_with_experts_holds_their_shards_and_no_others(spec: ModelSpec) -> None:
    with start(spec) as runtime:
        first = runtime.placement.layers[0][0]
        listed = ",".join(str(expert) for expert in first.experts)
        runtime.add_worker(f"{{name: w2, threads: 1, experts: {{'{runtime.layers[0].index}': '{listed}'}}}}")
        found = [shard.shard_id for shard in runtime.placement.layers[0] if "w2" in shard.holders]
        assert found == [first.shard_id]
        assert sum("w2" in names for names in holders(runtime)) == 1


def test_a_worker_added_after_a_runtime_without_processes_is_kept_too(spec: ModelSpec) -> None:
    with start(spec, workers=1, address="loopback") as runtime:
        right = call(runtime)
        runtime.add_worker({"name": "w1", "threads": 1})
        pid = pids(runtime)["w1"]
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: state_of(runtime, "w1").deaths == 1, SOON_S)
        assert wait_until(lambda: states(runtime)["w1"] == "ready", SOON_S)
        assert pids(runtime)["w1"] != pid
        assert np.array_equal(call(runtime), right)
        with pytest.raises(ConfigError, match="computes in the host's own process"):
            runtime.remove_worker("w0")


def test_the_mode_can_change_after_workers_came_and_went(spec: ModelSpec) -> None:
    with start(spec) as runtime:
        right = call(runtime, 200)
        runtime.add_worker({"name": "w2", "threads": 1})
        runtime.set_mode("stream", stream_tokens=2)
        assert np.array_equal(call(runtime, 200), right)
        runtime.remove_worker("w0")
        runtime.set_mode("batched", dtype="bf16")
        rounded = call(runtime, 200)
        runtime.add_worker({"name": "w0", "threads": 1})
        assert np.array_equal(call(runtime, 200), rounded)
        runtime.set_mode(dtype="f32")
        assert np.array_equal(call(runtime, 200), right)


def unfit(tmp_path: Path) -> list[tuple[Any, type[Exception], str]]:
    """Specs that are refused, the error, and what its text says."""
    return [
        ({"name": "w1"}, ConfigError, "a worker of this name is there"),
        ({"name": "w2", "address": "loopback"}, ConfigError, "in the host's own process"),
        ({"name": "w2", "weights": "int8"}, ConfigError, r"disagree in weights: worker w. has auto, worker w2 int8"),
        ({"name": "w2", "activations": "int8"}, ConfigError, "disagree in numerics: worker w. has f32-canon"),
        ({"name": "w2", "memory": 100}, ConfigError, r"layer 0 .*, shard \d needs .* of memory, and 100 bytes are left there"),
        ({"name": "w2", "experts": {"*": "0"}}, ConfigError, "it lists 1 of the .* experts of layer 0"),
        ({"name": "w2", "experts": {"0": f"0-{NUM_EXPERTS}"}}, ConfigError, f"expert {NUM_EXPERTS} does not exist"),
        ({"name": "w2", "threadz": 1}, TopologyError, "threadz"),
        ({"name": "w2", "cpus": "60000"}, ConfigError, "60000"),
        ("[", TopologyError, "add_worker:1"),
        ({"name": object()}, ConfigError, "cannot be written as YAML"),
        ({"name": "w2", "address": f"unix://{tmp_path}/nobody.sock"}, WorkerLost, "nobody.sock"),
    ]


def test_an_unfit_worker_is_refused_and_nothing_has_changed(spec: ModelSpec, tmp_path: Path) -> None:
    with start(spec, start_timeout_s=10.0) as runtime:
        right, held, children = call(runtime), holders(runtime), children_of(os.getpid())
        descriptors = descriptors_beside(spec)
        for wanted, kind, text in unfit(tmp_path):
            with pytest.raises(kind, match=text):
                runtime.add_worker(wanted)
            assert holders(runtime) == held, wanted
            assert states(runtime) == {"w0": "ready", "w1": "ready"}
            assert children_of(os.getpid()) == children, wanted
            # Threads of the runtime open something for a moment now and then.
            assert wait_until(lambda: descriptors_beside(spec) <= descriptors, SOON_S), wanted
            assert np.array_equal(call(runtime), right)
        runtime.add_worker({"name": "w2"})  # the name is not spent


@pytest.mark.parametrize("flip_at", [-5001, 500])
def test_a_worker_with_other_weights_is_refused(tmp_path: Path, start_worker: StartWorker, flip_at: int) -> None:
    spec = tiny_spec(make_checkpoint(tmp_path / "ours"))
    theirs = tmp_path / "theirs"
    if flip_at < 0:  # a bit that no sample of the fingerprint reads
        shutil.copytree(spec.path, theirs)
        flip_a_bit(theirs, flip_at)
    else:
        make_checkpoint(theirs, seed=flip_at)
    address = f"unix://{tmp_path}/far.sock"
    start_worker(theirs, address)
    with start(spec) as runtime:
        held = holders(runtime)
        with load_of(runtime), pytest.raises((CheckpointError, ProtocolError), match="checksum|fingerprint"):
            runtime.add_worker({"name": "far", "address": address})
        assert holders(runtime) == held
        assert "far" not in states(runtime)


@pytest.mark.parametrize("at", ["start_again", "load_again", "attach"])
def test_a_worker_that_dies_while_it_is_added_leaves_nothing(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    step = getattr(Fleet, at)

    def die(fleet: Fleet, member: Any, *arguments: Any) -> Any:
        if member.name == "w2" and at != "start_again":
            os.kill(member.session.pid, signal.SIGKILL)
        if member.name == "w2" and at == "start_again":
            raise WorkerLost("w2 died", worker="w2")
        return step(fleet, member, *arguments)

    with start(spec) as runtime:
        held, children = holders(runtime), children_of(os.getpid())
        with monkeypatch.context() as patch, load_of(runtime):
            patch.setattr(Fleet, at, die)
            with pytest.raises(DflashError):
                runtime.add_worker({"name": "w2"})
        assert holders(runtime) == held
        assert children_of(os.getpid()) == children
        runtime.add_worker({"name": "w2"})


@pytest.mark.parametrize("at", ["start_again", "load_again", "attach"])
def test_close_in_the_middle_of_an_arrival_leaves_nothing(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    step, came = getattr(Fleet, at), threading.Event()
    frozen: list[int] = []

    def hang(fleet: Fleet, member: Any, *arguments: Any) -> Any:
        if member.name == "w2":
            if at != "start_again":
                frozen.append(member.session.pid)
                freeze(member.session.pid)
            came.set()
        return step(fleet, member, *arguments)

    monkeypatch.setattr(Fleet, at, hang)
    runtime = start(spec)
    errors: list[BaseException] = []

    def add() -> None:
        try:
            runtime.add_worker({"name": "w2"})
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is looked at below
            errors.append(error)

    adding = threading.Thread(target=add)
    try:
        adding.start()
        assert came.wait(SOON_S)
    finally:
        runtime.close()
    adding.join(SOON_S)
    assert not adding.is_alive()
    assert len(errors) == 1
    assert isinstance(errors[0], DflashError)
    assert all(is_gone(pid) for pid in frozen)
    assert wait_until(lambda: not children_of(os.getpid()), SOON_S)


# -- removing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_worker_removed_under_load_costs_no_call_and_leaves_nothing(spec: ModelSpec, address: str | None) -> None:
    with start(spec, replicas=2, address=address) as runtime:
        pid = pids(runtime)["w1"]
        with load_of(runtime) as load:
            descriptors = descriptors_beside(spec)
            runtime.remove_worker("w1")
            assert is_gone(pid)
            # Threads of the runtime open something for a moment now and then.
            assert wait_until(lambda: descriptors_beside(spec) < descriptors, SOON_S)
            load.go_on()
            counted = calls_at(runtime, "w1")
            load.go_on()
            assert calls_at(runtime, "w1") == counted
        assert states(runtime) == {"w0": "ready"}
        assert holders(runtime) == [("w0",)] * len(holders(runtime))
        assert runtime.stats()["workers"]["w1"]["state"] == "gone"
        assert len(children_of(os.getpid())) == 1
        totals = runtime.stats()["totals"]
        assert totals["calls"] == sum(one["calls"] for one in runtime.stats()["workers"].values())
        (former,) = runtime.snapshot()["others"]
        assert (former["name"], former["state"], former["calls"]) == ("w1", "gone", runtime.stats()["workers"]["w1"]["calls"])
        with pytest.raises(ConfigError, match="no worker is named 'w1'; there are w0"):
            runtime.remove_worker("w1")


def test_a_removed_worker_that_is_added_again_takes_its_part_of_every_layer(spec: ModelSpec) -> None:
    with start(spec, replicas=2) as runtime:
        right = call(runtime, 200)
        for _ in range(3):
            runtime.remove_worker("w0")
            assert all(names == ("w1",) for names in holders(runtime))
            runtime.add_worker({"name": "w0", "threads": 1})
            for shards in runtime.placement.layers:
                assert {shard.holder for shard in shards} == {"w0", "w1"}
            before = calls_at(runtime, "w0")
            assert np.array_equal(call(runtime, 200), right)
            assert calls_at(runtime, "w0") > before


def test_what_is_under_way_when_the_time_is_over_is_asked_of_others(spec: ModelSpec) -> None:
    with start(spec, replicas=2) as runtime:
        right = call(runtime, 200)
        freeze(pids(runtime)["w0"])
        waiting = runtime.submit(0, *make_batch(200))
        runtime.remove_worker("w0", drain_s=0.2)
        assert np.array_equal(np.asarray(waiting.result(timeout=SOON_S)), right)
        assert states(runtime) == {"w1": "ready"}


def test_a_worker_killed_while_it_drains_costs_no_call(spec: ModelSpec) -> None:
    with start(spec, replicas=2) as runtime:
        pid = pids(runtime)["w0"]
        with load_of(runtime):
            freeze(pid)  # so that it drains until it is killed
            removing = threading.Thread(target=runtime.remove_worker, args=("w0", 3600.0))
            removing.start()
            assert wait_until(lambda: states(runtime).get("w0") == "draining", SOON_S)
            with pytest.raises(ConfigError, match="another worker is being added, removed or started anew"):
                runtime.remove_worker("w0")
            os.kill(pid, signal.SIGKILL)
            removing.join(SOON_S)
            assert not removing.is_alive()
        assert states(runtime) == {"w1": "ready"}
        assert is_gone(pid)


def test_the_last_holder_is_removed_only_by_force_and_another_one_takes_over(spec: ModelSpec) -> None:
    with start(spec) as runtime:
        right = call(runtime, 200)
        with pytest.raises(ConfigError, match=r"w1 is the last ready holder of \d+ shards, the first is layer 0 .*, shard"):
            runtime.remove_worker("w1")
        assert states(runtime) == {"w0": "ready", "w1": "ready"}
        assert np.array_equal(call(runtime, 200), right)
        runtime.remove_worker("w1", force=True)
        for _ in range(2):
            with pytest.raises(WorkerLost, match="worker w1 was lost: it was removed"):
                call(runtime, 200)
        runtime.add_worker({"name": "other", "threads": 1})
        assert np.array_equal(call(runtime, 200), right)
        assert all("w1" not in names for names in holders(runtime))


def test_a_holder_that_is_not_ready_is_no_other_holder(spec: ModelSpec) -> None:
    with start(spec, replicas=2, restart=False) as runtime:
        kill(runtime, "w1")
        assert wait_until(lambda: states(runtime)["w1"] == "quarantined", SOON_S)
        with pytest.raises(ConfigError, match="worker w0 is the last ready holder"):
            runtime.remove_worker("w0")
        runtime.remove_worker("w1")
        assert states(runtime) == {"w0": "ready"}
        call(runtime)


@pytest.mark.parametrize("drain_s", [-1.0, float("nan"), float("inf"), 1e9])
def test_a_time_to_drain_that_means_nothing_is_refused(spec: ModelSpec, drain_s: float) -> None:
    with start(spec, workers=1) as runtime, pytest.raises(ConfigError, match=r"allowed are 0\.\.86400 seconds"):
        runtime.remove_worker("w0", drain_s)


def test_close_while_a_worker_drains_ends_the_removal(spec: ModelSpec) -> None:
    runtime = start(spec, replicas=2)
    errors: list[BaseException] = []

    def remove() -> None:
        try:
            runtime.remove_worker("w0", 3600.0)
        except DflashError as error:
            errors.append(error)

    freeze(pids(runtime)["w0"])
    runtime.submit(0, *make_batch(7))
    removing = threading.Thread(target=remove)
    removing.start()
    assert wait_until(lambda: states(runtime).get("w0") == "draining", SOON_S)
    began = time.monotonic()
    runtime.close()
    removing.join(SOON_S)
    assert time.monotonic() - began < SOON_S
    assert "closed" in str(errors[0])
    assert not children_of(os.getpid())


def test_a_forked_child_changes_no_workers(spec: ModelSpec) -> None:
    with start(spec, replicas=2) as runtime:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                runtime.remove_worker("w0")
            except DflashError as error:
                code = 0 if "parent process" in str(error) else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert states(runtime) == {"w0": "ready", "w1": "ready"}


# -- starting anew ---------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ADDRESSES)
def test_all_workers_are_replaced_one_after_the_other_without_a_failed_call(spec: ModelSpec, address: str | None) -> None:
    with start(spec, replicas=2, address=address) as runtime:
        before, held = pids(runtime), holders(runtime)
        with load_of(runtime):
            for name in before:
                runtime.restart_worker(name)
        after = pids(runtime)
        assert before.keys() == after.keys()
        assert not set(before.values()).intersection(after.values())
        assert all(is_gone(pid) for pid in before.values())
        assert holders(runtime) == held
        assert [one.deaths for one in runtime.workers()] == [0, 0]
        assert len(children_of(os.getpid())) == 2


def test_a_worker_without_another_holder_is_started_anew_by_force_and_calls_wait_for_it(spec: ModelSpec) -> None:
    with start(spec, park_s=SOON_S) as runtime:
        with pytest.raises(ConfigError, match="restart_worker: worker w1 is the last ready holder"):
            runtime.restart_worker("w1")
        pid = pids(runtime)["w1"]
        with load_of(runtime):
            runtime.restart_worker("w1", drain_s=0.05, force=True)
        assert is_gone(pid)


def test_an_upgrade_by_a_new_worker_in_the_old_ones_place(spec: ModelSpec) -> None:
    with start(spec) as runtime:
        with load_of(runtime):
            for old in ("w0", "w1"):
                runtime.add_worker({"name": f"new-{old}", "threads": 1})
                runtime.remove_worker(old)
        assert set(states(runtime)) == {"new-w0", "new-w1"}
        assert len(children_of(os.getpid())) == 2


def test_a_worker_that_does_not_come_back_from_its_restart_says_so(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    with start(spec, replicas=2, restart_deaths=2) as runtime:
        load = Fleet.load_again

        def die(fleet: Fleet, member: Any, shards: Any) -> None:
            os.kill(member.session.pid, signal.SIGKILL)
            load(fleet, member, shards)

        with monkeypatch.context() as patch, load_of(runtime):
            patch.setattr(Fleet, "load_again", die)
            with pytest.raises(WorkerLost, match="ended to be started anew, and is not back: it is quarantined"):
                runtime.restart_worker("w1")
        with pytest.raises(ConfigError, match="worker w1 is quarantined and not ready"):
            runtime.restart_worker("w1")
        runtime.release("w1")
        assert wait_until(lambda: states(runtime)["w1"] == "ready", SOON_S)
