"""Starts worker processes as direct children: control socket and one-time key by inherited
descriptor, log in memory.

Children ask the kernel to be killed with the *thread* that forked them, so all of a runtime's
children are forked by one thread that lives as long as the runtime does and sleeps in between.
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
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from dflash_moe.errors import WorkerLost
from dflash_moe.protocol.auth import KEY_BYTES
from dflash_moe.telemetry.logs import LogFile

START_S = 30.0  # fork and exec under heavy load; a start that takes longer has other troubles


@dataclass(slots=True)
class StartedWorker:
    """A child and what it was started with. `close()` kills it if need be and reaps it."""

    name: str
    process: subprocess.Popen[bytes]
    control: socket.socket
    key: bytes
    log: LogFile

    def describe_exit(self, *, seconds: float) -> str:
        """How the child ended and its last log lines; waits up to `seconds` for the exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        tail = self.log.tail()
        quoted = f"; last lines of its log:\n{tail}" if tail else "; its log is empty"
        return f"process {self.process.pid} {_exit_text(self.process.returncode)}{quoted}"

    def close(self, *, seconds: float) -> None:
        """Waits up to `seconds` for a graceful end, then SIGKILL. Never raises because the worker
        is already gone.
        """
        try:
            self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                # SIGKILL is certain; only uninterruptible I/O could delay it
                self.process.wait(5.0)
        self.log.close()

    def kill(self) -> None:
        """SIGKILL, which also ends a stopped process."""
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
    """The forking thread of one runtime."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dflash-launcher", daemon=True)
        self._thread.start()

    def start_worker(self, name: str, model: Path) -> StartedWorker:
        """Starts one worker process. WorkerLost when the process cannot be created."""
        outcome: Future[StartedWorker] = Future()

        def order() -> None:
            try:
                outcome.set_result(_spawn(name, model))
            except BaseException as error:  # noqa: BLE001 - handed to the thread that asked
                outcome.set_exception(error)

        self._orders.put(order)
        return outcome.result(START_S)

    def close(self) -> None:
        """Ends the thread; call after every child is gone."""
        self._orders.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            order()


def _spawn(name: str, model: Path) -> StartedWorker:
    ours, theirs = socket.socketpair()
    key_read, key_write = os.pipe()
    key = secrets.token_bytes(KEY_BYTES)
    log = LogFile(name)
    command = [
        sys.executable, "-m", "dflash_moe", "worker", "--name", name, "--model", str(model),
        "--control-fd", str(theirs.fileno()), "--key-fd", str(key_read), "--parent-pid", str(os.getpid()),
    ]  # fmt: skip
    try:
        os.write(key_write, key)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log.fileno(),
            stderr=log.fileno(),
            pass_fds=(theirs.fileno(), key_read),
            env=_environment(),
        )
    except OSError as error:
        ours.close()
        log.close()
        raise WorkerLost(f"worker {name} could not be started: {sys.executable}: {error.strerror}") from None
    finally:
        theirs.close()
        os.close(key_read)
        os.close(key_write)
    return StartedWorker(name, process, ours, key, log)


def _environment() -> dict[str, str]:
    """The host's environment; the package is found where this process found it, installed or
    not.
    """
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{root}{os.pathsep}{inherited}" if inherited else root
    return environment
