"""One host's session at a worker: answers control messages and serves the current data path in a
thread of its own.

The C++ loop computes without the GIL, so the control thread sees the host's hang-up at once, even
in a long call.
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
from dflash_moe.errors import DflashError, ProtocolError, WorkerLost
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.protocol.devices import DeviceChoice, open_device
from dflash_moe.protocol.failures import to_refusal
from dflash_moe.protocol.framing import USER_TIMEOUT_MS, Connection, PeerGone
from dflash_moe.protocol.identity import CAPABILITIES, choose_numerics, identity_of, local_identity, require_equal
from dflash_moe.protocol.messages import (
    Attach,
    Attached,
    Bye,
    Hello,
    HelloReply,
    Listening,
    LoadShard,
    Progress,
    Role,
    ShardLoaded,
    Stats,
    StatsRequest,
)
from dflash_moe.protocol.schema import Message
from dflash_moe.telemetry.affinity import check_cpus, pin_to_first, running_on
from dflash_moe.telemetry.machine import memory_available, usable_cores
from dflash_moe.telemetry.memory import process_memory
from dflash_moe.version import __version__
from dflash_moe.workers.loader import load_shard
from dflash_moe.workers.mailbox import Mailbox

log = logging.getLogger(__name__)

ANSWER_S = 5.0  # the host reads its control connection whenever it waits for an answer
ATTACH_S = 5.0  # data and pulse connections follow their Attach at once
PROGRESS_EVERY_S = 0.3  # the contract is 0.5 s
# adaptive spin before sleeping, where a core is free for it; the call's own overhead is below this
SPIN_NS = 50_000
STOP_S = 10.0  # a call that is being computed ends; its longest quantum is far below


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What a worker knows before any host calls."""

    name: str
    checkpoint: Checkpoint
    model_fingerprint: str
    threads: int | None = None  # None: as the host that started this process asks
    memory_limit: int = 0  # bytes; 0: none of its own
    isa: str = ""


@dataclass(slots=True)
class _DataPath:
    thread: threading.Thread
    generation: int


@dataclass(slots=True)
class WorkerSession:
    """Runs on the caller's thread until the host says goodbye or hangs up. Owns `connection`, the
    weights and the data path.

    `listen` returns the port where this session's data and pulse connections are awaited, opening a
    listener with buffers of so many bytes (0: the system's own) if need be.
    """

    connection: Connection
    identity: WorkerIdentity
    mailbox: Mailbox
    listen: Callable[[int], int]
    _worker: _core.Worker | None = None
    _path: _DataPath | None = None
    _threads: int = 1
    _cpus: tuple[int, ...] = ()
    _numerics: str = ""
    _last_progress: float = 0.0
    _num_loaded: int = 0
    _is_over: bool = field(default=False)

    def run(self) -> str:
        """Answers messages; returns why the session ended. Never raises for what a host does."""
        try:
            while not self._is_over:
                message = self.connection.receive(deadline=None, waiting_for="the host")
                self._answer(message)
            return "the host said goodbye"
        except PeerGone:
            return "the host is gone"
        except DflashError as error:
            log.error("session ends: %s", error)
            self._send_quietly(to_refusal(error))
            return str(error)

    def close(self) -> None:
        """Stops serving and frees the weights; safe to call again."""
        self._stop_serving()
        if self._worker is not None:
            self._worker.stop_pulse()
            self._worker = None
        self.mailbox.close()
        self.connection.close()

    def _answer(self, message: Message) -> None:
        try:
            if isinstance(message, Hello):
                self._hello(message)
            elif isinstance(message, LoadShard):
                self._load(message)
            elif isinstance(message, Attach):
                self._attach(message)
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
        self._numerics, offered = choose_numerics(message.numerics_class, isa, name=self.identity.name, device=device)
        check_cpus(message.cpus, name=self.identity.name)
        spin_ns = message.spin_ns
        if self.identity.threads:  # started by hand: the host does not know this machine's cores
            spin_ns = SPIN_NS if usable_cores() > threads else 0
        self._worker = _core.Worker(
            name=self.identity.name, isa=isa, num_threads=threads, cpus=message.cpus, spin_ns=spin_ns,
            slowdown=message.slowdown, device=device, weights_layout=message.weights_layout,
        )  # fmt: skip
        self._threads, self._cpus = threads, message.cpus
        self._send(
            HelloReply(
                package_version=__version__,
                worker=ours.worker,
                numerics_class=self._numerics,
                model_fingerprint=ours.model_fingerprint,
                wire_limits=dict(ours.wire_limits),
                dtypes=ours.dtypes,
                capabilities=CAPABILITIES,
                isa=isa if device is None else device.arch,
                threads=threads,
                pid=os.getpid(),
                memory_available=device.free_bytes() if device is not None and choice.has_own_memory else memory_available(),
                memory_limit=self.identity.memory_limit,
                numerics_offered=offered,
                device="" if device is None else device.label,
            )
        )
        pinned = f" on CPUs {', '.join(map(str, self._cpus))}" if self._cpus else ""
        where = f"isa {isa}" if device is None else f"device {device.label}"
        log.info("session opened by dflash_moe %s: %s, numerics %s, %d threads%s",
                 message.package_version, where, self._numerics, threads, pinned)  # fmt: skip

    def _require_worker(self, message: Message) -> _core.Worker:
        if self._worker is None:
            raise ProtocolError(f"message {type(message).__name__}: arrived before Hello")
        return self._worker

    def _load(self, message: LoadShard) -> None:
        worker = self._require_worker(message)
        if self._path is not None:
            raise ProtocolError("message LoadShard: arrived after Attach")
        if message.numerics != self._numerics:
            raise ProtocolError(
                f"message LoadShard: field numerics: {message.numerics!r} is not that of Hello, {self._numerics!r}"
            )
        # memory is local to the node of the core that touches it first
        with running_on(self._cpus):
            load_shard(
                worker, self.identity.checkpoint, self.identity.model_fingerprint, message, self._report_progress,
                threads=self._threads,
            )  # fmt: skip
        self.identity.checkpoint.drop_pages()  # the packed copies are what the worker computes with
        self._send(ShardLoaded(layer=message.layer, shard=message.shard, resident_bytes=worker.resident_bytes()))

    def _report_progress(self, _count: int) -> None:
        self._num_loaded += 1
        now = time.monotonic()
        if now - self._last_progress >= PROGRESS_EVERY_S and self._worker is not None:
            self._last_progress = now
            self._send(Progress(counter=self._num_loaded, resident_bytes=self._worker.resident_bytes()))

    def _attach(self, message: Attach) -> None:
        worker = self._require_worker(message)
        descriptors = self.connection.take_descriptors(message.num_descriptors)
        passed: list[int] = []
        try:
            self._stop_serving()
            geometry = _core.Geometry(message.num_slots, message.request_bytes, message.reply_bytes)
            channel = self._build_channel(message, geometry, descriptors, passed)
            self._start_pulse(worker, message, descriptors)
            self._send(Attached(generation=message.generation, num_descriptors=len(passed)), passed)
        finally:
            for descriptor in (*descriptors, *passed):
                os.close(descriptor)
        thread = threading.Thread(target=self._serve, args=(worker, channel, message.generation), name="serve", daemon=True)
        self._path = _DataPath(thread, message.generation)
        thread.start()

    def _build_channel(
        self, message: Attach, geometry: _core.Geometry, descriptors: list[int], passed: list[int]
    ) -> _core.Channel:
        """Takes the descriptors it uses from the front of `descriptors`; adds those the host is to
        get to `passed`.
        """
        wanted = {"shared": 2, "unix": 1, "tcp": 0}.get(message.transport)
        if wanted is None:
            raise ProtocolError(f"message Attach: field transport: found {message.transport!r}, known are {CAPABILITIES}")
        if len(descriptors) != wanted + (message.has_pulse and message.transport != "tcp"):
            raise ProtocolError(f"message Attach: field num_descriptors: {len(descriptors)} do not fit {message.transport}")
        generation = message.generation
        if message.transport == "shared":
            if message.is_open and self.identity.threads is not None:
                raise ProtocolError("message Attach: field is_open: only the host that started a worker may ask for that")
            peer = _core.Segment.attach(descriptors.pop(0), "host", geometry, generation)
            own = _core.Segment.create("worker", geometry, generation, message.is_open)
            passed.append(os.dup(own.fileno()))  # the segment itself is consumed by the channel
            # duplicates the bell
            return _core.make_shared_channel("worker", geometry, own, peer, descriptors[0])
        buffers = {"send_buffer_bytes": message.socket_buffer_bytes, "receive_buffer_bytes": message.socket_buffer_bytes}
        if message.transport == "unix":
            return _core.make_stream_channel("worker", geometry, descriptors.pop(0), **buffers)
        self._send(Listening(port=self.listen(message.socket_buffer_bytes)))
        descriptor = self.mailbox.collect(Role.DATA, generation, seconds=ATTACH_S)
        return _core.make_stream_channel("worker", geometry, descriptor, user_timeout_ms=USER_TIMEOUT_MS, **buffers)

    def _start_pulse(self, worker: _core.Worker, message: Attach, descriptors: list[int]) -> None:
        if not message.has_pulse:
            return
        if message.transport == "tcp":
            worker.start_pulse(self.mailbox.collect(Role.PULSE, 0, seconds=ATTACH_S))
        else:
            worker.start_pulse(descriptors.pop())  # the last of those that came

    def _serve(self, worker: _core.Worker, channel: _core.Channel, generation: int) -> None:
        pin_to_first(self._cpus)
        try:
            worker.serve(channel, generation)
        # how a host's close looks from here; whether it was one, the control connection says
        except WorkerLost as hung_up:
            log.info("data path of generation %d ended: %s", generation, hung_up)
        except DflashError as error:
            log.error("data path of generation %d ended: %s", generation, error)

    def _stop_serving(self) -> None:
        path, self._path = self._path, None
        if path is None or self._worker is None:
            return
        self._worker.stop(path.generation)
        path.thread.join(STOP_S)
        if path.thread.is_alive():
            raise DflashError(f"the data path of generation {path.generation} did not stop within {STOP_S} s")

    def _counters(self) -> dict[str, int]:
        memory = process_memory()
        counters = dict(self._worker.stats()) if self._worker is not None else {}
        if self._worker is not None:
            counters["resident_weight_bytes"] = self._worker.resident_bytes()
        counters |= {"anonymous_bytes": memory.anonymous_bytes, "file_bytes": memory.file_bytes}
        return {key: max(0, int(value)) for key, value in counters.items()}
