"""The host's half of one control session: handshake, hello, loading, data paths, goodbye. One
session per worker.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from dflash_moe import _core
from dflash_moe.errors import DflashError, ProtocolError, WorkerLost, WorkerTimeout
from dflash_moe.protocol.auth import HANDSHAKE_S, PEER_CREDENTIAL_KEY, Peer, authenticate_to_worker
from dflash_moe.protocol.devices import DeviceChoice
from dflash_moe.protocol.failures import to_error
from dflash_moe.protocol.framing import USER_TIMEOUT_MS, Connection, PeerGone
from dflash_moe.protocol.identity import CAPABILITIES, Identity, identity_of, require_equal
from dflash_moe.protocol.messages import (
    SESSION_ID_BYTES,
    Attach,
    Attached,
    Bye,
    Hello,
    HelloReply,
    Listening,
    LoadShard,
    Progress,
    Refusal,
    Role,
    ShardLoaded,
    Stats,
    StatsRequest,
)
from dflash_moe.protocol.schema import Message
from dflash_moe.runtime.data_path import SlotPlan
from dflash_moe.runtime.dialing import dial, dial_role
from dflash_moe.runtime.launcher import StartedWorker
from dflash_moe.topology.addresses import Address
from dflash_moe.topology.spec import possible_classes
from dflash_moe.version import __version__

EXIT_STATUS_S = 1.0  # a worker that hung up is reaped within this; longer would delay the error
M = TypeVar("M", bound=Message)


class WorkerSession:
    """Talks to one worker. Owns its control connection and, if the host started it, the child
    process.

    Any thread; conversations are serialised by a lock.
    """

    def __init__(
        self,
        name: str,
        address: Address,
        *,
        started: StartedWorker | None,
        key: bytes | None,
        socket_buffer_bytes: int | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.started = started
        self.hello: HelloReply | None = None
        self.resident_bytes = 0
        self._key = key
        num_bytes = socket_buffer_bytes or 0
        self._buffers = {"send_buffer_bytes": num_bytes, "receive_buffer_bytes": num_bytes}
        self._connection: Connection | None = None
        self._peer: Peer | None = None
        self._has_pulse = False
        self._unanswered = 0  # questions whose answer did not come in time
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """The worker's process id, on its own machine."""
        return self.started.process.pid if self.started else self.hello.pid if self.hello else 0

    def connect(self, *, timeout_s: float) -> None:
        """Opens and authenticates the control connection. WorkerLost, WorkerTimeout,
        ProtocolError.
        """
        deadline = time.monotonic() + timeout_s
        if self.started is not None:
            sock, key = self.started.control, self.started.key
        else:
            sock, key = dial(self.name, self.address), self._key or PEER_CREDENTIAL_KEY
            deadline = min(deadline, time.monotonic() + HANDSHAKE_S)
        self._connection = Connection(sock)
        try:
            self._peer = authenticate_to_worker(
                self._connection,
                worker=self.name,
                role=Role.CONTROL,
                key=key,
                session_id=secrets.token_bytes(SESSION_ID_BYTES),
                generation=0,
                deadline=deadline,
            )
        except PeerGone:
            raise self.loss("hung up in the handshake") from None
        except WorkerTimeout:
            raise self._late("finish the handshake", timeout_s) from None

    def greet(
        self,
        ours: Identity,
        *,
        numerics: str,
        threads: int,
        spin_ns: int,
        slowdown: float,
        isa: str,
        timeout_s: float,
        cpus: tuple[int, ...] = (),
        device: DeviceChoice | None = None,
        weights_layout: str = "packed",
    ) -> HelloReply:
        """Exchanges hello; ProtocolError naming the field and both values where the ends do not
        fit.

        UnsupportedError where the worker does not compute in class `numerics` or cannot use
        `device` (None: the processor), ConfigError where it lacks the device or one of `cpus`.
        """
        place = device or DeviceChoice()
        message = Hello(
            package_version=__version__,
            worker=self.name,
            numerics_class=numerics,
            model_fingerprint=ours.model_fingerprint,
            wire_limits=dict(ours.wire_limits),
            dtypes=ours.dtypes,
            capabilities=CAPABILITIES,
            threads=threads,
            spin_ns=spin_ns,
            slowdown=slowdown,
            isa=isa,
            cpus=cpus,
            backend=place.backend,
            device=place.device,
            simulate=place.simulate,
            weights_layout=weights_layout,
        )
        with self._lock:
            reply = self._ask(message, HelloReply, timeout_s=timeout_s, doing="answer hello")
        require_equal(ours, identity_of(reply), name=self.name)
        if reply.numerics_class not in possible_classes(numerics):
            raise ProtocolError(
                f"worker {self.name}: numerics_class: the host asked for {numerics}, the worker has {reply.numerics_class}"
            )
        self.hello = reply
        return reply

    def load(self, message: LoadShard, *, timeout_s: float, report: Callable[[int], None] = lambda _count: None) -> None:
        """Has one shard loaded; `timeout_s` limits the time without progress, not the whole.

        `report` gets the experts that this session has loaded so far, whenever the worker says so.
        """
        doing = f"load {message.name} shard {message.shard}"
        with self._lock:
            self._send(message, timeout_s, doing)
            last_counter = -1
            deadline = time.monotonic() + timeout_s
            while True:
                answer = self._receive(deadline, timeout_s, doing)
                if isinstance(answer, Progress):
                    if answer.counter != last_counter:
                        last_counter, deadline = answer.counter, time.monotonic() + timeout_s
                        report(answer.counter)
                    continue
                loaded = self._expect(answer, ShardLoaded)
                if (loaded.layer, loaded.shard) != (message.layer, message.shard):
                    raise ProtocolError(f"worker {self.name}: ShardLoaded names layer {loaded.layer} shard {loaded.shard}, "
                                        f"asked was layer {message.layer} shard {message.shard}")  # fmt: skip
                self.resident_bytes = loaded.resident_bytes
                return

    def attach(
        self, slots: SlotPlan, transport: str, generation: int, *, timeout_s: float, is_open: bool = False
    ) -> tuple[_core.Channel, int]:
        """Builds a data path; returns the host's channel and the pulse descriptor (-1 but for the
        first time), the caller's.

        `is_open`: replies in shared memory that a device of this process may register; for a worker
        that this host started.
        """
        with self._lock, contextlib.ExitStack() as cleanup:
            geometry = _core.Geometry(slots.num_slots, slots.request_bytes, slots.reply_bytes)
            is_first = not self._has_pulse
            doing = f"attach a {transport} data path"
            if transport == "tcp":
                channel, pulse = self._attach_tcp(geometry, generation, is_first, timeout_s, doing)
            else:
                channel, pulse = self._attach_local(
                    geometry, transport, generation, is_first, timeout_s, doing, cleanup, is_open
                )
            self._has_pulse = True
            return channel, pulse

    def _attach_local(
        self,
        geometry: _core.Geometry,
        transport: str,
        generation: int,
        is_first: bool,
        timeout_s: float,
        doing: str,
        cleanup: contextlib.ExitStack,
        is_open: bool,
    ) -> tuple[_core.Channel, int]:
        passed: list[int] = []
        own: _core.Segment | None = None
        data: socket.socket | None = None
        if transport == "shared":
            own = _core.Segment.create("host", geometry, generation)
            bell = _core.new_eventfd()
            cleanup.callback(os.close, bell)
            passed += [own.fileno(), bell]
        else:
            data, theirs = socket.socketpair()
            cleanup.callback(theirs.close)
            cleanup.callback(data.close)
            passed.append(theirs.fileno())
        pulse: socket.socket | None = None
        if is_first:
            pulse, their_pulse = socket.socketpair()
            cleanup.callback(their_pulse.close)
            cleanup.callback(pulse.close)
            passed.append(their_pulse.fileno())
        attached = self._ask(
            self._attach_message(geometry, transport, generation, len(passed), is_first, is_open),
            Attached, timeout_s=timeout_s, doing=doing, descriptors=passed,
        )  # fmt: skip
        received = self._connected().take_descriptors(attached.num_descriptors)
        if own is not None and len(received) == 1:
            peer = _core.Segment.attach(received[0], "worker", geometry, generation, is_open)
            channel = _core.make_shared_channel("host", geometry, own, peer, passed[1])
        elif data is not None and not received:
            channel = _core.make_stream_channel("host", geometry, data.detach(), **self._buffers)
        else:
            for descriptor in received:
                os.close(descriptor)
            raise ProtocolError(f"worker {self.name}: Attached brought {len(received)} descriptors for transport {transport}")
        return channel, pulse.detach() if pulse is not None else -1

    def _attach_tcp(
        self, geometry: _core.Geometry, generation: int, is_first: bool, timeout_s: float, doing: str
    ) -> tuple[_core.Channel, int]:
        message = self._attach_message(geometry, "tcp", generation, 0, is_first)
        listening = self._ask(message, Listening, timeout_s=timeout_s, doing=doing)
        host = self.address.host or "127.0.0.1"
        address = Address("tcp", host=host, port=self.address.port or listening.port)
        data = self._open(address, Role.DATA, generation)
        pulse = -1
        try:
            if is_first:
                pulse = self._open(address, Role.PULSE, 0)
            self._unanswered += 1
            answer = self._receive(time.monotonic() + timeout_s, timeout_s, doing)
            self._unanswered -= 1
            self._expect(answer, Attached)
        except BaseException:
            os.close(data)
            if pulse >= 0:
                os.close(pulse)
            raise
        return _core.make_stream_channel("host", geometry, data, user_timeout_ms=USER_TIMEOUT_MS, **self._buffers), pulse

    def _open(self, address: Address, role: Role, generation: int) -> int:
        if self._peer is None:
            raise ProtocolError(f"worker {self.name}: no session yet")
        try:
            buffer_bytes = self._buffers["send_buffer_bytes"] if role is Role.DATA else 0
            return dial_role(self.name, address, role, self._peer, generation, buffer_bytes)
        except PeerGone:
            raise self.loss(f"hung up its {role.name.lower()} connection in the handshake") from None

    def _attach_message(
        self,
        geometry: _core.Geometry,
        transport: str,
        generation: int,
        num_descriptors: int,
        has_pulse: bool,
        is_open: bool = False,
    ) -> Attach:
        return Attach(
            generation=generation,
            transport=transport,
            num_slots=geometry.num_slots,
            request_bytes=geometry.request_bytes,
            reply_bytes=geometry.reply_bytes,
            num_descriptors=num_descriptors,
            has_pulse=has_pulse,
            socket_buffer_bytes=self._buffers["send_buffer_bytes"],
            is_open=is_open,
        )

    def ask_stats(self, *, timeout_s: float) -> dict[str, int]:
        """The worker's own counters and memory."""
        with self._lock:
            return dict(self._ask(StatsRequest(), Stats, timeout_s=timeout_s, doing="send its counters").counters)

    def say_bye(self) -> None:
        """Tells the worker that the session is over; never raises for a worker that is gone or
        stopped.
        """
        if self._connection is not None:
            with contextlib.suppress(DflashError):
                self._connection.send(Bye(), deadline=time.monotonic() + 0.2)

    def hang_up(self) -> None:
        """Ends the session without a word, so that a thread which waits for this worker returns;
        any thread.
        """
        if self._connection is not None:
            self._connection.hang_up()

    def close(self, *, seconds: float) -> None:
        """Closes the connection and ends the child, gracefully within `seconds`, else by
        SIGKILL.
        """
        if self._connection is not None:
            self._connection.close()
        if self.started is not None:
            self.started.control.close()
            self.started.close(seconds=seconds)

    def loss(self, what: str) -> WorkerLost:
        """A WorkerLost that says `what` happened, how the process ended and what it logged last."""
        if self.started is not None:
            return WorkerLost(f"worker {self.name} {what}; {self.started.describe_exit(seconds=EXIT_STATUS_S)}")
        return WorkerLost(f"worker {self.name} at {self.address} {what}; look at its own output there")

    def _late(self, doing: str, timeout_s: float) -> WorkerTimeout:
        tail = self.started.log.tail() if self.started is not None else ""
        quoted = f"; last lines of its log:\n{tail}" if tail else ""
        limit = "ipc.start_timeout_s" if self.hello is None or doing.startswith("load") else "ipc.call_timeout_s"
        return WorkerTimeout(f"worker {self.name} did not {doing} within {timeout_s:g} s without progress ({limit}){quoted}")

    def _connected(self) -> Connection:
        if self._connection is None:
            raise ProtocolError(f"worker {self.name}: not connected")
        return self._connection

    def _ask(self, message: Message, answer: type[M], *, timeout_s: float, doing: str, descriptors: Sequence[int] = ()) -> M:
        deadline = time.monotonic() + timeout_s
        self._discard_stale(deadline, timeout_s, doing)
        self._send(message, timeout_s, doing, descriptors)
        self._unanswered += 1
        received = self._receive(deadline, timeout_s, doing)
        self._unanswered -= 1
        return self._expect(received, answer)

    def _discard_stale(self, deadline: float, timeout_s: float, doing: str) -> None:
        """Answers come in the order of the questions; those that came after their deadline are
        dropped here.
        """
        while self._unanswered:
            stale = self._receive(deadline, timeout_s, doing)
            if isinstance(stale, Attached):
                for descriptor in self._connected().take_descriptors(stale.num_descriptors):
                    os.close(descriptor)
            if not isinstance(stale, (Listening, Progress)):  # those are not the end of an answer
                self._unanswered -= 1

    def _send(self, message: Message, timeout_s: float, doing: str, descriptors: Sequence[int] = ()) -> None:
        try:
            self._connected().send(message, deadline=time.monotonic() + timeout_s, descriptors=descriptors)
        except PeerGone:
            # What it said before it left explains more than the hang-up.
            self._raise_last_words()
            raise self.loss(f"hung up before it could {doing}") from None
        except WorkerTimeout:
            raise self._late(doing, timeout_s) from None

    def _raise_last_words(self) -> None:
        answer: Message | None = None
        with contextlib.suppress(PeerGone, WorkerTimeout, ProtocolError):
            answer = self._connected().receive(deadline=time.monotonic() + 0.1, waiting_for="last words")
        if isinstance(answer, Refusal):
            raise to_error(answer, worker=self.name)

    def _receive(self, deadline: float, timeout_s: float, doing: str) -> Message:
        try:
            return self._connected().receive(deadline=deadline, waiting_for=doing)
        except PeerGone:
            raise self.loss(f"hung up before it could {doing}") from None
        except WorkerTimeout:
            raise self._late(doing, timeout_s) from None

    def _expect(self, answer: Message, wanted: type[M]) -> M:
        if isinstance(answer, Refusal):
            raise to_error(answer, worker=self.name)
        if not isinstance(answer, wanted):
            raise ProtocolError(f"worker {self.name}: expected {wanted.__name__}, found {type(answer).__name__}")
        return answer
