"""The life of a server in the engine process: its front answers from the start on, requests reach
the engine once the model is loaded, and at the end open ones get time to finish.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dflash_moe.errors import DflashError
from dflash_moe.server.front_keeper import FrontKeeper
from dflash_moe.server.listening import Bound
from dflash_moe.server.relay import Service
from dflash_moe.server.server_settings import ServerSettings

log = logging.getLogger(__name__)

EXIT_INTERRUPTED = 130
_STOPS = (signal.SIGINT, signal.SIGTERM)


class Server:
    """A front in front of an engine that may still be loading. The main thread makes it and waits;
    it is a context manager.
    """

    def __init__(self, bound: Bound, settings: ServerSettings) -> None:
        """Starts the front, which answers that the model is being loaded."""
        settings.check(bound)
        self._settings = settings
        self._events: queue.SimpleQueue[int | DflashError | None] = queue.SimpleQueue()
        self._is_up = threading.Event()
        self._keeper = FrontKeeper(bound.sock, settings.for_front(), on_up=self._is_up.set, on_failed=self._failed)
        self._failure: DflashError | None = None

    @property
    def front_pid(self) -> int | None:
        """The process id of the front."""
        return self._keeper.pid

    def _failed(self, error: DflashError) -> None:
        self._failure = error
        self._is_up.set()
        self._events.put(error)

    def serve(self, service: Service, model: Mapping[str, Any], on_ready: Callable[[], None]) -> int:
        """Lets requests through until somebody asks this process to end, and returns the exit code.
        `on_ready` is called once the first request would be answered. Raises DflashError where no
        front can be kept.
        """
        with self._asked_to_end():
            self._keeper.serve(service, model)
            threading.Thread(target=self._say_ready, args=(on_ready,), name="ready", daemon=True).start()
            asked = self._events.get()
            if isinstance(asked, DflashError):
                raise asked
            assert asked is not None
            return self._drained(service, asked)

    def _say_ready(self, on_ready: Callable[[], None]) -> None:
        # This wait ends with the front that comes up, with its failure, or with the process.
        self._is_up.wait()
        if self._failure is None:
            on_ready()

    def _drained(self, service: Service, asked: int) -> int:
        self._keeper.drain()
        log.info("the server ends: open requests have %g s", self._settings.drain_s)

        until = time.monotonic() + self._settings.drain_s

        def drain() -> None:
            try:
                if not service.drain(self._settings.drain_s):
                    log.warning("requests that were open for another %g s were cancelled", self._settings.drain_s)
            except DflashError as error:
                # An engine that is dead has nobody who could finish anything.
                log.warning("open requests could not be waited for: %s", error)
            finally:
                # The last tokens are with the front now, and slow readers may not have them yet.
                self._keeper.close(max(0.0, until - time.monotonic()))
                self._events.put(None)

        threading.Thread(target=drain, name="drain", daemon=True).start()
        # A second signal waits for nobody.
        again = self._events.get()
        if again is not None:
            log.warning("open requests were cancelled")
        return EXIT_INTERRUPTED if signal.SIGINT in (asked, again) else 0

    @contextmanager
    def _asked_to_end(self) -> Iterator[None]:
        def note(number: int, _frame: FrameType | None) -> None:
            self._events.put(number)

        former = {number: signal.signal(number, note) for number in _STOPS}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Ends the front."""
        self._keeper.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
