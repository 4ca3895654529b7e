"""The host's end of the session with one worker: handshake, hello, loading, data paths, goodbye.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace

from dflash_moe import _core
from dflash_moe.errors import DflashError, ProtocolError, UnsupportedError, WorkerLost, WorkerTimeout
from dflash_moe.holders.conversation import Conversation, Turn
from dflash_moe.holders.dialing import CallOff, Credentials, connect_authenticated
from dflash_moe.holders.launcher import StartedWorker
from dflash_moe.holders.owner import Owner
from dflash_moe.holders.registration import RegistrationDesk
from dflash_moe.protocol.auth import PEER_CREDENTIAL_KEY, Peer, authenticate_to_worker
from dflash_moe.protocol.descriptors import Descriptors
from dflash_moe.protocol.devices import DeviceChoice
from dflash_moe.protocol.encryption import Encryption
from dflash_moe.protocol.failures import system_failure
from dflash_moe.protocol.framing import Connection, Detached, PeerGone
from dflash_moe.protocol.identity import CAPABILITIES, Identity, identity_of, require_equal
from dflash_moe.protocol.messages import (
    AUDIT_SINCE,
    CHECKSUMS_SINCE,
    PANELS_SINCE,
    SESSION_ID_BYTES,
    Attach,
    Attached,
    Bye,
    Checksum,
    ChecksumRequest,
    ComputeRow,
    Hello,
    HelloReply,
    Listening,
    LoadShard,
    Progress,
    Role,
    RowComputed,
    ShardLoaded,
    Stats,
    StatsRequest,
    WeightsChanged,
)
from dflash_moe.protocol.paths import TRANSPORTS, terms_of
from dflash_moe.topology.addresses import Address
from dflash_moe.topology.numerics import possible_classes
from dflash_moe.version import __version__

# A worker that hung up is reaped within this time. Waiting longer would only delay the error.
EXIT_STATUS_S = 1.0
# Messages about a time-out name one of these settings, which allow more time.
START_LIMIT, CALL_LIMIT, STALL_LIMIT = "ipc.start_timeout_s", "ipc.call_timeout_s", "ipc.stall_timeout_s"


@dataclass(frozen=True, slots=True)
class PathAnswer:
    """What completes an offered data path: the worker's payload, and descriptors, which the holder
    owns. The worker's come first, then the dialled data connection if the transport has one, and
    then the pulse where `has_pulse`.
    """

    payload: bytes
    descriptors: list[int]
    has_pulse: bool
    # The dialled data connection where it is encrypted and whoever asked takes it so; it is then
    # none of `descriptors`.
    secured: _core.SecureSocket | None = None


class HostSession:
    """Talks to one worker. It owns the control connection and, if the host started the worker, the
    child process. Both belong to the process that made the session, and a forked child leaves them
    alone.

    Any thread may call; the worker is asked one question at a time.
    """

    def __init__(
        self,
        name: str,
        address: Address,
        *,
        started: StartedWorker | None,
        key: bytes | None,
        session_id: bytes | None = None,
        socket_buffer_bytes: int | None = None,
        encryption: str = "auto",
        on_notice: Callable[[WeightsChanged], None] = lambda _notice: None,
        desk: RegistrationDesk | None = None,
    ) -> None:
        """`key` is the shared key, or None where no key file is named; `encryption` is the setting
        of this name. `session_id` is that of a former session with this worker, which ends where
        the worker still serves it; None takes a fresh one. `on_notice` is told of weights that
        changed in the worker's memory, from whatever thread reads it. A worker that registers comes
        to the `desk`, and is never dialled.
        """
        self.name = name
        self.address = address
        self.started = started
        self.hello: HelloReply | None = None
        self.resident_bytes = 0
        self._key = key
        self._desk = desk
        # Whether both ends are addresses of this machine, once it is connected.
        self.is_local = False
        # A worker that this host started has a key of its own, and Unix sockets do without.
        shared = started.key if started is not None else key
        self._encryption = Encryption(encryption, shared) if shared is not None else None
        # These decrypt for somebody who has only a descriptor: the library of a program that takes
        # the worker over, and whoever reads the pulse.
        self._relays: dict[Role, _core.Relay] = {}
        self._buffer_bytes = socket_buffer_bytes or 0
        self._conversation: Conversation | None = None
        self._peer: Peer | None = None
        # The shards that the worker has loaded in this session, as (layer, shard).
        self._loaded: set[tuple[int, int]] = set()
        self._session_id = session_id or secrets.token_bytes(SESSION_ID_BYTES)
        self._on_notice = on_notice
        self._has_pulse = False
        # The worker was asked to load so many experts in all, and said that it has so many of them.
        self._num_asked = 0
        self._num_loaded = 0
        self._owner = Owner()
        self._call_off = CallOff()

    @property
    def pid(self) -> int:
        """The worker's process id on its own machine, 0 as long as it is not known."""
        return self.started.process.pid if self.started else self.hello.pid if self.hello else 0

    def fileno(self) -> int:
        """Returns the descriptor of the control connection, which hangs up with the worker; -1
        where there is none.
        """
        return self._conversation.connection.fileno() if self._conversation is not None else -1

    @property
    def is_connected(self) -> bool:
        """Whether it has a control connection, which may be broken and not closed yet."""
        return self.fileno() >= 0

    def answers(self, *, within_s: float) -> bool:
        """Whether the worker says something within so many seconds, in answer to a question or
        while it does what it was asked for. It never raises. One that is not greeted yet counts as
        answering, because its start has a limit of its own.
        """
        conversation = self._conversation
        if conversation is None or self.hello is None:
            return conversation is not None
        before = conversation.num_received
        with suppress(DflashError):
            self.ask_stats(timeout_s=within_s)
        return conversation.num_received > before

    @property
    def is_encrypted(self) -> bool:
        """Whether all connections of this session are encrypted, as its control connection is."""
        return self._conversation is not None and self._conversation.is_encrypted

    @property
    def local_host(self) -> str:
        """This host's own numeric address on the way to the worker; empty on the same machine."""
        return self._conversation.local_host if self._conversation is not None else ""

    def has_left(self) -> bool:
        """Whether the worker's last word was that somebody told it to stop. It reads what has come,
        and never raises.
        """
        self.take_notices()
        return self._conversation is not None and self._conversation.has_left

    def connect(self, *, timeout_s: float) -> None:
        """Opens and authenticates the control connection. Raises WorkerLost, WorkerTimeout and
        ProtocolError.
        """
        deadline = time.monotonic() + timeout_s
        if self.started is None and self._desk is None:
            credentials = Credentials(
                Role.CONTROL, self._key or PEER_CREDENTIAL_KEY, self._session_id, encryption=self._encryption
            )
            connection, self._peer = connect_authenticated(
                self.name, self.address, credentials, deadline=deadline, call_off=self._call_off
            )
            self._conversation = self._converse(connection)
            return
        connection, key = self._given(deadline)
        self._conversation = self._converse(connection)
        try:
            self._peer = authenticate_to_worker(
                connection, worker=self.name, role=Role.CONTROL, key=key, session_id=self._session_id,
                generation=0, deadline=deadline,
            )  # fmt: skip
        except PeerGone:
            raise self.loss("hung up in the handshake") from None
        except WorkerTimeout:
            raise WorkerTimeout(
                f"worker {self.name} did not finish the handshake within {timeout_s:g} s ({START_LIMIT}){self._quoted_log()}",
                worker=self.name,
            ) from None

    def _given(self, deadline: float) -> tuple[Connection, bytes]:
        """Returns the connection of a worker that this host started, or that registers, and its
        key.
        """
        if self.started is not None:
            return Connection(self.started.control), self.started.key
        if self._desk is None:
            raise ProtocolError(f"worker {self.name}: nobody has given a connection")
        taken = self._desk.take(self.name, deadline=deadline, is_given_up=lambda: self._call_off.is_given_up)
        self.is_local = taken[0].is_local
        return taken

    def _converse(self, connection: Connection) -> Conversation:
        return Conversation(self.name, connection, loss=self.loss, quote_log=self._quoted_log, on_notice=self._on_notice)

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
        slots_bytes: int = 0,
        scrub_s: float = 0.0,
    ) -> HelloReply:
        """Exchanges hello with the worker: it learns what it shall compute with and in which class,
        and both ends compare their facts. `device` None means the processor, an empty `isa` the
        worker's best kernel set, and 0 `threads` the worker's own choice. It sums its weights up
        again every `scrub_s` seconds, never where that is 0. `weights_layout` is that of Hello; a
        worker of a version that knows no panels is asked for packed weights in place of them.

        Errors: ProtocolError naming the field and both values where the ends do not fit;
        UnsupportedError where the worker does not compute in class `numerics` or cannot use
        `device`; ConfigError where it lacks the device or one of `cpus`; WorkerLost, WorkerTimeout.
        """
        place = device or DeviceChoice()
        if weights_layout != "mapped" and self._peer is not None and self._peer.protocol_minor < PANELS_SINCE:
            weights_layout = "mapped" if slots_bytes else "packed"
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
            slots_bytes=slots_bytes,
            start_timeout_s=timeout_s,
            scrub_s=scrub_s,
        )
        with self._any_turn("answer hello", timeout_s, START_LIMIT) as turn:
            reply = turn.ask(message, HelloReply)
        require_equal(ours, identity_of(reply), name=self.name)
        if reply.numerics_class not in possible_classes(numerics):
            raise ProtocolError(
                f"worker {self.name}: numerics_class: the host asked for {numerics}, the worker has {reply.numerics_class}"
            )
        self.hello = reply
        return reply

    def load(self, message: LoadShard, *, timeout_s: float, report: Callable[[int], None] = lambda _count: None) -> int | None:
        """Has the worker load one shard. Returns its content checksum, or None where it is
        unchecked so far. `timeout_s` limits the time without progress, not the whole.

        `report` is called with the number of experts that this session has loaded so far, whenever
        the worker says so. Progress is an expert more than before, of those asked for, so that a
        worker cannot renew the deadline for ever.
        """
        self._num_asked += sum(message.expert_ranges[1::2])
        with self._turn(f"load {message.name} shard {message.shard}", timeout_s, START_LIMIT) as turn:

            def on_progress(progress: Progress) -> None:
                if self._num_loaded < progress.counter <= self._num_asked:
                    self._num_loaded = progress.counter
                    turn.renew()
                    report(progress.counter)

            turn.on(Progress, on_progress)
            loaded = turn.ask(message, ShardLoaded)
        if (loaded.layer, loaded.shard) != (message.layer, message.shard):
            raise ProtocolError(
                f"worker {self.name}: ShardLoaded names layer {loaded.layer} shard {loaded.shard}, "
                f"asked was layer {message.layer} shard {message.shard}"
            )
        self._num_loaded = self._num_asked
        self._loaded.add((message.layer, message.shard))
        self.resident_bytes = loaded.resident_bytes
        return loaded.content_checksum if loaded.is_checked else None

    def attach(
        self,
        slots: _core.SlotPlan,
        transport: str,
        generation: int,
        *,
        timeout_s: float,
        limit: str = CALL_LIMIT,
        is_open: bool = False,
        is_fast_only: bool = False,
    ) -> tuple[_core.Channel, int]:
        """Builds a data path over `transport`, a name in the table of transports. Returns the
        host's channel and the pulse descriptor, both the caller's; the descriptor is -1 except for
        the first path of the session. `limit` names the setting that `timeout_s` comes from.

        `is_open` asks for replies in memory that a device of this process can register, where the
        transport has such. It lifts the seal against writing, so that only a worker which this host
        started is asked. `is_fast_only` offers of a fabric only what hardware moves. Raises
        UnsupportedError where the ends have nothing in common.
        """
        wish = self.wish(slots, transport, generation, is_open=is_open)
        terms = terms_of(wish, local_host=self.local_host, is_fast_only=is_fast_only)
        offer = _core.offer_path(transport, terms)
        answer = self.relay(wish, offer.payload, offer.descriptors, timeout_s=timeout_s, limit=limit, takes_secured=True)
        with Descriptors() as held:
            if answer.has_pulse:
                held.hold([answer.descriptors.pop()])
                self._has_pulse = False  # until somebody has it
            channel = offer.complete(answer.payload, answer.descriptors, answer.secured)
            self._has_pulse = True
            return channel, held.take_first() if answer.has_pulse else -1

    def wish(self, slots: _core.SlotPlan, transport: str, generation: int, *, is_open: bool = False) -> Attach:
        """Returns the message that asks the worker for a data path, before the host's end is
        offered. It asks for a pulse as long as this session has none.
        """
        return Attach(
            generation=generation,
            transport=transport,
            num_slots=slots.num_slots,
            request_bytes=slots.request_bytes,
            reply_bytes=slots.reply_bytes,
            num_descriptors=0,
            has_pulse=not self._has_pulse,
            socket_buffer_bytes=self._buffer_bytes,
            is_open=is_open,
        )

    def relay(
        self,
        wish: Attach,
        offered: bytes,
        descriptors: Sequence[int],
        *,
        timeout_s: float,
        limit: str = CALL_LIMIT,
        takes_secured: bool = False,
    ) -> PathAnswer:
        """Carries an offer that somebody made for `wish` to the worker, and returns what completes
        it. `descriptors` stay the caller's; those of the answer become the caller's.

        An encrypted data connection comes as such where the caller `takes_secured`. For others, and
        for the pulse, this session decrypts until it is closed.

        Errors: those with which the worker refuses; WorkerLost, WorkerTimeout, ProtocolError, and
        DflashError naming the limit where this process is out of descriptors.
        """
        doing = f"attach a {wish.transport} data path"
        secured: list[_core.SecureSocket] | None = [] if takes_secured else None
        build = self._dialled_path if TRANSPORTS[wish.transport].is_dialled else self._passed_path
        if self._desk is not None:
            build = self._registered_path
        with self._turn(doing, timeout_s, limit) as turn, Descriptors() as held:
            try:
                payload = build(turn, replace(wish, offer=offered), descriptors, held, secured)
            except OSError as error:
                raise system_failure(f"worker {self.name}: {doing}", error) from None
            self._has_pulse = True
            return PathAnswer(payload, held.take_all(), wish.has_pulse, secured[0] if secured else None)

    def _passed_path(
        self, turn: Turn, wish: Attach, passed: Sequence[int], held: Descriptors, _secured: list[_core.SecureSocket] | None
    ) -> bytes:
        """Asks for a path whose descriptors travel with the messages, as the pulse's does."""
        passed = list(passed)
        with Descriptors() as pulse:
            if wish.has_pulse:
                _, theirs = pulse.socket_pair()
                passed.append(theirs)
            attached = turn.ask(replace(wish, num_descriptors=len(passed)), Attached, passed)
            held.hold(turn.take_descriptors(attached.num_descriptors))
            if wish.has_pulse:
                held.hold([pulse.take_first()])
        return attached.answer

    def _dialled_path(
        self, turn: Turn, wish: Attach, passed: Sequence[int], held: Descriptors, secured: list[_core.SecureSocket] | None
    ) -> bytes:
        """Asks for a path whose connections the host dials. The data connection follows the
        worker's descriptors, or goes into `secured` where that is a list and it is encrypted; the
        pulse's follows that.
        """
        if passed:
            raise ProtocolError(f"worker {self.name}: {len(passed)} descriptors were offered for a {wish.transport} data path")
        with Descriptors() as dialled:
            turn.on(Listening, lambda listening: self._dial_back(turn, listening, wish, dialled, secured))
            attached = turn.ask(wish, Attached)
            if not len(dialled) and not secured:
                raise ProtocolError(f"worker {self.name}: Attached came before Listening")
            held.hold(turn.take_descriptors(attached.num_descriptors))
            held.hold(dialled.take_all())
        return attached.answer

    def _registered_path(
        self, turn: Turn, wish: Attach, passed: Sequence[int], held: Descriptors, secured: list[_core.SecureSocket] | None
    ) -> bytes:
        """Asks for a path whose connections the worker dials; otherwise as `_dialled_path`."""
        if passed or self._desk is None:
            raise ProtocolError(f"worker {self.name}: {len(passed)} descriptors were offered for a {wish.transport} data path")
        awaited = [(Role.DATA, wish.generation)] + ([(Role.PULSE, 0)] if wish.has_pulse else [])
        with self._desk.expecting(self.name, self._require_peer(), awaited) as mailbox:
            attached = turn.ask(wish, Attached)
            held.hold(turn.take_descriptors(attached.num_descriptors))
            for role, generation in awaited:
                arrived = mailbox.collect(role, generation, seconds=max(0.0, turn.deadline - time.monotonic()))
                if role is Role.DATA and secured is not None and not isinstance(arrived, int):
                    secured.append(arrived)
                else:
                    held.hold([self._plain(role, arrived)])
        return attached.answer

    def _dial_back(
        self, turn: Turn, listening: Listening, wish: Attach, held: Descriptors, secured: list[_core.SecureSocket] | None
    ) -> None:
        if len(held) or secured:
            raise ProtocolError(f"worker {self.name}: Listening came twice")
        address = Address("tcp", host=self.address.host or "127.0.0.1", port=self.address.port or listening.port)
        data = self._dial(turn, address, Role.DATA, wish.generation, wish.socket_buffer_bytes)
        if secured is None or isinstance(data, int):
            held.hold([self._plain(Role.DATA, data)])
        else:
            secured.append(data)
        if wish.has_pulse:
            held.hold([self._plain(Role.PULSE, self._dial(turn, address, Role.PULSE, 0, 0))])

    def _plain(self, role: Role, dialled: Detached) -> int:
        """Returns a descriptor for a connection, which decrypts where that is encrypted."""
        if isinstance(dialled, int):
            return dialled
        former = self._relays.get(role)
        if former is not None:
            former.close()
        self._relays[role] = _core.Relay(dialled)
        return self._relays[role].take_plain()

    def _dial(self, turn: Turn, address: Address, role: Role, generation: int, buffer_bytes: int) -> Detached:
        peer = self._require_peer()
        credentials = Credentials(role, peer.session_key, peer.session_id, generation, self._encryption)
        connection, _ = connect_authenticated(
            self.name, address, credentials, deadline=turn.deadline, call_off=self._call_off, buffer_bytes=buffer_bytes
        )
        try:
            return connection.detach()
        finally:
            connection.close()

    def ask_stats(self, *, timeout_s: float) -> dict[str, int]:
        """Asks the worker for its own counters and memory. Raises WorkerLost, also as long as it is
        not greeted, WorkerTimeout and ProtocolError.
        """
        with self._turn("send its counters", timeout_s, "a fixed limit") as turn:
            return dict(turn.ask(StatsRequest(), Stats).counters)

    def ask_checksum(self, layer: int, shard: int, *, timeout_s: float) -> tuple[int | None, int]:
        """Asks the worker for the content checksum of a shard that it holds. Returns it, or None as
        long as the shard is unchecked, and how many of its experts have been read.

        Errors: CheckpointError where they cannot be read; UnsupportedError for a worker of a
        version without content checksums; WorkerLost, also as long as it has not loaded that shard;
        WorkerTimeout, ProtocolError.
        """
        if self._require_holder(layer, shard).protocol_minor < CHECKSUMS_SINCE:
            raise UnsupportedError(
                f"worker {self.name}: its version of dflash_moe takes no content checksums; install the host's version there"
            )
        with self._turn(f"send the checksum of layer {layer}, shard {shard}", timeout_s, CALL_LIMIT) as turn:
            told = turn.ask(ChecksumRequest(layer=layer, shard=shard), Checksum)
        if (told.layer, told.shard) != (layer, shard):
            raise ProtocolError(
                f"worker {self.name}: Checksum names layer {told.layer} shard {told.shard}, "
                f"asked was layer {layer} shard {shard}"
            )
        return told.content_checksum if told.is_checked else None, told.num_read

    def compute_row(self, question: ComputeRow, *, timeout_s: float) -> bytes | None:
        """Has the worker compute a row beside its data path. Returns its reply, or None where the
        worker's version cannot be asked. Errors: those with which it refuses; WorkerLost, also as
        long as it has not loaded that shard; WorkerTimeout, ProtocolError.
        """
        if self._require_holder(question.layer, question.shard).protocol_minor < AUDIT_SINCE:
            return None
        with self._turn(f"compute a row of layer {question.layer}, shard {question.shard}", timeout_s, CALL_LIMIT) as turn:
            return turn.ask(question, RowComputed).row

    def take_notices(self) -> None:
        """Reads what the worker says unasked, once its connection is readable; never raises. What
        it says before it is greeted belongs to the handshake.
        """
        if self._conversation is not None and self.hello is not None:
            self._conversation.take_notices()

    def say_bye(self) -> None:
        """Tells the worker that the session is over. It never raises for a worker that is gone or
        stopped.
        """
        if self._conversation is not None:
            self._conversation.say(Bye())

    def hang_up(self) -> None:
        """Ends the session without a goodbye, so that a thread which waits for this worker returns.
        Any thread may call.
        """
        if self._owner.is_here:
            self._call_off.give_up()
        if self._conversation is not None:
            self._conversation.hang_up()

    def kill(self) -> None:
        """Sends SIGKILL to the worker if this process started it."""
        if self.started is not None and self._owner.is_here:
            self.started.kill()

    def close(self, *, seconds: float) -> None:
        """Closes the connection and ends the child process, gracefully within `seconds` or else by
        SIGKILL. It has no effect in a forked child, because both are the parent's.
        """
        if not self._owner.is_here:
            return
        if self._conversation is not None:
            self._conversation.close()
        for relay in self._relays.values():
            relay.close()
        if self.started is not None:
            self.started.close(seconds=seconds)

    def loss(self, what: str) -> WorkerLost:
        """Makes a WorkerLost that says `what` happened and, of a worker that the host started, how
        its process ended and what it logged last.
        """
        if self.started is not None:
            text = f"worker {self.name} {what}; {self.started.describe_exit(seconds=EXIT_STATUS_S)}"
            return WorkerLost(text, worker=self.name)
        where = f"at {self.address}" if self._desk is None else "(registered)"
        return WorkerLost(f"worker {self.name} {where} {what}; look at its own output there", worker=self.name)

    def _quoted_log(self) -> str:
        tail = self.started.log.tail() if self.started is not None else ""
        return f"; last lines of its log:\n{tail}" if tail else ""

    def _require_peer(self) -> Peer:
        """Returns who answers. Raises WorkerLost as long as the worker is not greeted.

        Whoever brings a worker back makes a session with it before the worker answers there, and
        other threads find that session. A question of theirs would be taken for a part of the
        handshake, and the worker for one that does not speak this protocol.
        """
        if self._peer is None or self.hello is None:
            raise WorkerLost(f"worker {self.name} is still starting, and answers nothing yet", worker=self.name)
        return self._peer

    def _require_holder(self, layer: int, shard: int) -> Peer:
        """Returns who answers for a shard. Raises WorkerLost as long as it is not loaded."""
        peer = self._require_peer()
        if (layer, shard) not in self._loaded:
            text = f"worker {self.name} is still starting, and has not loaded layer {layer}, shard {shard}"
            raise WorkerLost(text, worker=self.name)
        return peer

    def _turn(self, doing: str, timeout_s: float, limit: str) -> AbstractContextManager[Turn]:
        self._require_peer()
        return self._any_turn(doing, timeout_s, limit)

    def _any_turn(self, doing: str, timeout_s: float, limit: str) -> AbstractContextManager[Turn]:
        if self._conversation is None:
            raise ProtocolError(f"worker {self.name}: not connected")
        return self._conversation.turn(doing, timeout_s=timeout_s, limit=limit)
