"""The engine process's end of the link to one front: requests go to the engine, deltas of a step go
out as one frame. It believes nothing that a front sends.

Two threads work on it: one receives, and one sends, so that the engine's thread only leaves deltas
here and goes on.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dflash_moe.engine.delivery import Bell
from dflash_moe.engine.request import TokenDelta
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.errors import DflashError, EngineError, ProtocolError
from dflash_moe.server.front import frames
from dflash_moe.telemetry.spaced_log import SpacedLog

log = logging.getLogger(__name__)
_spaced = SpacedLog(log)

# A front that takes nothing for so long is replaced.
SEND_S = 30.0
# The sending thread looks so often whether it is to end, whoever may have failed to ring.
LOOK_S = 60.0
# Deltas that may wait for a front. One that is so far behind is not alive, and its requests end.
MAX_WAITING = 1 << 17
_RECEIVE_BYTES = 1 << 18

Deliver = Callable[[list[tuple[int, TokenDelta]]], None]


class Service(Protocol):
    """What the relay asks of an engine."""

    def sink(self, deliver: Deliver) -> Any:
        """Returns what deltas of requests go to, each step's at once."""
        ...

    def submit(self, token_ids: Sequence[int], params: SamplingParams, sink: Any, salt: bytes) -> int:
        """Starts a request and returns its number."""
        ...

    def cancel(self, request_id: int, choice: int | None) -> None:
        """Ends a request or a choice of it within one step."""
        ...

    def mask(self, grammar: str) -> Any:
        """Returns the token mask of a grammar that the front has compiled."""
        ...

    def is_alive(self) -> bool:
        """Says whether the engine's thread is there."""
        ...

    def unready_reason(self) -> str:
        """Returns why a request would not be computed now, empty where it would, and in a drain,
        where `submit` raises an error of code "draining".
        """
        ...

    def snapshot(self) -> dict[str, Any]:
        """Returns what was counted, as `server.snapshot` has it. It asks no worker."""
        ...

    def drain(self, deadline_s: float) -> bool:
        """Refuses new requests, waits for open ones, and cancels those that are left after
        `deadline_s` seconds. Returns whether all ended by themselves.
        """
        ...


class Relay:
    """One front's requests. It owns the socket."""

    def __init__(self, sock: socket.socket, on_up: Callable[[], None]) -> None:
        """`on_up` is called once the front takes requests."""
        self._sock = sock
        self._sock.settimeout(None)
        self._on_up = on_up
        self._service: Service | None = None
        self._sink: Any = None
        self._out: deque[bytes | list[tuple[int, TokenDelta]]] = deque()
        # Deltas that the engine's thread has put into `_out`, and that the sending one has taken:
        # each is counted by one thread.
        self._num_put = self._num_taken = 0
        self._bell = Bell()
        self._is_closed = False
        # Guards the three tables of request numbers. It is held while a request is submitted, so
        # that deltas that come before the engine has returned its number wait for that. The
        # engine's thread never takes it.
        self._lock = threading.Lock()
        self._fronts: dict[int, int] = {}
        self._engines: dict[int, int] = {}
        self._num_open: dict[int, int] = {}
        self._sender = threading.Thread(target=self._send_all, name="front-sender", daemon=True)
        self._sender.start()

    # -- any thread --------------------------------------------------------------------------------
    def send(self, *message: Any) -> None:
        """Has a frame sent. A front that asks for answers and takes none is given up."""
        if len(self._out) > MAX_WAITING:
            self.hang_up()
            return
        self._out.append(frames.packed(*message))
        self._bell.ring()

    def serve(self, service: Service) -> None:
        """Lets requests reach an engine from now on."""
        self._sink = service.sink(self._deliver)
        self._service = service

    def _deliver(self, deltas: list[tuple[int, TokenDelta]]) -> None:
        """Takes what a step gave. The engine's thread calls it. What is raised here ends the sink
        for good, and so the front too: another one has a sink of its own.
        """
        if self._is_closed:
            return  # they are cancelled already
        self._num_put += len(deltas)
        if self._num_put - self._num_taken > MAX_WAITING:
            self.hang_up()
            raise EngineError(f"the front has not taken {self._num_put - self._num_taken} tokens; its requests end")
        self._out.append(deltas)
        self._bell.ring()

    def hang_up(self) -> None:
        """Ends the connection, so that `receive` returns."""
        # It may be closed already.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    # -- the receiving thread ----------------------------------------------------------------------
    def receive(self) -> str:
        """Does what the front asks for until it hangs up, and returns why that ended. What it has
        asked for is cancelled then.
        """
        buffer = frames.FrameBuffer(frames.MAX_REQUEST_BYTES)
        try:
            while received := self._sock.recv(_RECEIVE_BYTES):
                for kind, *content in buffer.feed(received):
                    self._take(kind, content)
            reason = "it hung up"
        except OSError as error:
            reason = f"it hung up ({error.strerror})"
        except (DflashError, TypeError, ValueError) as error:
            reason = f"it sent what is no request: {error}"
        except Exception as error:
            # One front is replaced, and weights stay, whatever one of its requests has met.
            log.exception("a request of the front has failed")
            reason = f"its request has failed: {type(error).__name__}"
        finally:
            self._close()
        return reason

    def _take(self, kind: str, content: list[Any]) -> None:
        if kind == frames.SUBMIT:
            self._submit(*content)
        elif kind == frames.CANCEL:
            self._cancel(*content)
        elif kind == frames.ASK:
            (number,) = content
            self.send(frames.ANSWER, number, *self._standing())
        elif kind == frames.MEASURE:
            (number,) = content
            self.send(frames.MEASURED, number, self._snapshot())
        elif kind == frames.UP:
            self._on_up()
        else:
            raise ProtocolError(f"frame between engine and front: kind {kind[:20]!r} is unknown")

    def _standing(self) -> tuple[bool, str]:
        service = self._service
        if service is None:
            return True, "the model is being loaded"
        if not service.is_alive():
            return False, "the engine thread has ended"
        try:
            return True, service.unready_reason()
        except DflashError as error:
            return True, str(error)

    def _snapshot(self) -> dict[str, Any]:
        """Returns what was counted; nothing where the engine is not there yet or any more."""
        service = self._service
        if service is None or not service.is_alive():
            return {}
        try:
            return service.snapshot()
        except DflashError:
            return {}  # the runtime was closed
        except Exception:  # noqa: BLE001 - it is logged
            # Requests go on, whatever is wrong with their numbers.
            _spaced.exception("the counters of the engine cannot be read")
            return {}

    def _submit(self, number: int, token_ids: bytes, fields: Mapping[str, Any], salt: bytes, grammar: str = "") -> None:
        try:
            service = self._service
            if service is None:
                raise DflashError("the model is being loaded", code=frames.LOADING)
            ids, params = frames.token_ids_of(token_ids), frames.params_of(fields)
            if not isinstance(number, int) or not isinstance(salt, bytes) or number in self._engines:
                raise ProtocolError(f"frame between engine and front: request {number!r} is no new one, or its salt no bytes")
            if not isinstance(grammar, str) or len(grammar) > frames.MAX_GRAMMAR_CHARACTERS:
                raise ProtocolError(f"frame between engine and front: the grammar of request {number!r} is none")
            if reason := service.unready_reason():
                raise DflashError(reason, code=frames.UNREADY)
            wanted = SamplingParams(**params, token_mask=service.mask(grammar) if grammar else None)
            with self._lock:
                found = service.submit(ids, wanted, self._sink, salt)
                self._fronts[found], self._engines[number] = number, found
                self._num_open[found] = wanted.n
        except ProtocolError:
            raise
        except DflashError as error:
            self.send(frames.REFUSED, number, frames.error_fields(error))

    def _cancel(self, number: int, choice: int | None) -> None:
        with self._lock:
            found = self._engines.get(number)
        if found is not None and self._service is not None:
            self._service.cancel(found, choice if isinstance(choice, int) else None)

    def _close(self) -> None:
        self._is_closed = True
        self.hang_up()
        self._bell.ring()
        with self._lock:
            open_ones = list(self._fronts)
        for request_id in open_ones:
            if self._service is not None:
                self._service.cancel(request_id, None)
        self._sender.join(SEND_S)
        self._sock.close()

    # -- the sending thread ------------------------------------------------------------------------
    def _send_all(self) -> None:
        # One call of send ends within so long; the socket's other direction never times out.
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(SEND_S))
        try:
            while not self._is_closed:
                while self._out:
                    if not self._send_one(self._out.popleft()):
                        return
                self._bell.wait(LOOK_S)
        except Exception:
            log.exception("what is for the front cannot be sent")
        finally:
            # Whatever has ended this thread, the front must not wait for what nobody sends.
            self.hang_up()

    def _send_one(self, item: bytes | list[tuple[int, TokenDelta]]) -> bool:
        frame = item if isinstance(item, bytes) else self._frame_of(item)
        try:
            self._sock.sendall(frame)
        except OSError as error:
            if not self._is_closed:
                log.warning("the front takes nothing any more (%s)", error.strerror or error)
            return False
        return True

    def _frame_of(self, deltas: Sequence[tuple[int, TokenDelta]]) -> bytes:
        self._num_taken += len(deltas)
        found = []
        with self._lock:
            for request_id, delta in deltas:
                number = self._fronts.get(request_id)
                if number is None:
                    continue
                found.append(frames.delta_fields(number, delta))
                if delta.finish_reason is not None:
                    self._ended(request_id, number)
        return frames.packed(frames.DELTAS, found)

    def _ended(self, request_id: int, number: int) -> None:
        self._num_open[request_id] -= 1
        if not self._num_open[request_id]:
            del self._fronts[request_id], self._engines[number], self._num_open[request_id]


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
