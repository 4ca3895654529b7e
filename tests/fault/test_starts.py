"""Starts that cannot work: bad checkpoints, dying or hanging workers, mismatches. Typed, in time,
and nothing left running.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_moe.config import CacheSettings
from dflash_moe.errors import CheckpointError, ConfigError, DflashError, ProtocolError, WorkerLost, WorkerTimeout
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.holders import fleet, launcher, memory_check
from dflash_moe.holders.session import HostSession
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol import identity
from dflash_moe.protocol.messages import LoadShard
from dflash_moe.topology import Topology
from tests.expert_cases import make_checkpoint
from tests.fault.conftest import is_gone

START_TIMEOUT_S = 3.0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[launcher.StartedWorker]]:
    """Every worker process the test's runtimes start; all must be gone afterwards."""
    made: list[launcher.StartedWorker] = []
    spawn = launcher._spawn

    def recording(name: str, model: Path, cache: CacheSettings) -> launcher.StartedWorker:
        made.append(spawn(name, model, cache))
        return made[-1]

    monkeypatch.setattr(launcher, "_spawn", recording)
    yield made
    assert all(is_gone(worker.process.pid) for worker in made)


def start(spec: ModelSpec, **overrides: Any) -> None:
    with ExpertRuntime.start(Topology.local(num_workers=2), model=spec, **overrides):
        pytest.fail("the start should have failed")


@pytest.mark.usefixtures("started")
def test_a_worker_without_its_checkpoint_says_so_with_its_name(spec: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="worker w[01]: checkpoint .*no such directory"):
        start(dataclasses.replace(spec, path=str(tmp_path / "nothing")))


@pytest.mark.usefixtures("started")
def test_a_worker_with_a_truncated_checkpoint_says_so(spec: ModelSpec, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(spec.path, tmp_path / "copy"))
    file = copy / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(CheckpointError, match="worker w[01]: .*model.safetensors"):
        start(dataclasses.replace(spec, path=str(copy)))


@pytest.mark.usefixtures("started")
def test_another_checkpoint_at_the_worker_is_refused_with_both_fingerprints(spec: ModelSpec, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", seed=8)
    with pytest.raises(ProtocolError, match=f"model_fingerprint: the host has {spec.fingerprint}, the worker has [0-9a-f]+"):
        start(dataclasses.replace(spec, path=str(other)))


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(("field", "value"), [("wire_limits", {"max_rows": 7}), ("dtypes", ("f32", "fp8"))])
def test_a_mismatch_in_hello_names_the_field_and_both_values(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, field: str, value: Any
) -> None:
    ours = identity.local_identity

    def other(worker: str, fingerprint: str) -> identity.Identity:
        return dataclasses.replace(ours(worker, fingerprint), **{field: value})

    monkeypatch.setattr(fleet, "local_identity", other)
    with pytest.raises(ProtocolError, match=rf"worker w[01]: {field}.*the host has .*, the worker has "):
        start(spec)


@pytest.mark.usefixtures("started")
def test_another_protocol_version_is_refused_with_both_ranges(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_moe.holders import session

    original = session.authenticate_to_worker
    monkeypatch.setattr(
        session, "authenticate_to_worker", lambda *args, **kwargs: original(*args, **kwargs, protocol_range=(7, 9))
    )
    with pytest.raises(ProtocolError, match=r"protocol version: the host speaks 7\.\.9, this worker speaks 2\.\.2"):
        start(spec)


@pytest.mark.usefixtures("started")
def test_a_wrong_session_key_is_refused(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_moe.holders import session

    original = session.authenticate_to_worker
    monkeypatch.setattr(
        session, "authenticate_to_worker", lambda *args, **kwargs: original(*args, **{**kwargs, "key": bytes(32)})
    )
    with pytest.raises(ProtocolError, match="key: the host's proof does not match"):
        start(spec)


def test_a_program_that_is_no_worker_is_lost_with_its_exit_code_and_output(
    spec: ModelSpec, started: list[launcher.StartedWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'cannot find my libraries' >&2\nexit 5\n")
    program.chmod(0o755)
    monkeypatch.setattr(launcher.sys, "executable", str(program))
    with pytest.raises(WorkerLost, match=r"(?s)exited with code 5.*cannot find my libraries") as lost:
        start(spec)
    assert lost.value.worker in ("w0", "w1")
    assert lost.value.code == "worker_lost"
    assert started


def test_a_program_that_cannot_be_executed_is_named(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.sys, "executable", "/no/such/python")
    with pytest.raises(WorkerLost, match="worker w[01] could not be started: /no/such/python"):
        start(spec)


def test_a_program_that_says_nothing_passes_the_start_timeout(
    spec: ModelSpec, started: list[launcher.StartedWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(launcher.sys, "executable", str(program))
    begun = time.monotonic()
    with pytest.raises(WorkerTimeout, match="worker w[01] did not finish the handshake within 1 s"):
        start(spec, start_timeout_s=1.0)
    assert time.monotonic() - begun < 45  # less than the timeout that is the default
    assert started


def while_loading(monkeypatch: pytest.MonkeyPatch, action: Callable[[HostSession], None]) -> None:
    """Runs `action` on w1's session just before its last shard is asked for."""
    load = HostSession.load

    def loading(self: HostSession, message: LoadShard, **arguments: Any) -> None:
        if self.name == "w1" and message.layer == 1:
            action(self)
        load(self, message, **arguments)

    monkeypatch.setattr(HostSession, "load", loading)


@pytest.mark.usefixtures("started")
def test_a_worker_that_dies_while_loading_is_lost(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    while_loading(monkeypatch, lambda session: os.kill(session.pid, signal.SIGKILL))
    with pytest.raises(WorkerLost, match=r"worker w1 hung up before it could load layers.1.experts shard \d; .* was killed"):
        start(spec)


@pytest.mark.usefixtures("started")
def test_a_worker_that_hangs_while_loading_times_out(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    while_loading(monkeypatch, lambda session: os.kill(session.pid, signal.SIGSTOP))
    begun = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"worker w1 did not load layers.1.experts shard \d within 3 s without progress"):
        start(spec, start_timeout_s=START_TIMEOUT_S)
    assert time.monotonic() - begun < START_TIMEOUT_S + 45


@pytest.mark.usefixtures("started")
def test_ctrl_c_while_loading_leaves_no_process(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def stop_and_interrupt(session: HostSession) -> None:
        os.kill(session.pid, signal.SIGSTOP)
        signal.pthread_kill(main, signal.SIGINT)

    while_loading(monkeypatch, stop_and_interrupt)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        start(spec)
    assert time.monotonic() - begun < 45


@pytest.mark.usefixtures("started")
def test_too_little_memory_is_said_before_loading_with_the_shortfall(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "memory_available", lambda: 1000)
    monkeypatch.setattr(HostSession, "load", lambda *_args, **_kwargs: pytest.fail("loading began"))
    with pytest.raises(ConfigError, match=r"memory: w0, w1 on this machine need .* GiB short"):
        start(spec)


def test_missing_tensors_are_named_with_worker_and_file(
    spec: ModelSpec, started: list[launcher.StartedWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = list(spec.layers)
    ffn = dataclasses.replace(layers[1].ffn, down_tensor=dataclasses.replace(layers[1].ffn.down_tensor, name="x.{expert}.down"))
    layers[1] = dataclasses.replace(layers[1], ffn=ffn)
    with pytest.raises(DflashError, match=r"worker w[01]: .*x\.\d\.down"):
        start(dataclasses.replace(spec, layers=tuple(layers)))
    assert len(started) == 2


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("name", ["dflash-launcher", "dflash-paths", "dflash-workers"])
def test_a_start_that_gets_no_thread_says_so(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    begin = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(DflashError, match="a thread of the runtime could not be started: can't start new thread"):
        start(spec)
