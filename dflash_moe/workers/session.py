"""The worker's end of the session with one host: it answers control messages, and serves the
current data path in a thread of its own.

The C++ loop computes without the GIL. So the control thread sees the hang-up of the host at once,
even in a long call.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dflash_moe import _core
from dflash_moe.errors import DflashError, ProtocolError, WorkerLost, WorkerTimeout
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.expert_store import ExpertStore
from dflash_moe.model.scrub import HeldWeights, WeightScrub
from dflash_moe.protocol.descriptors import Descriptors
from dflash_moe.protocol.devices import DeviceChoice, open_device
from dflash_moe.protocol.failures import to_refusal
from dflash_moe.protocol.framing import Connection, PeerGone
from dflash_moe.protocol.identity import CAPABILITIES, choose_numerics, identity_of, local_identity, require_equal
from dflash_moe.protocol.messages import (
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
from dflash_moe.protocol.rows import floats_of
from dflash_moe.protocol.schema import Message
from dflash_moe.telemetry.affinity import check_cpus, pin_to_first
from dflash_moe.telemetry.machine import memory_available, usable_cores
from dflash_moe.telemetry.memory import process_memory
from dflash_moe.version import __version__
from dflash_moe.workers.loader import held_weights, load_shard
from dflash_moe.workers.mailbox import Mailbox
from dflash_moe.workers.resident import ResidentWeights, StoreKind

log = logging.getLogger(__name__)

# An answer must be sent within this time. The host reads its control connection whenever it waits
# for one.
ANSWER_S = 5.0
# Data and pulse connections follow their Attach at once, and are awaited for this time.
ATTACH_S = 5.0
# An authenticated host greets at once. Who says nothing for so long is no host that starts.
HELLO_S = 30.0
# A host that has greeted has this time to its first load or attach. With its default time-outs that
# is ten times as long as one phase of its start may take.
PATIENCE_S = 600.0
# Progress is sent this often while loading. The contract is 0.5 s.
PROGRESS_EVERY_S = 0.3
# A worker spins this long before it sleeps where a core is free for it. The own overhead of a call
# is below this.
SPIN_NS = 50_000
# A call that is being computed ends first, which takes as long as it takes; without progress for so
# long it hangs.
STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What a worker knows before any host calls."""

    name: str
    checkpoint: Checkpoint
    model_fingerprint: str
    # None leaves the number to the host, which is so exactly where that started this process.
    threads: int | None = None
    # These bytes are all that weights may take; 0 means no limit of its own.
    memory_limit: int = 0
    # An empty name leaves the kernel set to the host.
    isa: str = ""


@dataclass(slots=True)
class _DataPath:
    thread: threading.Thread
    generation: int


@dataclass(slots=True)
class WorkerSession:
    """Runs on the caller's thread until the host says goodbye or hangs up. It owns `connection`,
    the loans of its shards and the data path.

    `listen` returns the port where the data and pulse connections of this session are awaited. It
    opens a listener, if need be, with buffers of so many bytes, where 0 keeps the system's own.
    """

    connection: Connection
    identity: WorkerIdentity
    mailbox: Mailbox
    listen: Callable[[int], int]
    # A host that has greeted may take so many seconds to its first load or attach, and has HELLO_S
    # at most to greet. One that started this process has 0, and may take as long as it lives.
    patience_s: float = 0.0
    # Loaded weights outlive a session here, for the host's next one. The default keeps none.
    resident: ResidentWeights = field(default_factory=ResidentWeights)
    _store: ExpertStore | None = None
    _kind: StoreKind | None = None
    _worker: _core.Worker | None = None
    _path: _DataPath | None = None
    _cpus: tuple[int, ...] = ()
    # These classes were offered in the answer to Hello; each shard has one of them.
    _offered: tuple[str, ...] = ()
    _scrub: WeightScrub | None = None
    _loans: dict[tuple[int, int], _core.ResidentShard] = field(default_factory=dict)
    _last_progress: float = 0.0
    _num_loaded: int = 0
    _is_over: bool = field(default=False)
    # The hello must come by then, and after it the first load or attach; None: all of it has come.
    _deadline: float | None = None

    def run(self) -> str:
        """Answers messages and returns why the session ended. It never raises for what a host
        does.
        """
        if self.patience_s:
            self._deadline = time.monotonic() + min(HELLO_S, self.patience_s)
        try:
            while not self._is_over:
                # Until the first load or attach the worker does not wait for ever, since it serves
                # nobody else meanwhile. Afterwards it waits as long as the host lives: a host may
                # be idle for days, a hang-up ends the wait, and so does keep-alive for a host that
                # vanished without one.
                message = self.connection.receive(deadline=self._deadline, waiting_for="what a host asks for")
                self._answer(message)
            return "the host said goodbye"
        except PeerGone:
            return "the host is gone"
        except WorkerTimeout:
            return self._give_up()
        except DflashError as error:
            log.error("session ends: %s", error)
            self._send_quietly(to_refusal(error))
            return str(error)

    def _give_up(self) -> str:
        """Ends the session of a host that holds the worker and uses nothing of it."""
        missed = f"neither loaded nor attached anything within {self.patience_s:g} s"
        if self._worker is None:
            missed = f"did not greet within {min(HELLO_S, self.patience_s):g} s"
        reason = f"the host {missed}; the worker is free for another"
        log.warning("session ends: %s", reason)
        self._send_quietly(to_refusal(WorkerTimeout(f"worker {self.identity.name}: {reason}")))
        return reason

    def close(self) -> None:
        """Stops serving and gives the shards back. They are freed, or kept for the next session. It
        may be called again.
        """
        self._stop_serving()
        if self._scrub is not None:
            self._scrub.close()
        self._loans.clear()
        if self._worker is not None and self._store is not None and self._kind is not None:
            self._worker.stop_pulse()
            self._worker.give_back()
            self.resident.keep(self._kind, self._store)
            self._worker = self._store = None
        self.mailbox.close()
        self.connection.close()

    def _answer(self, message: Message) -> None:
        try:
            if isinstance(message, Hello):
                self._hello(message)
            elif isinstance(message, LoadShard):
                self._deadline = None
                self._load(message)
            elif isinstance(message, Attach):
                self._deadline = None
                self._attach(message)
            elif isinstance(message, ChecksumRequest):
                self._checksum(message)
            elif isinstance(message, ComputeRow):
                self._compute_row(message)
            elif isinstance(message, StatsRequest):
                self._send(Stats(counters=self._counters()))
            elif isinstance(message, Bye):
                self._is_over = True
            else:
                raise ProtocolError(f"message {type(message).__name__} is not one a host sends now")
        except PeerGone:
            raise
        except Exception as error:  # noqa: BLE001 - every failure must reach the host with its type
            log.error("%s failed: %s", type(message).__name__, error)
            self._send(to_refusal(error))

    def _send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        self.connection.send(message, deadline=time.monotonic() + ANSWER_S, descriptors=descriptors)

    def _send_quietly(self, message: Message) -> None:
        try:
            self._send(message)
        except DflashError as error:
            log.info("the host could not be told: %s", error)

    def _hello(self, message: Hello) -> None:
        if self._worker is not None:
            raise ProtocolError("message Hello: arrived twice in one session")
        ours = local_identity(self.identity.name, self.identity.model_fingerprint)
        require_equal(identity_of(message), ours, name=self.identity.name)
        threads = self.identity.threads or max(1, message.threads)
        isa = _core.parse_isa(self.identity.isa or message.isa or _core.best_isa())
        choice = DeviceChoice(message.backend, message.device, message.simulate)
        device = open_device(choice, threads=threads, name=self.identity.name)
        numerics, self._offered = choose_numerics(message.numerics_class, isa, name=self.identity.name, device=device)
        check_cpus(message.cpus, name=self.identity.name)
        spin_ns = message.spin_ns
        if self.identity.threads:
            # The host did not start this worker and does not know the cores of this machine.
            spin_ns = SPIN_NS if usable_cores() > threads else 0
        self._kind = StoreKind(isa, threads, message.cpus, choice, message.weights_layout)
        self._store = self.resident.take(
            self._kind,
            lambda: ExpertStore(
                isa=isa, threads=threads, cpus=message.cpus, device=device, weights_layout=message.weights_layout,
                memory_limit=self.identity.memory_limit,
            ),
        )  # fmt: skip
        self._worker = _core.Worker(name=self.identity.name, spin_ns=spin_ns, slowdown=message.slowdown)
        self._cpus = message.cpus
        if message.scrub_s > 0:
            self._scrub = WeightScrub(self._store, self.identity.checkpoint, period_s=message.scrub_s, tell=self._tell_change)
            self._scrub.start()
        self._be_patient_with(message)
        self._send(
            HelloReply(
                package_version=__version__,
                worker=ours.worker,
                numerics_class=numerics,
                model_fingerprint=ours.model_fingerprint,
                wire_limits=dict(ours.wire_limits),
                dtypes=ours.dtypes,
                capabilities=CAPABILITIES,
                isa=isa if device is None else device.arch,
                threads=threads,
                pid=os.getpid(),
                memory_available=device.free_bytes() if device is not None and choice.has_own_memory else memory_available(),
                memory_limit=self.identity.memory_limit,
                numerics_offered=self._offered,
                device="" if device is None else device.label,
                kept_bytes=self._store.resident_bytes if message.weights_layout == "packed" else 0,
            )
        )
        pinned = f" on CPUs {', '.join(map(str, self._cpus))}" if self._cpus else ""
        where = f"isa {isa}" if device is None else f"device {device.label}"
        secrecy = "encrypted" if self.connection.is_encrypted else "not encrypted"
        way = f"over TCP, {secrecy}" if self.connection.is_tcp else "over a Unix socket"
        log.info("session opened %s by dflash_moe %s: %s, numerics %s, %d threads%s",
                 way, message.package_version, where, numerics, threads, pinned)  # fmt: skip

    def _be_patient_with(self, hello: Hello) -> None:
        """Gives a host more time to its first load where its own time-outs are long. A host greets
        all its workers before it loads the first, and has its time-out once to connect and once to
        greet; as much again is for its own devices.
        """
        if self._deadline is not None:
            self.patience_s = max(self.patience_s, 4 * hello.start_timeout_s)
            self._deadline = time.monotonic() + self.patience_s

    def _require_worker(self, message: Message) -> tuple[ExpertStore, _core.Worker]:
        if self._worker is None or self._store is None:
            raise ProtocolError(f"message {type(message).__name__}: arrived before Hello")
        return self._store, self._worker

    def _load(self, message: LoadShard) -> None:
        store, worker = self._require_worker(message)
        if self._path is not None:
            raise ProtocolError("message LoadShard: arrived after Attach")
        if message.numerics not in self._offered:
            raise ProtocolError(
                f"message LoadShard: field numerics: {message.numerics!r} is not among those of HelloReply, "
                f"{', '.join(self._offered)}"
            )
        loan = load_shard(store, self.identity.checkpoint, self.identity.model_fingerprint, message, self._report_progress)
        worker.hold(message.layer, message.shard, loan)
        self._loans[message.layer, message.shard] = loan
        if self._scrub is not None:
            self._scrub.hold(held_weights(message, loan))
        checksum, _ = loan.content()
        self._send(
            ShardLoaded(
                layer=message.layer, shard=message.shard, resident_bytes=store.resident_bytes,
                is_checked=checksum is not None, content_checksum=checksum or 0,
            )
        )  # fmt: skip

    def _report_progress(self, _count: int) -> None:
        self._num_loaded += 1
        now = time.monotonic()
        if now - self._last_progress >= PROGRESS_EVERY_S and self._store is not None:
            self._last_progress = now
            self._send(Progress(counter=self._num_loaded, resident_bytes=self._store.resident_bytes))

    def _checksum(self, message: ChecksumRequest) -> None:
        _, worker = self._require_worker(message)
        content = worker.content(message.layer, message.shard)
        if content is None:
            raise ProtocolError(f"message ChecksumRequest: layer {message.layer}, shard {message.shard} is not held")
        checksum, num_read = content
        self._send(
            Checksum(
                layer=message.layer, shard=message.shard, num_read=num_read, is_checked=checksum is not None,
                content_checksum=checksum or 0,
            )
        )  # fmt: skip

    def _compute_row(self, message: ComputeRow) -> None:
        loan = self._loans.get((message.layer, message.shard))
        if loan is None:
            raise ProtocolError(f"message ComputeRow: layer {message.layer}, shard {message.shard} is not held")
        row = loan.compute_rows(
            message.row, message.row_dtype, row_counts=[len(message.local_expert_ids)],
            local_expert_ids=message.local_expert_ids, weights=floats_of(message.weights), reply_dtype=message.reply_dtype,
        )  # fmt: skip
        self._send(RowComputed(layer=message.layer, shard=message.shard, row=row))

    def _tell_change(self, held: HeldWeights, local_expert_id: int, failure: str) -> None:
        self._send_quietly(
            WeightsChanged(layer=held.layer, shard=held.shard, local_expert_id=local_expert_id, failure=failure[:300])
        )

    def _attach(self, message: Attach) -> None:
        store, worker = self._require_worker(message)
        # All loads are done. What a former session has left and this one did not ask for goes.
        store.drop_unborrowed()
        with Descriptors() as offered:
            offered.hold(self.connection.take_descriptors(message.num_descriptors))
            kind = self._transport_of(message)
            self._stop_serving()
            secured = self._await_dialled(message, offered) if kind.is_dialled else {}
            pulse = secured.get(Role.PULSE) or self._pulse_of(message, offered)
            data = secured.get(Role.DATA)
            accepted = _core.accept_path(kind.name, terms_of(message), message.offer, offered.take_all(), data)
            if isinstance(pulse, _core.SecureSocket) or pulse >= 0:
                worker.start_pulse(pulse)
            self._send(
                Attached(generation=message.generation, num_descriptors=len(accepted.descriptors), answer=accepted.payload),
                accepted.descriptors,
            )
        channel = accepted.take_channel()
        thread = threading.Thread(target=self._serve, args=(worker, channel, message.generation), name="serve", daemon=True)
        self._path = _DataPath(thread, message.generation)
        thread.start()

    def _transport_of(self, message: Attach) -> _core.TransportKind:
        kind = TRANSPORTS.get(message.transport)
        if kind is None:
            raise ProtocolError(f"message Attach: field transport: found {message.transport!r}, known are {CAPABILITIES}")
        if message.is_open and self.identity.threads is not None:
            raise ProtocolError("message Attach: field is_open: only the host that started a worker may ask for that")
        return kind

    def _await_dialled(self, message: Attach, offered: Descriptors) -> dict[Role, _core.SecureSocket]:
        """Waits for the connections that no descriptor can bring, and adds them to the offer as if
        they had come with it: data, then pulse. Returns those that are encrypted instead.
        """
        self._send(Listening(port=self.listen(message.socket_buffer_bytes)))
        awaited = [(Role.DATA, message.generation)] + ([(Role.PULSE, 0)] if message.has_pulse else [])
        secured: dict[Role, _core.SecureSocket] = {}
        for role, generation in awaited:
            # A host asks one question at a time. Once its next one is there, or its hang-up, it has
            # given this path up, and across a bad network it does so before the worker hears of it.
            arrived = self.mailbox.collect(role, generation, seconds=ATTACH_S, is_given_up=self.connection.has_news)
            if isinstance(arrived, int):
                offered.hold([arrived])
            else:
                secured[role] = arrived
        return secured

    def _pulse_of(self, message: Attach, offered: Descriptors) -> int:
        """Takes the descriptor of the pulse, the last that came, or returns -1 where this path
        brings none.
        """
        if not message.has_pulse:
            return -1
        if not len(offered):
            raise ProtocolError("message Attach: field num_descriptors: has_pulse, and no descriptor came")
        return offered.take_last()

    def _serve(self, worker: _core.Worker, channel: _core.Channel, generation: int) -> None:
        pin_to_first(self._cpus)
        try:
            worker.serve(channel, generation)
        except WorkerLost as hung_up:
            # A host that closes its end looks like this from here. Whether it died instead, the
            # control connection says.
            log.info("data path of generation %d has ended", generation)
            log.debug("data path of generation %d: %s", generation, hung_up)
        except DflashError as error:
            log.error("data path of generation %d ended: %s", generation, error)

    def _stop_serving(self) -> None:
        """DflashError where the data path's thread does not end; it stays the session's then,
        because no second one may compute with the same shards.
        """
        path = self._path
        if path is None or self._worker is None:
            return
        self._worker.stop(path.generation)
        before, progress = -1, 0
        while path.thread.is_alive() and progress != before:
            before = progress
            path.thread.join(STOP_S)
            progress = self._worker.progress()
        if path.thread.is_alive():
            raise DflashError(
                f"the data path of generation {path.generation} did not stop: no progress of its computation within {STOP_S} s"
            )
        self._path = None

    def _counters(self) -> dict[str, int]:
        memory = process_memory()
        counters = dict(self._worker.stats()) if self._worker is not None else {}
        if self._store is not None:
            counters["resident_weight_bytes"] = self._store.resident_bytes
        if self._scrub is not None:
            counters |= self._scrub.stats()
        counters |= {"anonymous_bytes": memory.anonymous_bytes, "file_bytes": memory.file_bytes}
        return {key: max(0, int(value)) for key, value in counters.items()}
