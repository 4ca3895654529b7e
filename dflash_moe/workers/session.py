"""The worker's end of the session with one host: it answers control messages, and serves the
current data path in a thread of its own. A worker may have several at once, which share its store
and take turns to compute.

The C++ loop computes without the GIL. So the control thread sees the hang-up of the host at once,
even in a long call.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from dflash_moe import _core
from dflash_moe.config.cache import NO_CACHE, CacheSettings
from dflash_moe.errors import ConfigError, DflashError, ProtocolError, UnsupportedError, WorkerLost, WorkerTimeout
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.protocol.descriptors import Descriptors
from dflash_moe.protocol.devices import DeviceChoice, open_device
from dflash_moe.protocol.failures import to_refusal
from dflash_moe.protocol.framing import Connection, Detached, PeerGone
from dflash_moe.protocol.identity import CAPABILITIES, choose_numerics, identity_of, local_identity, require_equal
from dflash_moe.protocol.mailbox import Mailbox
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
from dflash_moe.store.expert_store import ExpertStore
from dflash_moe.store.scrub import HeldWeights, WeightScrub
from dflash_moe.telemetry.affinity import check_cpus, pin_to_first
from dflash_moe.telemetry.machine import memory_available, usable_cores
from dflash_moe.telemetry.memory import process_memory
from dflash_moe.version import __version__
from dflash_moe.workers.loader import held_weights, load_shard
from dflash_moe.workers.resident import ResidentWeights, SharedStore, StoreKind, settings_differ

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
# A session has no more shards: sixteen in each of as many layers as a message can name. Mapped
# weights need no memory that would bound them.
MAX_SHARDS = 1 << 16
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
    # What may be kept on this machine's disk.
    cache: CacheSettings = NO_CACHE
    # The setting of this name. Where it is on, nothing travels in clear, whatever a host asks for.
    encryption: str = "auto"


def _free_bytes(kind: StoreKind, device: _core.BackendDevice | None) -> int:
    """Returns how many bytes are free where weights will lie."""
    return device.free_bytes() if device is not None and kind.choice.has_own_memory else memory_available()


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
    # A worker that registers dials the connections of its paths itself: role, generation, and the
    # bytes of the buffers. The others await them at `listen`.
    dial: Callable[[Role, int, int], Detached] | None = None
    # Other sessions of the worker use the same weights, which outlive this one. The default is for
    # a worker with one session, and keeps none.
    resident: ResidentWeights = field(default_factory=ResidentWeights)
    _shared: SharedStore | None = None
    _worker: _core.Worker | None = None
    _path: _DataPath | None = None
    # These classes were offered in the answer to Hello; each shard has one of them.
    _offered: tuple[str, ...] = ()
    _held: dict[tuple[int, int], HeldWeights] = field(default_factory=dict)
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
                # Until the first load or attach the worker does not wait for ever, since the place
                # of this session is another host's meanwhile. Afterwards it waits as long as the
                # host lives: a host may be idle for days, a hang-up ends the wait, and so does
                # keep-alive for a host that vanished without one.
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
        """Ends the session of a host that uses nothing of the worker."""
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
        if self._worker is not None and self._shared is not None:
            self._shared.scrub.release(list(self._held.values()))
            self._held.clear()
            self._worker.stop_pulse()
            self._worker.give_back()
            self.resident.leave(self._worker)
            self._worker = self._shared = None
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
        asked = self._kind_of(message)
        spin_ns = message.spin_ns
        if self.identity.threads:
            # The host did not start this worker and does not know the cores of this machine.
            spin_ns = SPIN_NS if usable_cores() > self.identity.threads else 0
        worker = _core.Worker(name=self.identity.name, spin_ns=spin_ns, slowdown=message.slowdown)
        shared = self.resident.join(asked, worker, message.scrub_s, name=self.identity.name, make=self._make_store)
        kind, device, store = shared.kind, shared.device, shared.store
        try:
            numerics, self._offered = choose_numerics(message.numerics_class, kind.isa, name=self.identity.name, device=device)
        except DflashError:
            self.resident.leave(worker)
            raise
        self._shared, self._worker = shared, worker
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
                isa=kind.isa if device is None else device.arch,
                threads=kind.threads,
                pid=os.getpid(),
                memory_available=_free_bytes(kind, device),
                memory_limit=self.identity.memory_limit,
                numerics_offered=self._offered,
                device="" if device is None else device.label,
                kept_bytes=store.resident_bytes if kind.weights_layout != "mapped" else 0,
            )
        )
        pinned = f" on CPUs {', '.join(map(str, kind.cpus))}" if kind.cpus else ""
        where = f"isa {kind.isa}" if device is None else f"device {device.label}"
        secrecy = "encrypted" if self.connection.is_encrypted else "not encrypted"
        way = f"over TCP, {secrecy}" if self.connection.is_tcp else "over a Unix socket"
        log.info("session opened %s by dflash_moe %s: %s, numerics %s, %d threads%s",
                 way, message.package_version, where, numerics, kind.threads, pinned)  # fmt: skip

    def _kind_of(self, hello: Hello) -> StoreKind:
        """Returns how the host needs the worker to compute: what the worker was started with, else
        what the host says, which may leave it open. Raises ConfigError where the two differ.
        """
        identity, choice = self.identity, DeviceChoice(hello.backend, hello.device, hello.simulate)
        own = (("isa", hello.isa, identity.isa), ("threads", hello.threads if choice.is_processor else 0, identity.threads))
        for setting, asked, has in own:
            if asked and has and asked != has:
                raise settings_differ(identity.name, setting, asked, has)
        slots_bytes = min(hello.slots_bytes, identity.memory_limit or hello.slots_bytes)
        return StoreKind(
            identity.isa or hello.isa, identity.threads or hello.threads, hello.cpus, choice, hello.weights_layout, slots_bytes
        )

    def _make_store(self, kind: StoreKind) -> SharedStore:
        identity = self.identity
        device = open_device(kind.choice, threads=kind.threads, name=identity.name)
        check_cpus(kind.cpus, name=identity.name)
        # A host that has started this worker has asked for the memory of all that it starts before.
        free_bytes = partial(_free_bytes, kind, device) if identity.threads else None
        store = ExpertStore(
            isa=kind.isa, threads=kind.threads, cpus=kind.cpus, device=device, weights_layout=kind.weights_layout,
            memory_limit=identity.memory_limit, cache=identity.cache, slots_bytes=kind.slots_bytes, free_bytes=free_bytes,
        )  # fmt: skip
        return SharedStore(kind, device, store, WeightScrub(store, period_s=0.0))

    def _be_patient_with(self, hello: Hello) -> None:
        """Gives a host more time to its first load where its own time-outs are long. A host greets
        all its workers before it loads the first, and has its time-out once to connect and once to
        greet; as much again is for its own devices.
        """
        if self._deadline is not None:
            self.patience_s = max(self.patience_s, 4 * hello.start_timeout_s)
            self._deadline = time.monotonic() + self.patience_s

    def _require_worker(self, message: Message) -> tuple[SharedStore, _core.Worker]:
        if self._worker is None or self._shared is None:
            raise ProtocolError(f"message {type(message).__name__}: arrived before Hello")
        return self._shared, self._worker

    def _load(self, message: LoadShard) -> None:
        shared, worker = self._require_worker(message)
        if self._path is not None:
            raise ProtocolError("message LoadShard: arrived after Attach")
        if message.numerics not in self._offered:
            raise ProtocolError(
                f"message LoadShard: field numerics: {message.numerics!r} is not among those of HelloReply, "
                f"{', '.join(self._offered)}"
            )
        if len(self._held) >= MAX_SHARDS:
            raise ConfigError(
                f"worker {self.identity.name}: {message.name} shard {message.shard}: this host has {MAX_SHARDS} shards here, "
                "and may have no more; give it fewer layers, or fewer shards in each"
            )
        loan = load_shard(
            shared.store, self.identity.checkpoint, self.identity.model_fingerprint, message, self._report_progress,
            self.connection.has_news,
        )  # fmt: skip
        worker.hold(message.layer, message.shard, loan)
        held = held_weights(message, loan, self.identity.checkpoint, self._tell_change)
        self._held[message.layer, message.shard] = held
        shared.scrub.hold(held)
        checksum, _ = loan.content()
        self._send(
            ShardLoaded(
                layer=message.layer, shard=message.shard, resident_bytes=shared.store.resident_bytes,
                is_checked=checksum is not None, content_checksum=checksum or 0,
            )
        )  # fmt: skip

    def _report_progress(self, _count: int) -> None:
        self._num_loaded += 1
        now = time.monotonic()
        if now - self._last_progress >= PROGRESS_EVERY_S and self._shared is not None:
            self._last_progress = now
            self._send(Progress(counter=self._num_loaded, resident_bytes=self._shared.store.resident_bytes))

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
        held = self._held.get((message.layer, message.shard))
        if held is None:
            raise ProtocolError(f"message ComputeRow: layer {message.layer}, shard {message.shard} is not held")
        row = held.loan.compute_rows(
            message.row, message.row_dtype, row_counts=[len(message.local_expert_ids)],
            local_expert_ids=message.local_expert_ids, weights=floats_of(message.weights), reply_dtype=message.reply_dtype,
        )  # fmt: skip
        self._send(RowComputed(layer=message.layer, shard=message.shard, row=row))

    def _tell_change(self, layer: int, shard: int, local_expert_id: int, failure: str) -> None:
        self._send_quietly(WeightsChanged(layer=layer, shard=shard, local_expert_id=local_expert_id, failure=failure[:300]))

    def _attach(self, message: Attach) -> None:
        shared, worker = self._require_worker(message)
        shared.store.begin_service()
        with Descriptors() as offered:
            offered.hold(self.connection.take_descriptors(message.num_descriptors))
            kind = self._transport_of(message)
            self._stop_serving()
            self._require_room(message)  # that of a former path is free now
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
        if kind.is_clear and self.identity.encryption == "on":
            raise UnsupportedError(
                f"transport {kind.name} carries calls in clear, and worker {self.identity.name} was started with "
                "--encryption on; start it without that, or take another transport at the host"
            )
        if message.is_open and self.identity.threads is not None:
            raise ProtocolError("message Attach: field is_open: only the host that started a worker may ask for that")
        return kind

    def _require_room(self, message: Attach) -> None:
        """Refuses a path whose slots this machine has no memory for. A host that has started this
        worker has asked for the memory of all that it starts before.
        """
        needed = message.num_slots * (message.request_bytes + message.reply_bytes)
        if self.identity.threads and needed > (free := memory_available()):
            raise ConfigError(
                f"worker {self.identity.name}: memory: {message.num_slots} slots of {message.request_bytes >> 10} and "
                f"{message.reply_bytes >> 10} KiB need {needed >> 10} KiB, and {free >> 10} KiB are free there now; ask for "
                "fewer slots or shorter messages, or free memory on that machine"
            )

    def _await_dialled(self, message: Attach, offered: Descriptors) -> dict[Role, _core.SecureSocket]:
        """Waits for the connections that no descriptor can bring, and adds them to the offer as if
        they had come with it: data, then pulse. Returns those that are encrypted instead.
        """
        if self.dial is None:
            self._send(Listening(port=self.listen(message.socket_buffer_bytes)))
        awaited = [(Role.DATA, message.generation)] + ([(Role.PULSE, 0)] if message.has_pulse else [])
        secured: dict[Role, _core.SecureSocket] = {}
        for role, generation in awaited:
            # A host asks one question at a time. Once its next one is there, or its hang-up, it has
            # given this path up, and across a bad network it does so before the worker hears of it.
            if self.dial is not None:
                arrived = self.dial(role, generation, message.socket_buffer_bytes if role is Role.DATA else 0)
            else:
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
        if self._shared is not None:
            pin_to_first(self._shared.kind.cpus)
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
        if self._shared is not None:
            store = self._shared.store
            counters |= self.resident.counters() | self._shared.scrub.stats()
            counters["resident_weight_bytes"] = store.resident_bytes
            counters |= store.panel_counters() | store.slot_counters() | store.batch_counters()
        counters["fabric_strangers"] = _core.fabric_strangers()
        counters |= {"anonymous_bytes": memory.anonymous_bytes, "file_bytes": memory.file_bytes}
        # Pages of panels or of the mapped checkpoint that had to come back from the disk.
        counters["major_faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        return {key: max(0, int(value)) for key, value in counters.items()}
