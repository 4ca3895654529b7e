"""Keeps a front running: starts it, tells it what it needs to know, and replaces one that ended.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash_moe.errors import DflashError
from dflash_moe.holders.launcher import ISOLATION, OWN_GROUP, isolated_environment
from dflash_moe.server.front import frames, start
from dflash_moe.server.relay import Relay, Service

log = logging.getLogger(__name__)

# So many ends of fronts within so long are no accident, and the server ends too.
MOST_DEATHS = 5
DEATHS_WITHIN_S = 60.0
# A front that was told to end has so long: it has 2 s for its streams.
END_S = 5.0
REAP_S = 5.0


class FrontKeeper:
    """The fronts of a server, one at a time. Its thread starts them, and serves what they ask."""

    def __init__(
        self, listener: socket.socket, settings: Mapping[str, Any], *, on_up: Callable[[], None],
        on_failed: Callable[[DflashError], None],
    ) -> None:  # fmt: skip
        """`settings` are those of frames.BEGIN. `on_up` is called when a front takes requests, and
        `on_failed` where no other one is started. The listener stays the caller's.
        """
        self._listener = listener
        self._settings = settings
        self._on_up = on_up
        self._on_failed = on_failed
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        self._is_ending = False
        # Guards what the next front is told, and which one there is.
        self._lock = threading.Lock()
        self._model: Mapping[str, Any] | None = None
        self._service: Service | None = None
        self._state = frames.LOADING
        self._relay: Relay | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="front-keeper", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The process id of the front that runs, for tests and messages."""
        process = self._process
        return None if process is None else process.pid

    def serve(self, service: Service, model: Mapping[str, Any]) -> None:
        """Has fronts take requests, now that the model is loaded."""
        with self._lock:
            self._service, self._model, self._state = service, model, frames.READY
            if self._relay is not None:
                self._tell(self._relay)

    def drain(self) -> None:
        """Has fronts refuse new requests."""
        with self._lock:
            self._state = frames.DRAINING
            if self._relay is not None:
                self._relay.send(frames.STATE, self._state)

    def close(self, within_s: float = 0.0) -> None:
        """Ends the front, and its requests. Readers have `within_s` to take what is there for them.
        It may be called again, by another thread too, and then waits for nobody.
        """
        with self._lock:
            self._is_ending = True
            relay = self._relay
        if relay is not None:
            relay.send(frames.END, within_s)
        self._thread.join(within_s + END_S)
        if self._thread.is_alive():
            self._kill()
            self._thread.join(REAP_S)

    # -- the keeper's thread -----------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._is_ending:
                reason = self._life()
                if self._is_ending:
                    break
                self._deaths.append(time.monotonic())
                log.warning("the front has ended (%s); another one is started, and its requests were cancelled", reason)
                if len(self._deaths) == MOST_DEATHS and self._deaths[-1] - self._deaths[0] <= DEATHS_WITHIN_S:
                    raise DflashError(
                        f"the front has ended {MOST_DEATHS} times within {DEATHS_WITHIN_S:g} s, at last because {reason}; "
                        "its messages stand above"
                    )
        except BaseException as error:  # noqa: BLE001 - whatever it is, the server must not go on without a front
            found = error if isinstance(error, DflashError) else DflashError(f"the front cannot be kept running: {error!r}")
            self._on_failed(found)

    def _life(self) -> str:
        """Runs one front from its start to its end, and returns why it ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    _command(theirs.fileno(), self._listener.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), self._listener.fileno()),
                    env=isolated_environment(os.environ),
                    **OWN_GROUP,
                )
            except OSError as error:
                ours.close()
                raise DflashError(f"the front cannot be started: {sys.executable}: {error.strerror}") from None
        relay = Relay(ours, self._on_up)
        relay.send(frames.BEGIN, dict(self._settings))
        with self._lock:
            self._process, self._relay = process, relay
            if self._model is not None:
                self._tell(relay)
            if self._is_ending:
                relay.send(frames.END, 0.0)
        reason = relay.receive()
        with self._lock:
            self._relay = None
        if not self._is_ending:
            # One that only hung up must not answer any more.
            self._kill()
        return f"{reason}, {self._reaped(process)}"

    def _tell(self, relay: Relay) -> None:
        assert self._service is not None
        relay.serve(self._service)
        relay.send(frames.MODEL, dict(self._model or {}))
        relay.send(frames.STATE, self._state)

    def _reaped(self, process: subprocess.Popen[bytes]) -> str:
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(REAP_S)
            code = process.returncode
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


def _command(link_fd: int, listen_fd: int) -> list[str]:
    return [
        sys.executable, *ISOLATION, str(Path(start.__file__).resolve()), "dflash_moe", "front", "--link-fd", str(link_fd),
        "--listen-fd", str(listen_fd),
    ]  # fmt: skip
