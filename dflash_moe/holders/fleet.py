"""All workers of one runtime: the fleet starts or reaches them, loads them in parallel, attaches
their data paths and ends them. It owns every process and connection.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.errors import UnsupportedError, WorkerError, WorkerLost
from dflash_moe.holders.holder import Holder, asked_layout, restart_policy
from dflash_moe.holders.launcher import Launcher, StartedWorker
from dflash_moe.holders.loaded_shards import LoadedShards
from dflash_moe.holders.local_worker import LocalWorker
from dflash_moe.holders.membership import Life
from dflash_moe.holders.owner import Owner
from dflash_moe.holders.registered_names import check_member
from dflash_moe.holders.registration import RegistrationDesk
from dflash_moe.holders.session import CALL_LIMIT, STALL_LIMIT, START_LIMIT, HostSession
from dflash_moe.holders.threads import ThreadPlan
from dflash_moe.holders.transports import choose_transport, may_take_fabric
from dflash_moe.placement.held_shards import HeldShard
from dflash_moe.placement.numerics import check_architectures
from dflash_moe.protocol.devices import DeviceChoice
from dflash_moe.protocol.identity import local_identity
from dflash_moe.topology.addresses import Address

if TYPE_CHECKING:
    from dflash_moe.config import Settings
    from dflash_moe.model.spec import LayerSpec, ModelSpec
    from dflash_moe.topology import Topology, WorkerSpec
    from dflash_moe.topology.registration import RegistrationSpec

log = logging.getLogger(__name__)

# An attach has at least this time, however short calls may be: mapping and pre-faulting the
# segments takes tens of milliseconds on a busy machine.
LEAST_ATTACH_S = 0.25
# A worker leaves within milliseconds of the goodbye. One that is still there after this time gets
# SIGKILL.
GOODBYE_S = 1.0
# How the process of a lost worker ended is known within this time, unless it has not ended at all.
EXIT_S = 0.3
# Tests wrap the host's channel to each worker, by the worker's name, to make it fail, and the audit
# wraps it to see it.
ChannelDecorator = Callable[[str, _core.Channel], _core.Channel]
ChannelWatch = Callable[[Holder, _core.Channel], _core.Channel]
# Is told of weights that changed in a holder's memory: layer, shard, and why they could not be
# loaded again. Several threads call it.
DamageReport = Callable[[Holder, int, int, str], None]
# A report is called with a holder's name, how many bytes of its experts are loaded, counted as the
# checkpoint stores them, and how many it will have. Several threads call it.
LoadingReport = Callable[[str, int, int], None]


# A layer with its shards as (shard, client_index of its holder, weights fingerprint, experts).
LayerShards = tuple["LayerSpec", list[tuple[int, int, int, tuple[int, ...]]]]


class Fleet:
    """The members of one runtime by name, in the order of the topology and the host last. `close()`
    ends everything.
    """

    def __init__(
        self, spec: ModelSpec, settings: Settings, threads: ThreadPlan, *, decorate: ChannelDecorator | None,
        watch: ChannelWatch | None, on_damage: DamageReport, retries_unfit: bool,
    ) -> None:  # fmt: skip
        """`decorate` wraps all channels, and `watch` after it those to other processes.
        `retries_unfit` is that of membership.RestartPolicy.
        """
        # Replaced and never changed once the fleet runs, so that others may go through the one that
        # they found.
        self.members: dict[str, Holder] = {}
        # Who is being added, and who was removed: the client still knows the latter by their
        # numbers.
        self.arriving: dict[str, Holder] = {}
        self.former: dict[str, Holder] = {}
        self._spec = spec
        self._settings = settings
        self._threads = threads
        self._decorate, self._watch, self._on_damage = decorate, watch, on_damage
        self._policy = restart_policy(settings, retries_unfit=retries_unfit)
        self._rng = random.Random()
        self._launcher: Launcher | None = None
        # Where workers register, once the fleet has begun to start.
        self.desk: RegistrationDesk | None = None
        self._key: bytes | None = None
        # Generations begin at a random number, so that the path of another session never has the
        # same one.
        self._generations = itertools.count(secrets.randbits(48) + 1)
        # All processes and connections belong to the process that made the fleet.
        self.owner = Owner()
        self._is_closed = False
        # Held where a session begins and where the fleet is closed, so that none begins afterwards.
        # Reentrant, because the garbage collector may run while a thread holds it, and may close a
        # runtime that nobody closed on that very thread.
        self._closing = threading.RLock()
        self._is_host_processor = True
        # Those to which `auto` has found no way over a fabric.
        self._without_fabric: set[str] = set()
        # This is set once a device of the host has refused to register read-only memory. Workers
        # that this host started then leave the segments of their replies writable for it.
        self.may_open_replies = False
        self.shards = LoadedShards(Path(spec.path), settings, self._isa, self.member_of)

    def add_members(
        self, topology: Topology, held: Mapping[str, Sequence[HeldShard]], host_name: str, slots: Collection[str]
    ) -> None:
        """Decides the address and transport of every holder, before anything is started. Those in
        `slots` are mapped for lack of memory alone. Raises UnsupportedError and ConfigError.
        """
        self._is_host_processor = DeviceChoice.of_host(topology.host).is_processor
        for worker in topology.workers:
            address = worker.parsed_address
            transport = choose_transport(worker.name, address, self._settings.transport, fabric_clear=worker.fabric_clear)
            if worker.name in held:
                first = held[worker.name][0]
                # A worker computes in one numerics class. Where its entry in the topology states
                # `activations`, that decides, and not its first shard: that one may be there on
                # behalf of another worker, as a replica, in a class that the preset chose. A
                # receipt's shard map (`imposed`) names the class of each shard and wins over both.
                is_bound = worker.activations is not None and topology.placement.imposed is None
                numerics = topology.numerics_of(worker.name) if is_bound else first.numerics
                self.members[worker.name] = self.new_holder(
                    worker.name, address, transport, numerics, first.layout, spec=worker, device=DeviceChoice.of(worker),
                    has_slots=worker.name in slots,
                )  # fmt: skip
            else:
                log.info("worker %s holds no experts and is not started", worker.name)
        if host_name in held:
            self.members[host_name] = self.new_holder(
                host_name, Address("loopback"), "loopback", held[host_name][0].numerics, "packed",
                device=DeviceChoice.of_host(topology.host),
            )  # fmt: skip
        for member in self.members.values():
            log.info("worker %s: transport %s, numerics %s", member.name, member.transport, member.numerics)

    def new_holder(
        self, name: str, address: Address, transport: str, numerics: str, layout: str, *, spec: WorkerSpec | None = None,
        device: DeviceChoice | None = None, client_index: int = -1, has_slots: bool = False,
    ) -> Holder:  # fmt: skip
        """Makes a holder that is no member yet, with a life that has not begun. `layout` is packed
        or mapped, as it is placed; with `has_slots` it is mapped for lack of memory alone.
        """
        policy = self._policy
        if address.is_registered:
            # Waiting for it takes the place of longer pauses, which its own retries have.
            policy = replace(policy, backoff_s=(policy.backoff_s[0], policy.backoff_s[0]))
        life = Life(name, policy, self._rng, address.is_started_by_host)
        device, cache = device or DeviceChoice(), self._settings.cache
        slots_bytes = spec.memory or 0 if has_slots and cache.has_panels and spec is not None else 0
        asked = asked_layout("packed" if slots_bytes else layout, spec, device, cache)
        if asked != "stored" and spec is not None and spec.weights_layout == "stored":
            why = "cache.path is none" if cache.is_off else "cache.panels is off"
            log.warning("worker %s has weights_layout: stored, but %s: it packs its experts at each start", name, why)
        return Holder(
            name, address, transport, numerics, asked, life, slots_bytes=slots_bytes, spec=spec, device=device,
            client_index=client_index,
        )  # fmt: skip

    def start(self, key: bytes | None, registration: RegistrationSpec | None = None) -> None:
        """Starts or reaches every member and exchanges hello with it. `key` is the shared key that
        `check_paths` returned; workers register where `registration` says. On an error the caller
        closes the fleet.
        """
        remote = [member for member in self.members.values() if member.transport != "loopback"]
        self._key = key
        if registration is not None and key is not None:
            self.desk = RegistrationDesk(registration, key, self._check_name, self._settings.socket_buffer_bytes or 0)
            self.desk.start()
            awaited = [member.name for member in remote if member.address.is_registered]
            self.desk.await_all(awaited, timeout_s=self._settings.start_timeout_s, limit=START_LIMIT)
        for member in remote:
            started = self._launch(member) if member.address.is_started_by_host else None
            member.session = self._new_session(member, started)
        self._in_parallel([member.name for member in remote], lambda name: self._greet(self.members[name]))
        for member in self.members.values():
            if member.transport == "loopback":
                member.local = self.new_local(member)
                member.numerics = member.local.numerics
        self._check_architectures()

    def _check_name(self, name: str) -> bool:
        """As RegistrationDesk asks."""
        found = self._find(name)
        if found is not None:
            check_member(found)
        elif name in self.former:
            raise WorkerError(f"worker {name} was removed; add it again by name, and it is taken", worker=name)
        return found is not None

    def _find(self, name: str) -> Holder | None:
        """Returns a member, or a worker that is just being added."""
        return self.members.get(name) or self.arriving.get(name)

    def new_local(self, member: Holder, *, lost: str = "") -> LocalWorker:
        """Makes the worker inside this process for a member that is one; `lost` is the worker in
        whose place it computes. Errors are those of LocalWorker.
        """
        pool = self._pool_in_place_of(lost) if self._is_pooled(member) else None
        return LocalWorker(
            member.name,
            isa=self._isa,
            threads=self._num_threads(member) if pool is None else pool.threads,
            spin_ns=self._threads.spin_ns,
            slowdown=member.slowdown,
            numerics=member.numerics,
            cpus=self._threads.cpus.get(member.name, ()),
            device=member.device,
            weights_layout=member.layout,
            slots_bytes=member.slots_bytes,
            pool=pool,
            scrub_s=self._settings.scrub_s,
            on_change=partial(self._on_damage, member),
            cache=self._settings.cache,
        )

    def _check_architectures(self) -> None:
        members = (*self.members.values(), *self.arriving.values())
        computed = {member.name: (member.numerics, member.architecture) for member in members}
        check_architectures(computed, self._settings.numerics)

    def _new_session(self, member: Holder, started: StartedWorker | None) -> HostSession:
        return HostSession(
            member.name,
            member.address,
            started=started,
            key=self._key,
            session_id=member.session_id,
            socket_buffer_bytes=self._settings.socket_buffer_bytes,
            encryption=self._settings.encryption,
            desk=self.desk if member.address.is_registered else None,
            on_notice=lambda told: self._on_damage(member, told.layer, told.shard, told.failure),
        )

    def end_member(self, member: Holder) -> None:
        """Ends the session of a lost worker, and kills and reaps its process where the host started
        that. `last_exit` then says how the process ended. It never raises.
        """
        session = member.session
        if session is None or not self.owner.is_here:
            return
        if session.started is not None:
            member.last_exit = session.started.describe_exit(seconds=EXIT_S)
        session.kill()
        session.hang_up()
        session.close(seconds=0.0)

    def dismiss(self, member: Holder) -> None:
        """Says goodbye to a worker that nobody asks any more, and waits GOODBYE_S at most for its
        process to end where the host started that. It never raises.
        """
        session = member.session
        if session is None or not self.owner.is_here:
            return
        session.say_bye()
        session.close(seconds=GOODBYE_S)

    def start_again(self, member: Holder) -> None:
        """Starts a worker whose former session was ended, or that is arriving, or dials it where
        somebody else starts it, and exchanges hello. Errors are those of a start; WorkerLost
        once the fleet is closed.
        """
        started = None
        if member.address.is_started_by_host:
            started = self._launch(member)
        session = self._new_session(member, started)
        with self._closing:
            if not self._is_closed:
                member.session = session
        if member.session is not session:
            session.close(seconds=0.0)
            raise WorkerLost(f"worker {member.name} is not started any more: the runtime was closed", worker=member.name)
        self._greet(member)
        self._check_architectures()

    def load_again(self, member: Holder, shards: Sequence[HeldShard]) -> None:
        """Loads the shards of a worker that was started again. Errors are those of a start;
        CheckpointError where it has not loaded the bytes that it held before; WorkerUnfit where it
        computes other numbers than it must.
        """
        self.shards.load(member, shards)
        self.shards.settle(member, shards)

    def _launch(self, member: Holder) -> StartedWorker:
        with self._closing:
            if self._is_closed:
                raise WorkerLost(f"worker {member.name} is not started: the runtime was closed", worker=member.name)
            if self._launcher is None:
                self._launcher = Launcher()
            launcher = self._launcher
        return launcher.start_worker(member.name, Path(self._spec.path), self._settings.cache)

    def _greet(self, member: Holder) -> None:
        name = member.name
        session = member.require_session()
        session.connect(timeout_s=self._settings.start_timeout_s)
        reply = session.greet(
            local_identity(name, self._spec.fingerprint),
            numerics=member.numerics,
            threads=self._num_threads(member),
            spin_ns=self._threads.spin_ns if member.is_on_this_machine else 0,
            slowdown=member.slowdown,
            isa=self._settings.cpu_isa or "",
            timeout_s=self._settings.start_timeout_s,
            cpus=self._threads.cpus.get(name, ()),
            device=member.device,
            weights_layout=member.layout,
            slots_bytes=member.slots_bytes,
            scrub_s=self._settings.scrub_s,
        )
        member.last_hello, member.numerics = reply, reply.numerics_class

    @cached_property
    def host_pool(self) -> _core.HostPool:
        """The threads that the host's operators and the experts in its process share."""
        pooled = [name for name, member in self.members.items() if self._is_pooled(member)]
        cpus = next((self._threads.cpus[name] for name in pooled if name in self._threads.cpus), ())
        return _core.HostPool(threads=self._threads.host, cpus=cpus, spin_ns=self._threads.spin_ns, isa=self._isa)

    def _pool_in_place_of(self, lost: str) -> _core.HostPool:
        """Returns the host's pool, or where the lost worker had more threads of this machine, whose
        cores are idle now, one with as many.
        """
        threads, cpus = self._threads.workers.get(lost, 0), self._threads.cpus.get(lost, ())
        if threads <= self._threads.host:
            return self.host_pool
        return _core.HostPool(threads=threads, cpus=cpus, spin_ns=self._threads.spin_ns, isa=self._isa)

    @property
    def _isa(self) -> str:
        return _core.parse_isa(self._settings.cpu_isa or _core.best_isa())

    @property
    def has_remote_experts(self) -> bool:
        """Whether a member computes elsewhere than in the thread that waits for it."""
        return any(not self._is_pooled(member) for member in self.members.values())

    def _is_pooled(self, member: Holder) -> bool:
        return member.transport == "loopback" and member.device.is_processor and self._is_host_processor

    def _num_threads(self, member: Holder) -> int:
        if member.spec is None or self._is_pooled(member):
            return self._threads.host
        return self._threads.workers.get(member.name, int(member.device.has_own_memory))

    def load(self, held: Mapping[str, Sequence[HeldShard]], on_loading: LoadingReport | None = None) -> None:
        """Loads all shards, the members in parallel and the shards of a member one after the other.
        Errors: those with which a worker refuses, WorkerLost, WorkerTimeout.
        """
        started = time.monotonic()
        reports = {name: _counted_in_bytes(on_loading, name, held[name]) for name in self.members}
        for report in reports.values():
            # All is known before the first byte.
            report(0)

        def load_member(name: str) -> None:
            self.shards.load(self.members[name], held[name], reports[name])
            reports[name](sum(len(shard.experts) for shard in held[name]))

        self._in_parallel(list(self.members), load_member)
        for name, shards in held.items():
            self.shards.settle(self.members[name], shards, _counted_in_bytes(on_loading, f"{name} (comparing)", shards))
        log.info("loaded %d workers in %.1f s", len(self.members), time.monotonic() - started)

    def architecture_of(self, holder: str) -> str:
        """Returns what a holder computes with: a kernel set, or the architecture of its card."""
        return self.member_of(holder).architecture

    def member_of(self, name: str) -> Holder:
        """Returns a member, or a worker that is just being added. Raises WorkerLost for one that
        was removed meanwhile.
        """
        found = self._find(name)
        if found is None:
            raise WorkerLost(f"worker {name} was removed", worker=name)
        return found

    def attach(self, member: Holder, slots: _core.SlotPlan, limit_s: float | None = None) -> tuple[_core.Channel, int, int]:
        """Makes a fresh data path to a member, whose former path is served no more. The worker has
        `attach_timeout_s` for its end of it, or `limit_s` where it would be judged stalled by then.

        Returns the host's channel, the path's generation, and the pulse descriptor or -1, which
        only the first path to another process brings. The caller owns channel and descriptor.
        """
        generation = next(self._generations)
        pulse_fd = -1
        if member.local is not None:
            channel = member.local.attach(slots, generation)
        else:
            timeout_s, limit = (self.attach_timeout_s, CALL_LIMIT) if limit_s is None else (limit_s, STALL_LIMIT)
            session = member.require_session()
            is_open = self.may_open_replies and session.started is not None
            make = partial(session.attach, slots, generation=generation, timeout_s=timeout_s, limit=limit, is_open=is_open)
            channel, pulse_fd = self._fast_path(member, session, make) or make(member.transport)
        try:
            channel = self._wrapped(member, channel)
        except BaseException:
            if pulse_fd >= 0:
                os.close(pulse_fd)
            raise
        member.slots = slots
        return channel, generation, pulse_fd

    def _fast_path(
        self, member: Holder, session: HostSession, make: Callable[..., tuple[_core.Channel, int]]
    ) -> tuple[_core.Channel, int] | None:
        """Makes a path over a fabric with hardware, where both ends have one and `auto` may use it.
        Returns None where they do not, and leaves the member to its transport from then on.
        """
        if not may_take_fabric(member.spec, self._settings.transport) or member.name in self._without_fabric:
            return None
        if session.hello is not None and "fabric" in session.hello.capabilities:
            try:
                made = make("fabric", is_fast_only=True)
                member.transport = "fabric"
                return made
            except UnsupportedError as error:
                log.info("worker %s: transport %s, since %s", member.name, member.transport, error)
        self._without_fabric.add(member.name)
        return None

    def _wrapped(self, member: Holder, channel: _core.Channel) -> _core.Channel:
        """Returns what the client uses instead of a channel: a slower one where the topology asks
        for that, and one that the audit sees.
        """
        emulate = member.spec.emulate if member.spec is not None else None
        if emulate is not None and (emulate.delay_ms or emulate.jitter_ms or emulate.mbit_s):
            channel = _core.make_emulated(
                channel, delay_ms=emulate.delay_ms or 0, jitter_ms=emulate.jitter_ms or 0, mbit_s=emulate.mbit_s or 0
            )
        if self._decorate is not None:
            channel = self._decorate(member.name, channel)
        if self._watch is not None and member.local is None:
            # Experts in this process are computed by the code that would compute them again.
            channel = self._watch(member, channel)
        return channel

    @property
    def attach_timeout_s(self) -> float:
        """A worker has this time to make its end of a data path, in seconds."""
        return max(self._settings.call_timeout_s, LEAST_ATTACH_S)

    def next_generation(self) -> int:
        """Returns the generation of a data path that is made somewhere else than in `attach`."""
        return next(self._generations)

    def shards_by_layer(self, held: Mapping[str, Sequence[HeldShard]], numbers: Mapping[str, int]) -> list[LayerShards]:
        """Returns every layer with its shards at their first holders, in ascending order, as
        `Client.define_layer` takes them. `numbers` are those by which the client knows the holders.
        """
        places: dict[int, list[tuple[int, int, int, tuple[int, ...]]]] = {}
        for name, shards in held.items():
            index = numbers[name]
            for one in (shard for shard in shards if not shard.is_replica):
                places.setdefault(one.layer.index, []).append((one.shard_id, index, one.weights_fingerprint, one.experts))
        return [(layer, sorted(places[layer.index])) for layer in self._spec.layers]

    def close(self) -> None:
        """Says goodbye to all workers, waits at most a second for all together, and kills those it
        started that are still there. It never raises because a worker is already gone, may be
        called again, and does nothing in a forked child.
        """
        if self._is_closed or not self.owner.is_here:
            return
        with self._closing:
            self._is_closed = True
        if self.desk is not None:
            self.desk.close()
        members = [*self.members.values(), *self.arriving.values()]
        for member in members:
            if member.session is not None:
                member.session.say_bye()
        deadline = time.monotonic() + GOODBYE_S
        for member in members:
            if member.session is not None:
                member.session.close(seconds=deadline - time.monotonic())
        for member in members:
            if member.local is not None:
                member.local.close()
        if self._launcher is not None:
            self._launcher.close()
        self.shards.close()

    def kill(self) -> None:
        """Sends SIGKILL to every worker that the host started, so that threads which wait for one
        of them see its end at once.
        """
        for member in (*self.members.values(), *self.arriving.values()):
            if member.session is not None:
                member.session.kill()

    def expect(self, member: Holder) -> None:
        """Counts one that is being added among those who are ended with the fleet."""
        with self._closing:
            self.arriving = {**self.arriving, member.name: member}

    def open_replies(self) -> bool:
        """Has workers that this host started leave the segments of their replies writable from now
        on. Returns whether they did so before.
        """
        before, self.may_open_replies = self.may_open_replies, True
        return before

    def admit(self, member: Holder) -> None:
        """Makes an arriving worker a member. Raises WorkerLost once the fleet is closed."""
        with self._closing:
            if self._is_closed:
                raise WorkerLost(f"worker {member.name} is not added: the runtime was closed", worker=member.name)
            # The host stays last.
            hosts = {name: one for name, one in self.members.items() if one.spec is None}
            workers = {name: one for name, one in self.members.items() if one.spec is not None}
            self.members = {**workers, member.name: member, **hosts}
            self.former = {name: one for name, one in self.former.items() if name != member.name}
            self.arriving = {name: one for name, one in self.arriving.items() if name != member.name}

    def part_with(self, member: Holder) -> None:
        """Makes a member, or one that was arriving, a former one. Somebody has ended it."""
        with self._closing:
            if member.client_index >= 0:
                self.former = {**self.former, member.name: member}
            self.members = {name: one for name, one in self.members.items() if one is not member}
            self.arriving = {name: one for name, one in self.arriving.items() if one is not member}
        self.shards.forget(member.name)

    def use_threads(self, threads: ThreadPlan) -> None:
        """Plans the threads of workers that are started from now on anew."""
        self._threads = threads

    def everybody(self) -> dict[str, Holder]:
        """Returns all whom the client knows, by name: members, those that were removed, and those
        that are just being added.
        """
        with self._closing:
            found = {**self.former, **self.arriving, **self.members}
        return {name: member for name, member in found.items() if member.client_index >= 0}

    def at_index(self, client_index: int) -> Holder:
        """Returns the member that the client knows by this number, also one that was removed."""
        return next(member for member in self.everybody().values() if member.client_index == client_index)

    def _in_parallel(self, names: Sequence[str], step: Callable[[str], None]) -> None:
        """Runs `step` for every name in a thread of its own. The first error ends all others,
        because it kills their workers, and is raised.
        """
        if not names:
            return
        with ThreadPoolExecutor(max_workers=len(names), thread_name_prefix="dflash-start") as pool:
            futures = [pool.submit(step, name) for name in names]
            try:
                done, pending = wait(futures, return_when=FIRST_EXCEPTION)
            except BaseException:
                # Ctrl-C arrived during the wait.
                self._abort_start()
                raise
            failed = [future for future in done if future.exception() is not None]
            if failed or pending:
                self._abort_start()
                raise _first_cause(failed)

    def _abort_start(self) -> None:
        self.kill()
        for member in self.members.values():
            if member.session is not None and member.session.started is None:
                member.session.hang_up()


def _first_cause(failed: Sequence[Future[None]]) -> BaseException:
    errors = [error for future in failed if (error := future.exception()) is not None]
    return errors[0]


def _counted_in_bytes(report: LoadingReport | None, holder: str, shards: Sequence[HeldShard]) -> Callable[[int], None]:
    """Returns what is told how many experts of these shards, in their order, are loaded."""
    if report is None:
        return lambda _count: None
    sizes = [0, *itertools.accumulate(one.layer.expert_bytes for one in shards for _ in one.experts)]
    return lambda count: report(holder, sizes[min(count, len(sizes) - 1)], sizes[-1])
