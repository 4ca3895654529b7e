"""Starts worker processes as direct children. A child inherits the descriptors of its control
socket and of its one-time key, and its log is kept in memory.

Children ask the kernel to be killed with the *thread* that forked them. So one thread, which lives
as long as the runtime and sleeps in between, forks all children of a runtime.

A worker runs what this process runs and nothing that merely lies around: the same interpreter, the
same package (workers/start.py), and no module from the folder that the host was called in, which
may be that of a model somebody downloaded.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_moe.config.cache import NO_CACHE, CacheSettings
from dflash_moe.errors import DflashError, WorkerLost, WorkerTimeout
from dflash_moe.protocol.auth import KEY_BYTES
from dflash_moe.protocol.failures import is_descriptor_limit, system_failure
from dflash_moe.telemetry.logs import LogFile

# Fork and exec take less than this even under heavy load; a start that takes longer has other
# troubles.
START_S = 30.0
# A killed process is reaped within this time. SIGKILL is certain, and only uninterruptible I/O
# could delay the end.
REAP_S = 5.0
# The thread ends within this time, unless a fork takes longer.
JOIN_S = 5.0
PACKAGE = Path(__file__).resolve().parents[1]
# This option keeps the interpreter from putting the folder of its script first on the path.
# Interpreters before 3.11 lack it; workers/start.py then takes that entry away.
ISOLATION = ("-P",) if sys.version_info >= (3, 11) else ()
# Ctrl-C at a terminal is not for a process that is started with this, which is in no group with its
# parent. It stays in the session, because Linux shares processors among sessions before it looks at
# who is nice (autogroup in sched(7)): a child at nice 10 in a session of its own takes a whole
# processor from two threads of its parent. Python before 3.11 knows only sessions.
OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
# These variables name folders that an interpreter takes code from. Their relative entries mean the
# folder that the host happens to be called in, and an empty entry of PYTHONPATH means that folder
# itself.
FOLDER_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX")
# These variables run a file or a prompt in interactive interpreters, which a worker never is.
INTERACTIVE_VARIABLES = ("PYTHONSTARTUP", "PYTHONINSPECT")


@dataclass(slots=True)
class StartedWorker:
    """A child process and what it was started with. It owns the process, the host's end of the
    control socket and the log; `close()` kills the process if need be and reaps it.
    """

    name: str
    process: subprocess.Popen[bytes]
    control: socket.socket
    key: bytes
    log: LogFile

    def describe_exit(self, *, seconds: float) -> str:
        """Returns how the child ended and the last lines of its log, as text for a message. It
        waits up to `seconds` for the exit status.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        tail = self.log.tail()
        quoted = f"; last lines of its log:\n{tail}" if tail else "; its log is empty"
        return f"process {self.process.pid} {_exit_text(self.process.returncode)}{quoted}"

    def close(self, *, seconds: float) -> None:
        """Closes the control socket, waits up to `seconds` for a graceful end, and then kills the
        child. It never raises because the worker is already gone.
        """
        self.control.close()
        try:
            self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(REAP_S)
        self.log.close()

    def kill(self) -> None:
        """Sends SIGKILL, which also ends a stopped process."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


def _exit_text(code: int | None) -> str:
    if code is None:
        return "is still running"
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"exited with code {code}"


class Launcher:
    """The thread that forks all children of one runtime. Any thread may order a start."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Guards that no order comes after the last one, so that nobody waits for what nobody does.
        # A thread that holds it takes it again where it collects a runtime.
        self._lock = threading.RLock()
        self._is_closed = False
        # Those that have not ended, so that none is left behind by a caller whom Ctrl-C kept from
        # taking what was returned. The thread alone touches it, until it has ended.
        self._children: list[StartedWorker] = []
        self._thread = threading.Thread(target=self._run, name="dflash-launcher", daemon=True)
        self._thread.start()

    def start_worker(self, name: str, model: Path, cache: CacheSettings = NO_CACHE) -> StartedWorker:
        """Starts one worker process for the checkpoint at `model`, which may keep on disk what
        `cache` says; the caller owns what is returned.

        Errors: WorkerLost when the process cannot be created or `close` was called, WorkerTimeout
        when that takes longer than START_S, DflashError naming the limit when this process is out
        of descriptors.
        """
        outcome: Future[StartedWorker] = Future()

        def order() -> None:
            self._children = [child for child in self._children if child.process.returncode is None]
            try:
                started = _spawn(name, model, cache)
                self._children.append(started)
                outcome.set_result(started)
            except BaseException as error:  # noqa: BLE001 - handed to the thread that asked
                outcome.set_exception(error)

        with self._lock:
            if self._is_closed:
                raise WorkerLost(f"worker {name} is not started any more: the runtime was closed", worker=name)
            self._orders.put(order)
        try:
            return outcome.result(START_S)
        except BaseException as error:
            # Nobody else will know of the worker when it comes after all: it took too long, or
            # Ctrl-C ended the wait.
            outcome.add_done_callback(_end_unwanted)
            if not isinstance(error, NotDone):
                raise
            text = f"worker {name} could not be started within {START_S:g} s: the machine is overloaded"
            raise WorkerTimeout(text, worker=name) from None

    def close(self) -> None:
        """Ends the thread. Every child that anybody owns is gone by then, because it would be
        killed with it; others are ended here.
        """
        with self._lock:
            self._is_closed = True
            self._orders.put(None)
        self._thread.join(JOIN_S)
        for child in self._children:
            child.close(seconds=0.0)

    def _run(self) -> None:
        # This wait has no deadline, because it is for orders of this process and `close` ends it.
        while (order := self._orders.get()) is not None:
            order()


def _end_unwanted(outcome: Future[StartedWorker]) -> None:
    if outcome.exception() is None:
        outcome.result().close(seconds=0.0)


def _spawn(name: str, model: Path, cache: CacheSettings) -> StartedWorker:
    key = secrets.token_bytes(KEY_BYTES)
    with contextlib.ExitStack() as inherited, contextlib.ExitStack() as kept:
        try:
            ours, theirs = socket.socketpair()
            kept.callback(ours.close)
            inherited.callback(theirs.close)
            key_read, key_write = os.pipe()
            inherited.callback(os.close, key_read)
            inherited.callback(os.close, key_write)
            log = LogFile(name)
            kept.callback(log.close)
            os.write(key_write, key)
            process = subprocess.Popen(
                _command(name, model, cache, control_fd=theirs.fileno(), key_fd=key_read),
                stdin=subprocess.DEVNULL,
                stdout=log.fileno(),
                stderr=log.fileno(),
                pass_fds=(theirs.fileno(), key_read),
                env=isolated_environment(os.environ),
                # A signal to the host's group, such as that of `timeout`, is for the host to act
                # on: it tells its workers what follows. The kernel ends them with the host.
                start_new_session=True,
            )
        except OSError as error:
            raise _refusal(name, error) from None
        kept.pop_all()
    return StartedWorker(name, process, ours, key, log)


def _command(name: str, model: Path, cache: CacheSettings, *, control_fd: int, key_fd: int) -> list[str]:
    # A worker inherits the environment, but neither topology nor arguments of its host.
    return [
        sys.executable, *ISOLATION, str(PACKAGE / "workers" / "start.py"),
        "dflash_moe", "worker", "--name", name, "--model", str(model),
        "--control-fd", str(control_fd), "--key-fd", str(key_fd), "--parent-pid", str(os.getpid()),
        *cache.to_options(),
    ]  # fmt: skip


def _refusal(name: str, error: OSError) -> DflashError:
    doing = f"worker {name} could not be started"
    if is_descriptor_limit(error):
        return system_failure(doing, error)
    return WorkerLost(f"{doing}: {sys.executable}: {error.strerror}", worker=name)


def isolated_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns `environment` without what makes an interpreter run code from the folder it is
    started in.

    Absolute folders stay, because whoever named them meant them wherever the program runs.
    """
    isolated = {name: value for name, value in environment.items() if name not in INTERACTIVE_VARIABLES}
    for name in FOLDER_VARIABLES:
        if name not in isolated:
            continue
        entries = [entry for entry in isolated.pop(name).split(os.pathsep) if os.path.isabs(entry)]
        if entries:
            isolated[name] = os.pathsep.join(entries)
    return isolated
