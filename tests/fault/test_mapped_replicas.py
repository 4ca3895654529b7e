"""Holders that compute from mapped checkpoints stand in for others: no call fails, no bit changes,
and nobody joins whose bytes differ.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_moe.errors import CheckpointError, WorkerError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.holders.audit.golden import GoldenRows
from dflash_moe.holders.session import HostSession
from dflash_moe.model.spec import ModelSpec
from dflash_moe.topology import Topology
from tests.expert_cases import call, make_checkpoint, tiny_spec
from tests.fault.conftest import FAR, StartWorker, is_gone, pids, state_of, states, wait_until
from tests.fault.test_host_fallback import flip_a_weight

BACK_S = 60.0


def start(spec: ModelSpec, *workers: str, replicas: int = 2, **overrides: Any) -> ExpertRuntime:
    """Workers from the rest of their lines; each has one thread. `far` is one by hand."""
    names = ["far" if "address: '" in rest else f"w{number}" for number, rest in enumerate(workers)]
    lines = "".join(f"  - {{name: {name}, threads: 1, {rest}}}\n" for name, rest in zip(names, workers, strict=True))
    topology = Topology.parse(f"version: 1\nplacement: {{replicas: {replicas}}}\nworkers:\n{lines}")
    return ExpertRuntime.start(topology, model=spec, **{**FAR, "restart_backoff_ms": (10.0, 100.0), **overrides})


def kill(runtime: ExpertRuntime, worker: str) -> None:
    """Returns once the worker answers nothing any more, which a killed process may still do."""
    pid = pids(runtime)[worker]
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: is_gone(pid), BACK_S)


def num_asked(runtime: ExpertRuntime, worker: str) -> int:
    """How often a worker was asked to compute a shard, first or beside another holder."""
    counted = runtime.stats()["workers"][worker]
    return int(counted["calls"] + counted["hedges"])


def is_ready(runtime: ExpertRuntime, worker: str) -> bool:
    return any(one.name == worker and one.state == "ready" and one.deaths for one in runtime.workers())


def is_checked(runtime: ExpertRuntime) -> bool:
    """Whether nobody holds a shard whose bytes were not read."""
    loaded = runtime._placed.fleet.shards
    return not any(loaded.unchecked_holders(one) for shards in runtime._placed.held.values() for one in shards)


@pytest.mark.parametrize("first", ["weights_layout: packed", "weights_layout: mapped"])
@pytest.mark.parametrize("address", ["", ", address: tcp"])
def test_workers_that_map_one_file_stand_in_for_each_other_and_for_one_that_packed(
    spec: ModelSpec, first: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_return, connect = threading.Event(), HostSession.connect

    def connect_late(session: HostSession, *, timeout_s: float) -> None:
        may_return.wait(BACK_S)
        connect(session, timeout_s=timeout_s)

    with start(spec, "weights_layout: packed", "weights_layout: packed", replicas=1) as runtime:
        right = call(runtime)
    with start(spec, first + address, "weights_layout: mapped" + address) as runtime:
        assert all(len(shard.holders) == 2 for shards in runtime.placement.layers for shard in shards)
        monkeypatch.setattr(HostSession, "connect", connect_late)
        for worker, other in (("w1", "w0"), ("w0", "w1"), ("w1", "w0")):
            may_return.clear()
            kill(runtime, worker)
            before = num_asked(runtime, other)
            for _ in range(20):
                assert np.array_equal(call(runtime), right)
            # Whether the loss was noticed between two calls or within one: nobody else was there.
            assert num_asked(runtime, other) - before >= 20 * len(runtime.placement.layers[0])
            may_return.set()
            assert wait_until(lambda worker=worker: is_ready(runtime, worker), BACK_S)
            assert np.array_equal(call(runtime), right)


def test_another_copy_of_the_checkpoint_is_compared_before_it_joins(
    spec: ModelSpec, tmp_path: Path, start_worker: StartWorker
) -> None:
    copy = shutil.copytree(spec.path, tmp_path / "theirs")
    worker = start_worker(Path(copy), f"unix://{tmp_path}/far.sock")
    told: list[str] = []
    far = f"address: '{worker.address}', weights_layout: mapped"
    report = lambda holder, _count, _total: told.append(holder)  # noqa: E731
    with start(spec, "weights_layout: mapped", far, on_loading=report, restart=False) as runtime:
        assert is_checked(runtime)
        assert {"w0 (comparing)"} <= set(told)
        right = call(runtime)
        kill(runtime, "w0")
        for _ in range(20):
            assert np.array_equal(call(runtime), right)


def test_a_copy_that_differs_ends_the_start_and_names_both(
    tmp_path: Path, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The rows that a worker computes at its start would show this flip too.
    monkeypatch.setattr(GoldenRows, "check", lambda _self, _holder, _shards, **_how: None)
    spec = tiny_spec(make_checkpoint(tmp_path / "ours"))
    copy = Path(shutil.copytree(spec.path, tmp_path / "theirs"))
    flip_a_weight(copy)
    worker = start_worker(copy, f"unix://{tmp_path}/far.sock")
    with pytest.raises(
        CheckpointError, match=r"worker (w0|far) holds content checksum 0x\w+, worker (w0|far) 0x\w+; holders of one"
    ):
        start(spec, "weights_layout: packed", f"address: '{worker.address}', weights_layout: mapped")


def test_a_worker_that_comes_back_to_a_touched_file_is_compared_and_joins(tmp_path: Path) -> None:
    spec = tiny_spec(make_checkpoint(tmp_path / "ours"))
    with start(spec, "weights_layout: packed", "weights_layout: mapped") as runtime:
        right = call(runtime)
        os.utime(tmp_path / "ours" / "model.safetensors")
        kill(runtime, "w1")
        assert wait_until(lambda: is_ready(runtime, "w1"), BACK_S)
        assert is_checked(runtime)
        assert np.array_equal(call(runtime), right)


def test_a_worker_that_comes_back_to_other_bytes_never_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GoldenRows, "check", lambda _self, _holder, _shards, **_how: None)
    spec = tiny_spec(make_checkpoint(tmp_path / "ours"))
    with start(spec, "weights_layout: packed", "weights_layout: mapped") as runtime:
        right = call(runtime)
        flip_a_weight(tmp_path / "ours")
        kill(runtime, "w1")
        assert wait_until(lambda: states(runtime)["w1"] == "quarantined", BACK_S)
        # Which of two comparisons finds it first depends on what was learned before the loss.
        assert "content checksum" in state_of(runtime, "w1").reason
        assert np.array_equal(call(runtime), right)


def test_a_mapped_worker_is_added_under_a_packed_one_and_takes_over(spec: ModelSpec) -> None:
    with start(spec, "weights_layout: packed", replicas=1) as runtime:
        right = call(runtime)
        runtime.add_worker({"name": "w1", "threads": 1, "weights_layout": "mapped"})
        assert all(set(shard.holders) == {"w0", "w1"} for shards in runtime.placement.layers for shard in shards)
        assert runtime.placement.layout_of("w1") == "mapped"
        runtime.remove_worker("w0")
        for _ in range(20):
            assert np.array_equal(call(runtime), right)
        kill(runtime, "w1")
        assert wait_until(lambda: is_ready(runtime, "w1"), BACK_S)
        assert np.array_equal(call(runtime), right)


def test_the_only_mapped_holder_never_comes_back_to_other_bytes_and_does_to_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GoldenRows, "check", lambda _self, _holder, _shards, **_how: None)
    spec = tiny_spec(make_checkpoint(tmp_path / "ours"))
    file = tmp_path / "ours" / "model.safetensors"
    whole = file.read_bytes()
    with start(spec, "weights_layout: mapped", replicas=1) as runtime:
        right = call(runtime)
        assert wait_until(lambda: is_checked(runtime), BACK_S)
        flip_a_weight(tmp_path / "ours")
        kill(runtime, "w0")
        assert wait_until(lambda: runtime.workers()[0].state == "quarantined", BACK_S)
        assert "and held 0x" in runtime.workers()[0].reason
        file.write_bytes(whole)
        runtime.release("w0")
        assert wait_until(lambda: is_ready(runtime, "w0"), BACK_S)
        assert np.array_equal(call(runtime), right)


def test_a_flipped_bit_is_refused_by_who_maps_the_file_and_the_worker_goes_on_once_it_is_mended(tmp_path: Path) -> None:
    spec = tiny_spec(make_checkpoint(tmp_path / "ours", num_layers=1), num_layers=1)
    file = tmp_path / "ours" / "model.safetensors"
    whole = file.read_bytes()
    with start(spec, "weights_layout: mapped", replicas=1) as runtime:
        right, before = call(runtime, 64), runtime.worker_processes()
        assert wait_until(lambda: is_checked(runtime), BACK_S)
        for _ in range(3):
            flip_a_weight(tmp_path / "ours")
            with pytest.raises(WorkerError, match=rf"{file}: local expert \d is not what was loaded"):
                call(runtime, 64)
            with file.open("r+b") as stream:
                stream.write(whole)
            assert np.array_equal(call(runtime, 64), right)
        assert [one.pid for one in runtime.worker_processes()] == [one.pid for one in before]


def test_a_worker_that_comes_back_while_the_other_one_still_starts_is_not_blamed_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_spec(make_checkpoint(tmp_path / "ours"))
    with start(spec, "weights_layout: mapped", "weights_layout: mapped", park_s=BACK_S) as runtime:
        right = call(runtime)
        assert wait_until(lambda: is_checked(runtime), BACK_S)
        loaded, held = runtime._placed.fleet.shards, runtime._placed.held
        w0_is_back, connect = threading.Event(), HostSession.connect

        def connect_late(session: HostSession, *, timeout_s: float) -> None:
            if session.name == "w1":
                w0_is_back.wait(BACK_S)
            connect(session, timeout_s=timeout_s)

        monkeypatch.setattr(HostSession, "connect", connect_late)
        os.utime(tmp_path / "ours" / "model.safetensors")
        for one in held["w1"]:  # as if it had been lost before its reader was through
            loaded._contents.note(one, "w1", None)
        kill(runtime, "w1")
        kill(runtime, "w0")
        left = lambda: {one.state for one in runtime.workers() if one.name == "w0" and one.deaths}  # noqa: E731
        assert wait_until(lambda: left() & {"ready", "quarantined"}, BACK_S)
        w0_is_back.set()
        assert left() == {"ready"}, runtime.workers()
        assert wait_until(lambda: is_ready(runtime, "w1"), BACK_S)
        assert is_checked(runtime)
        assert np.array_equal(call(runtime), right)
