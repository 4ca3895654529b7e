"""A process with few descriptors gets typed errors that name the limit, from whatever part of a
start meets it, and no start leaves a process or a descriptor behind.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import array
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_moe.errors import DflashError, WorkerError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.holders.launcher import Launcher
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol.framing import Connection
from dflash_moe.protocol.messages import Bye
from dflash_moe.topology import Topology
from tests import leaks
from tests.expert_cases import call
from tests.fault.conftest import StartWorker, far_topology


def num_open() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # less the listing's own


def limited(num_free: int, do: Callable[[], None]) -> str:
    """Runs `do` in a forked child that may open `num_free` descriptors more; returns the words of
    what it raised, or "done". Fails where anything is left behind.
    """
    told, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        outcome = "no outcome"
        try:
            before, opened = leaks.take(), num_open()
            highest = max(int(entry) for entry in os.listdir("/proc/self/fd"))
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (opened + num_free, hard))
            held = [os.dup(0) for _ in range(max(0, opened + num_free - highest - 1 - num_free))]
            try:
                do()
                outcome = "done"
            except DflashError as error:
                outcome = f"{type(error).__name__}: {error}"
            for descriptor in held:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            left = leaks.leaks_since(before)
            if left or num_open() > opened:  # fewer, where garbage of earlier tests went
                outcome = f"left behind: {left}, {num_open() - opened} descriptors"
        except BaseException as error:  # noqa: BLE001 - what the test is for
            outcome = f"raw {type(error).__name__}: {error}"
        finally:
            os.write(tells, outcome.encode())
            os._exit(0)
    os.close(tells)
    with os.fdopen(told, "rb") as pipe:
        outcome = pipe.read().decode()
    os.waitpid(pid, 0)
    return outcome


def use_a_runtime(topology: Topology, spec: ModelSpec, **overrides: object) -> None:
    with ExpertRuntime.start(topology, model=spec, **overrides) as runtime:
        call(runtime)
        runtime.set_mode("stream")
        call(runtime)


def untyped(outcomes: list[str]) -> list[str]:
    """The outcomes that are neither right nor typed, or left something."""
    return [outcome for outcome in outcomes if outcome.startswith(("raw", "left", "no outcome"))]


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_a_start_with_few_descriptors_ends_typed_and_leaves_nothing(spec: ModelSpec, transport: str) -> None:
    topology = Topology.local(num_workers=2)
    tried = (*range(2, 26), 40)
    outcomes = [limited(num_free, lambda: use_a_runtime(topology, spec, transport=transport)) for num_free in tried]
    assert outcomes[-1] == "done"
    assert not untyped(outcomes), outcomes


def test_the_launcher_names_the_limit(spec: ModelSpec) -> None:
    def launch() -> None:
        launcher = Launcher()
        try:
            launcher.start_worker("w0", Path(spec.path)).close(seconds=0.0)
        finally:
            launcher.close()

    outcomes = [limited(num_free, launch) for num_free in range(8)]
    assert any("worker w0 could not be started: Too many open files; this process may have" in outcome for outcome in outcomes)
    assert not untyped(outcomes), outcomes


def test_a_worker_by_hand_is_reached_typed_or_not_at_all(spec: ModelSpec, key_file: Path, start_worker: StartWorker) -> None:
    worker = start_worker(Path(spec.path), "tcp://127.0.0.1:0", "--key-file", str(key_file))
    topology = far_topology(worker.address, has_near=False)

    def reach() -> None:
        until = time.monotonic() + 20  # the former child's session may still be ending
        while True:
            try:
                return use_a_runtime(topology, spec, key_file=key_file)
            except WorkerError as error:
                if "busy" not in str(error) or time.monotonic() > until:
                    raise

    # A try that comes while the former session ends takes a few more.
    outcomes = [limited(num_free, reach) for num_free in (*range(2, 12), 20)]
    assert outcomes[-1] == "done"
    assert not untyped(outcomes), outcomes


def receive_two(then: Callable[[Connection], None]) -> str:
    """The outcome of a process that may open three descriptors and receives a message with four,
    and of what it does then. Another message, without any, lies behind.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        payload = b"\x81\x00\x1c"  # Bye
        message = len(payload).to_bytes(4, "little") + payload
        theirs.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 0, 0, 0]))])
        theirs.send(message)

        def receive() -> None:
            connection = Connection(socket.socket(fileno=os.dup(ours.fileno())))
            try:
                receive_bye(connection)
                then(connection)
            finally:
                connection.close()

        return limited(3, receive)


def receive_bye(connection: Connection) -> None:
    assert isinstance(connection.receive(deadline=time.monotonic() + 5, waiting_for="a message"), Bye)


def test_a_message_whose_descriptors_could_not_be_taken_leaves_the_next_one_readable() -> None:
    assert receive_two(receive_bye) == "done"


def test_descriptors_that_could_not_be_taken_blame_the_limit_and_not_the_peer() -> None:
    outcome = receive_two(lambda connection: connection.take_descriptors(4))
    said = "DflashError: descriptors that came with a control message could not be taken: this process"
    assert outcome.startswith(said)
