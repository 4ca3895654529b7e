"""All workers of a shard are lost, and the host's own processor computes their experts: no call
fails, no bit changes, and what happened is counted.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_moe import _core
from dflash_moe.errors import ConfigError, DflashError, UnsupportedError, WorkerLost
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.checkpoint_files import SeenFiles
from dflash_moe.model.formats.safetensors_header import read_header
from dflash_moe.model.spec import ModelSpec
from dflash_moe.topology import Topology
from tests.expert_cases import call, expected_of, local_topology, make_checkpoint, tiny_spec
from tests.fault.conftest import (
    StartWorker,
    calls_of_two,
    children_of,
    far_topology,
    flip_a_bit,
    freeze,
    kill,
    pids,
    states,
    wait_until,
)

# A busy machine does in much less what is waited for here.
BACK_S = 90.0
# Limits that nothing here waits for: what goes on before them went on for another reason.
FAR = {"stall_timeout_s": BACK_S, "call_timeout_s": 2 * BACK_S, "park_s": BACK_S, "suspect_ms": 60_000.0}
BOTH = ("w0", "w1")


def start(spec: ModelSpec, *, address: str | None = None, replicas: int = 1, **overrides: Any) -> ExpertRuntime:
    settings = {"host_fallback": "mapped", "restart_backoff_ms": (10, 50), "restart_deaths": 1000, **FAR, **overrides}
    return ExpertRuntime.start(local_topology(replicas=replicas, address=address), model=spec, **settings)


def reach(spec: ModelSpec, address: str, **overrides: Any) -> ExpertRuntime:
    topology = far_topology(address, has_near=False)
    return ExpertRuntime.start(topology, model=spec, **{"host_fallback": "mapped", **FAR, **overrides})


def kill_for_good(runtime: ExpertRuntime, *workers: str) -> None:
    """Kills workers that are not started again, and returns once that is known."""
    kill(runtime, *workers)
    assert wait_until(lambda: {states(runtime)[name] for name in workers} == {"quarantined"}, BACK_S)


def are_back(runtime: ExpertRuntime, deaths: int) -> bool:
    found = {one.name: one for one in runtime.workers()}
    return all((found[name].state, found[name].deaths) == ("ready", deaths) for name in BOTH)


def call_often(runtime: ExpertRuntime, layer: int) -> None:
    """A killed worker may still answer what it has."""
    for _ in range(1000):
        call(runtime, layer=layer)


def stand_in(runtime: ExpertRuntime, worker: str) -> str:
    """What is told of the host's stand-in for a worker."""
    return str(runtime.stats()["fallback"]["stand_ins"][worker])


def computed_here(runtime: ExpertRuntime) -> int:
    return int(runtime.stats()["fallback"]["calls"])


def check_all_right(found: list[Any], expected: Any) -> None:
    assert found
    assert not [one for one in found if isinstance(one, Exception)]
    assert all(np.array_equal(one, expected) for one in found)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_stand_in_has_as_many_threads_as_the_worker_whose_cores_are_idle(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    made, make = [], _core.HostPool

    def noted(**given: Any) -> _core.HostPool:
        made.append(given["threads"])
        return make(**given)

    monkeypatch.setattr(_core, "HostPool", noted)
    text = f"version: 1\nhost: {{threads: 2}}\nworkers: [{{name: w0, threads: {threads}}}, {{name: w1, threads: 1}}]\n"
    settings = {"host_fallback": "mapped", "restart": False, **FAR}
    with ExpertRuntime.start(Topology.parse(text), model=spec, **settings) as runtime:
        expected = expected_of(runtime)
        kill_for_good(runtime, *BOTH)
        assert np.array_equal(call(runtime), expected)
        assert computed_here(runtime) > 0
    assert sorted(made) == [2, 3] if threads == 3 else made == [2]


@pytest.mark.parametrize("address", [None, "unix", "tcp"])
def test_with_every_worker_gone_for_good_the_host_computes_equal_bits(spec: ModelSpec, address: str | None) -> None:
    with start(spec, address=address, restart=False) as runtime:
        expected = expected_of(runtime)
        assert np.array_equal(call(runtime), expected)
        assert computed_here(runtime) == 0
        with calls_of_two(partial(call, runtime)) as found:
            kill_for_good(runtime, *BOTH)
            before = computed_here(runtime)
            assert wait_until(lambda: computed_here(runtime) > before + 10, BACK_S)
        check_all_right(found, expected)
        told = runtime.stats()["fallback"]
        assert told["rows"] > 0
        assert set(told["stand_ins"]) == {"w0", "w1"}
        assert all(text.startswith("ready") for text in told["stand_ins"].values())
        assert wait_until(lambda: "2 of 2 shards compared" in stand_in(runtime, "w0"), BACK_S)
    assert not children_of(os.getpid())


def test_workers_that_come_back_take_over_again(spec: ModelSpec) -> None:
    with start(spec) as runtime:
        expected = expected_of(runtime)
        with calls_of_two(partial(call, runtime)) as found:
            for deaths in (1, 2):
                kill(runtime, *BOTH)
                assert wait_until(partial(are_back, runtime, deaths), BACK_S)
        check_all_right(found, expected)
        before = computed_here(runtime)
        assert before > 0
        for _ in range(20):
            assert np.array_equal(call(runtime), expected)
        assert computed_here(runtime) == before


def test_the_first_loss_makes_the_stand_in_of_the_lost_worker_alone(spec: ModelSpec) -> None:
    with start(spec, restart=False) as runtime:
        expected = expected_of(runtime)
        kill_for_good(runtime, "w1")
        assert np.array_equal(call(runtime), expected)
        assert stand_in(runtime, "w0") == "made when the worker is missed"
        assert stand_in(runtime, "w1").startswith("ready")


def test_a_replica_is_asked_before_the_host(spec: ModelSpec) -> None:
    with start(spec, replicas=2, restart=False) as runtime:
        expected = expected_of(runtime)
        kill_for_good(runtime, "w1")
        for _ in range(20):
            assert np.array_equal(call(runtime), expected)
        assert computed_here(runtime) == 0
        assert set(runtime.stats()["fallback"]["stand_ins"].values()) == {"made when the worker is missed"}
        kill_for_good(runtime, "w0")
        assert np.array_equal(call(runtime), expected)
        assert computed_here(runtime) > 0


def test_a_frozen_worker_is_answered_for_before_it_is_given_up(spec: ModelSpec) -> None:
    with start(spec, suspect_ms=100) as runtime:
        expected = expected_of(runtime)
        assert np.array_equal(call(runtime), expected)
        frozen = pids(runtime)["w1"]
        freeze(frozen)
        try:
            assert np.array_equal(call(runtime), expected)
            assert states(runtime)["w1"] == "ready"
            assert runtime.stats()["workers"]["host:w1"]["hedges_won"] >= 1
        finally:
            os.kill(frozen, signal.SIGCONT)


def test_a_released_worker_takes_over_from_the_host(spec: ModelSpec) -> None:
    with start(spec, restart_deaths=1) as runtime:
        expected = expected_of(runtime)
        kill_for_good(runtime, "w0")
        before = computed_here(runtime)
        for _ in range(5):
            assert np.array_equal(call(runtime), expected)
        assert computed_here(runtime) > before
        runtime.release("w0")
        assert wait_until(lambda: states(runtime)["w0"] == "ready", BACK_S)
        before = computed_here(runtime)
        assert np.array_equal(call(runtime), expected)
        assert computed_here(runtime) == before


def test_a_change_of_mode_fits_the_stand_in_too(spec: ModelSpec) -> None:
    with start(spec, restart=False, batch_capacity=64) as runtime:
        kill_for_good(runtime, "w1")
        call(runtime)
        expected = expected_of(runtime, 600)
        for mode in ("stream", "batched"):
            runtime.set_mode(mode, batch_capacity=4096)
            assert np.array_equal(call(runtime, 600), expected)


def test_with_every_worker_removed_the_stand_in_takes_another_mode(spec: ModelSpec) -> None:
    with start(spec, mode="batched", restart=False) as runtime:
        expected = call(runtime)
        kill(runtime, *BOTH)
        assert call(runtime).tobytes() == expected.tobytes()
        for name in BOTH:
            runtime.remove_worker(name, 0.0, force=True)
        runtime.set_mode("stream")
        assert call(runtime).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"host_fallback": "none"}, "host.fallback is none"),
        ({"required": True}, "ipc.required is 1"),
        ({"failure_order": ["replica", "reconnect"]}, "failure.order has no host"),
    ],
)
def test_where_the_host_must_not_compute_calls_end_typed(spec: ModelSpec, overrides: dict[str, Any], why: str) -> None:
    with start(spec, restart=False, **overrides) as runtime:
        call(runtime)
        kill_for_good(runtime, "w1")
        with pytest.raises(WorkerLost, match="w1"):
            call(runtime)
        assert runtime.stats()["fallback"]["off"] == why
        assert computed_here(runtime) == 0


def test_a_remedy_that_the_order_leaves_out_is_not_taken(spec: ModelSpec) -> None:
    with start(spec, failure_order=["host"]) as runtime:
        expected = expected_of(runtime)
        kill_for_good(runtime, "w1")
        assert np.array_equal(call(runtime), expected)
    with pytest.raises(ConfigError, match=r"placement\.replicas is 2 and failure\.order has no replica"):
        start(spec, replicas=2, failure_order=["reconnect", "host"])


def test_weights_that_a_worker_makes_at_load_are_refused_before_anything_starts(spec: ModelSpec) -> None:
    topology = Topology.parse(
        "version: 1\nhost: {fallback: mapped}\nworkers: [{name: w0, threads: 1, weights: int8}]\n", "t.yaml"
    )
    with pytest.raises(UnsupportedError) as caught:
        ExpertRuntime.start(topology, model=spec, host_fallback="mapped")
    assert str(caught.value).startswith(
        "t.yaml:2: host.fallback: mapped cannot compute layer 0 (layers.0.experts), shard 0: worker w0 has weights: int8"
    )
    assert not children_of(os.getpid())


def test_without_a_word_about_it_the_host_stands_in_where_it_can(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_MOE_HOST_FALLBACK")
    topology = Topology.parse(
        "version: 1\nworkers: [{name: w0, threads: 1, weights: int8}, {name: w1, threads: 1, weights: int8}]\n"
    )
    with ExpertRuntime.start(topology, model=spec, restart=False, **FAR) as runtime:
        told = runtime.stats()["fallback"]
        assert told["off"] == ""
        assert told["stand_ins"] == {}
        assert sum(told["shards_without"].values()) == 4
        kill_for_good(runtime, "w1")
        with pytest.raises(WorkerLost, match="the host's processor cannot stand in for it: weights: int8"):
            call(runtime)


def flip_a_weight(model: Path) -> None:
    flip_a_bit(model, -64, 0x10)


def test_files_that_changed_since_the_workers_read_them_are_not_computed_with(tmp_path: Path) -> None:
    spec = tiny_spec(make_checkpoint(tmp_path / "ours"))
    with start(spec, restart=False) as runtime:
        call(runtime, layer=1)
        flip_a_weight(tmp_path / "ours")
        kill(runtime, *BOTH)
        with pytest.raises(WorkerLost):
            call_often(runtime, 1)
        told = runtime.stats()["fallback"]

        # Either the stand-in finds it before it is made, or a later look takes all of them out.
        def is_said() -> bool:
            return "have changed since the workers loaded them" in str(runtime.stats()["fallback"])

        assert wait_until(is_said, BACK_S), told
        assert computed_here(runtime) == 0


# The audit opens the checkpoint too. Of two threads that lower the limit at once, the last would
# put the lowered one back.
LIMIT = threading.Lock()


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Lets this process open nothing, as its own limit does: what it has open stays."""
    with LIMIT:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        taken = []
        try:
            with contextlib.suppress(OSError):
                while True:  # holes below the limit
                    taken.append(os.dup(0))
            yield
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def indexed(folder: Path) -> ModelSpec:
    """A checkpoint whose files only the index names, so that a listing of them has to open it."""
    model = make_checkpoint(folder)
    names = dict.fromkeys(read_header(model / "model.safetensors", 0), "weights.safetensors")
    (model / "model.safetensors").rename(model / "weights.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return tiny_spec(model)


def test_a_time_without_descriptors_withdraws_no_stand_in(tmp_path: Path) -> None:
    with start(indexed(tmp_path / "ours"), restart=False) as runtime:
        expected = expected_of(runtime)
        kill(runtime, "w0")
        assert np.array_equal(call(runtime), expected)
        assert wait_until(lambda: "ready" in stand_in(runtime, "w0"), BACK_S)
        with no_descriptor_left():
            runtime._parts.fallback.miss("w0")
            runtime._parts.fallback.miss("w1")
        assert runtime.stats()["fallback"]["off"] == ""
        kill(runtime, "w1")
        assert np.array_equal(call(runtime), expected)


def test_a_stand_in_that_found_no_descriptors_is_made_once_there_are_some(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_checkpoint = Checkpoint.open

    def refuse(path: Path) -> Checkpoint:
        with no_descriptor_left():
            open_checkpoint(path)
        # Another thread, which clears the lost worker away, has given one back just then.
        raise OSError(errno.EMFILE, "Too many open files")

    with start(spec, restart=False) as runtime:
        expected = expected_of(runtime)
        monkeypatch.setattr(Checkpoint, "open", refuse)
        kill(runtime, "w1")
        assert wait_until(lambda: "Too many open files" in runtime._parts.fallback.why_not("w1"), BACK_S)
        monkeypatch.setattr(Checkpoint, "open", open_checkpoint)
        assert np.array_equal(call(runtime), expected)
        assert wait_until(lambda: "ready" in stand_in(runtime, "w1"), BACK_S)
        assert runtime._parts.fallback.why_not("w1") == ""


def test_files_that_cannot_be_looked_at_for_a_moment_are_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, refused = SeenFiles.are_unchanged, []

    def look_at_last(files: SeenFiles) -> bool:
        if len(refused) < 3:
            refused.append(files)
            raise DflashError("stale file handle", code="system")
        return look(files)

    with start(tiny_spec(make_checkpoint(tmp_path / "ours")), restart=False) as runtime:
        expected = expected_of(runtime)
        monkeypatch.setattr(SeenFiles, "are_unchanged", look_at_last)
        kill(runtime, "w1")
        assert np.array_equal(call(runtime), expected)
        assert len(refused) == 3
        # Calls use its shards a moment before it says that it is ready.
        assert wait_until(lambda: stand_in(runtime, "w1").startswith("ready"), BACK_S)


def test_another_copy_of_the_checkpoint_is_compared_before_the_host_computes(tmp_path: Path, start_worker: StartWorker) -> None:
    spec = tiny_spec(make_checkpoint(tmp_path / "ours"))
    worker = start_worker(shutil.copytree(spec.path, tmp_path / "theirs"), f"unix://{tmp_path}/far.sock")
    with reach(spec, worker.address) as runtime:
        expected = expected_of(runtime)
        assert np.array_equal(call(runtime), expected)
        worker.process.kill()
        assert np.array_equal(call(runtime), expected)
        # The call needed one shard, the first that was compared.
        assert wait_until(lambda: stand_in(runtime, "far") == "ready, 2 of 2 shards compared", BACK_S)


def test_a_copy_that_differs_is_never_computed_with(tmp_path: Path, start_worker: StartWorker) -> None:
    spec = tiny_spec(make_checkpoint(tmp_path / "ours"))
    worker = start_worker(shutil.copytree(spec.path, tmp_path / "theirs"), f"unix://{tmp_path}/far.sock")
    with reach(spec, worker.address, restart=False) as runtime:
        call(runtime, layer=1)
        flip_a_weight(tmp_path / "ours")  # neither fingerprint nor golden row would have to show it
        worker.process.kill()
        with pytest.raises(WorkerLost):
            call_often(runtime, 1)
        assert wait_until(lambda: "without 1 shards" in stand_in(runtime, "far"), BACK_S)
        assert "this host's own copy has" in stand_in(runtime, "far")
        # The other layer's shard is equal, and the host computes it.
        assert np.array_equal(call(runtime), expected_of(runtime))
