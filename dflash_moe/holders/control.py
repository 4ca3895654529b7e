"""Takes orders for a running host from the command line (`dflash-moe workers`), and carries them
out with the means of the Python API.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dflash_moe.errors import ConfigError, DflashError, ProtocolError
from dflash_moe.protocol.control import ANSWER_S, error_fields, listen, receive_line, send_line
from dflash_moe.protocol.framing import require_same_user

if TYPE_CHECKING:
    from dflash_moe.holders.elastic import Elastic
    from dflash_moe.holders.placed_experts import PlacedExperts
    from dflash_moe.holders.worker_keeper import WorkerKeeper

log = logging.getLogger(__name__)

# So many orders are carried out at a time; further ones are turned away.
MAX_ORDERS = 8
# The threads have this time to end once the workers are closed and the socket is.
STOP_S = 5.0


class WorkerOrders:
    """What a host does when it is asked for something about its workers."""

    def __init__(
        self, placed: PlacedExperts, elastic: Elastic, keeper: WorkerKeeper, stats: Callable[[], dict[str, Any]]
    ) -> None:
        """`stats` returns what the order of that name is answered with, without asking a worker."""
        self._placed = placed
        self._elastic = elastic
        self._keeper = keeper
        self._stats = stats

    def answer(self, request: dict[str, Any]) -> Any:
        """Carries out a request and returns the result. Raises ProtocolError for one that is not
        known, and the errors of what it asks for.
        """
        orders: dict[str, Callable[[dict[str, Any]], Any]] = {
            "list": lambda _request: self._list(),
            "stats": lambda _request: self._stats(),
            "add": lambda request: self._elastic.add(_text(request, "spec")) and None,
            "drain": lambda request: self._elastic.remove(_text(request, "name"), _drain_s(request), force=_force(request)),
            "restart": lambda request: self._elastic.restart(_text(request, "name"), _drain_s(request), force=_force(request)),
            "release": lambda request: self._keeper.release(_text(request, "name")),
        }
        order = orders.get(str(request.get("order")))
        if order is None:
            raise ProtocolError(f"order {str(request.get('order'))[:40]!r} is not known; known are {', '.join(orders)}")
        return order(request)

    def _list(self) -> dict[str, Any]:
        """Says how every worker stands, with what is known without asking it."""
        fleet, held = self._placed.fleet, self._placed.held
        rows = []
        for state in self._keeper.states():
            member = fleet.members.get(state.name)
            if member is None:  # it is gone by now
                continue
            session = member.session
            rows.append(
                {
                    **asdict(state),
                    "address": str(member.address),
                    "transport": member.transport,
                    "way": member.way,
                    "numerics": member.numerics,
                    "architecture": member.architecture,
                    "pid": session.pid if session is not None else os.getpid(),
                    "is_started_by_host": session is not None and session.started is not None,
                    "shards": len(held.get(state.name, ())),
                    "weight_bytes": session.resident_bytes if session is not None else _own_bytes(member),
                }
            )
        return {"pid": os.getpid(), "model": self._placed.spec.path, "workers": rows}


class ControlSocket:
    """Listens for orders of this user's processes from `start` to `close`. The socket belongs to
    the process that opened it; a host that gets none runs without.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        self._answer = answer
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._orders: set[threading.Thread] = set()

    def start(self) -> None:
        """Begins to listen. It never raises: orders can then not be given."""
        try:
            self._listener = listen()
            self._thread = threading.Thread(target=self._run, args=(self._listener,), name="dflash-control", daemon=True)
            self._thread.start()
        except (DflashError, RuntimeError) as error:
            log.warning("no orders can be given to this host: %s", error)
            self.close()

    def close(self) -> None:
        """Ends the socket and its threads; never raises."""
        self._is_over.set()
        if self._listener is not None:
            with suppress(OSError):  # it wakes whoever waits for it
                self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            threads = [thread for thread in (self._thread, *self._orders) if thread is not None]
        for thread in threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(STOP_S)
        if self._listener is not None:
            self._listener.close()

    def _run(self, listener: socket.socket) -> None:
        poller = select.poll()
        poller.register(listener, select.POLLIN)
        while not self._is_over.is_set():
            poller.poll()
            try:
                sock, _ = listener.accept()
            except OSError:  # it is closed, or the caller is gone again
                if self._is_over.wait(0.05):
                    return
                continue
            self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        order = threading.Thread(target=self._serve, args=(sock,), name="dflash-order", daemon=True)
        with self._lock:
            is_busy = len(self._orders) >= MAX_ORDERS
            if not is_busy:
                self._orders.add(order)
        try:
            if not is_busy:
                order.start()
                return
        except RuntimeError:  # as many threads as the system allows
            with self._lock:
                self._orders.discard(order)
        sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                require_same_user(sock)
                request = receive_line(sock, timeout_s=ANSWER_S)
                send_line(sock, self._carry_out(request), timeout_s=ANSWER_S)
        except (OSError, ProtocolError) as error:  # the caller is gone, or nobody to talk to
            log.info("an order came to nothing: %s", error)
        finally:
            ended = threading.current_thread()
            with self._lock:
                self._orders.discard(ended)

    def _carry_out(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"result": self._answer(request)}
        except DflashError as error:
            return {"error": error_fields(error)}
        except Exception as error:
            log.exception("order %s failed", request.get("order"))
            return {"error": error_fields(DflashError(f"{type(error).__name__}: {error}"))}


def _text(request: dict[str, Any], key: str) -> str:
    value = request.get(key)
    if not isinstance(value, str):
        raise ConfigError(f"the order has no {key}")
    return value


def _drain_s(request: dict[str, Any]) -> float:
    value = request.get("drain_s", 30.0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError("drain_s is no number")
    return float(value)


def _force(request: dict[str, Any]) -> bool:
    return request.get("force") is True


def _own_bytes(member: Any) -> int:
    return int(member.local.resident_bytes) if member.local is not None else 0
