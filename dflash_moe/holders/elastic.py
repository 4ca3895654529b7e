"""Adds workers to a running runtime, removes them, and starts them anew, while calls go on.

A worker that is added is started or dialled, checked and loaded before anybody is told of it; then
it becomes a further holder of its shards. One that is removed gets nothing that another holder can
have, finishes what it has, and leaves. The shards never change, so that no bit does.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dflash_moe.errors import ConfigError, DflashError, UnsupportedError, WorkerLost
from dflash_moe.holders.holder import Parting
from dflash_moe.holders.membership import State
from dflash_moe.holders.memory_check import room_of
from dflash_moe.holders.threads import ThreadPlan, plan_with, plan_without
from dflash_moe.holders.transports import check_paths, choose_transport
from dflash_moe.placement.elastic import (
    Newcomer,
    Place,
    balanced,
    bytes_of,
    choose_shards,
    named,
    only_at,
    with_holder,
    without_holder,
)
from dflash_moe.placement.held_shards import HeldShard, shards_by_holder
from dflash_moe.protocol.devices import DeviceChoice
from dflash_moe.topology import Topology, WorkerSpec
from dflash_moe.topology.numerics import CLASSES, possible_classes
from dflash_moe.topology.parse import MAX_WORKERS, parse_worker

if TYPE_CHECKING:
    from dflash_moe import _core
    from dflash_moe.holders.holder import Holder
    from dflash_moe.holders.holder_lists import HolderLists
    from dflash_moe.holders.path_keeper import PathKeeper
    from dflash_moe.holders.placed_experts import PlacedExperts
    from dflash_moe.holders.worker_keeper import WorkerKeeper
    from dflash_moe.placement import Placement

log = logging.getLogger(__name__)

# Beyond the time to drain: a goodbye, or SIGKILL and its reaping, which fleet and launcher bound.
END_S = 30.0
# A start has its time-out once to connect, once to greet, and once for each shard that it loads;
# pauses between tries come on top.
START_PHASES = 4
MAX_DRAIN_S = 86_400.0
# A worker that registers waits so long for a change that somebody asked for.
CHANGE_S = 600.0
SOURCE = "add_worker"


class Elastic:
    """Changes who the workers of a runtime are, one change at a time. Any thread may call."""

    def __init__(
        self, client: _core.Client, placed: PlacedExperts, paths: PathKeeper, keeper: WorkerKeeper, holders: HolderLists
    ) -> None:
        self._client = client
        self._placed = placed
        self._fleet = placed.fleet
        self._paths = paths
        self._keeper = keeper
        self._holders = holders
        # Held over one change of members, which takes seconds; nobody waits for it.
        self._changing = threading.Lock()
        # Guards that placement, held shards and members change together. The keeper's thread takes
        # it when a worker is gone.
        self._lock = threading.RLock()

    # -- one more worker ---------------------------------------------------------------------------

    def add(self, wanted: WorkerSpec | Mapping[str, Any] | str, *, is_patient: bool = False) -> tuple[Place, ...]:
        """Does what `ExpertRuntime.add_worker` says, and returns the shards that the worker now
        holds, as (position of the layer, id). One that registered by itself `is_patient` and waits
        for the end of another change.
        """
        spec = read_spec(wanted)
        with self._one_change(CHANGE_S if is_patient else 0.0):
            if not is_patient and self._fleet.desk is not None:
                self._fleet.desk.forgive(spec.name)
            self._check_arrival(spec)
            topology = replace(self._placed.topology, workers=(*self._placed.topology.workers, spec))
            asked, may_compute = self._classes_of(spec, topology)
            # What can be known before anything is started.
            self._choose(Newcomer(spec, may_compute, spec.memory))
            member = self._member_of(spec, asked)
            threads = self._placed.threads
            self._use_threads(plan_with(threads, spec, self._placed.settings))
            self._fleet.expect(member)
            try:
                chosen = self._start(member, spec)
                self._join(member, chosen, topology)
            except BaseException:
                self._give_up(member, threads)
                raise
            log.info("worker %s is added and holds %d shards", spec.name, len(chosen))
            return tuple(chosen)

    def _check_arrival(self, spec: WorkerSpec) -> None:
        self._check_host("add_worker")
        members = self._fleet.members
        if spec.name in members:
            raise ConfigError(f"worker {spec.name} is not added: a worker of this name is there; give it another one")
        if len(members) >= MAX_WORKERS:
            raise ConfigError(f"worker {spec.name} is not added: there are {len(members)} workers; allowed are {MAX_WORKERS}")
        address = spec.parsed_address
        if address.kind == "loopback":
            raise ConfigError(
                f"worker {spec.name} is not added: at address loopback it would compute in the host's own process, which "
                "adds nothing; leave the address out, or give one of another process"
            )
        for other in members.values():
            if not address.is_registered and not address.is_started_by_host and str(other.address) == str(address):
                raise ConfigError(f"worker {spec.name} is not added: worker {other.name} has the same address {address}")
        registration = self._placed.topology.registration
        check_paths(Topology((spec,), source=SOURCE, registration=registration), self._placed.settings)

    def _check_host(self, doing: str) -> None:
        if not self._placed.host_device.is_processor:
            raise UnsupportedError(
                f"{doing}: host.device is no processor, and its device steps know the workers that they began with; start the "
                "runtime anew with the topology that you want"
            )

    def _classes_of(self, spec: WorkerSpec, topology: Topology) -> tuple[str, tuple[str, ...]]:
        """Returns the class that the worker is asked for, and all that it may turn out to compute.
        Where its spec states none, it shall compute what most shards need.
        """
        if spec.activations is not None:
            stated = topology.numerics_of(spec.name)
            return stated, possible_classes(stated)
        needed = Counter(shard.numerics for shards in self._placed.placement.layers for shard in shards)
        return needed.most_common(1)[0][0], tuple(CLASSES)

    def _member_of(self, spec: WorkerSpec, numerics: str) -> Holder:
        address = spec.parsed_address
        setting = self._placed.settings.transport
        transport = choose_transport(spec.name, address, setting, fabric_clear=spec.fabric_clear)
        layout = "mapped" if spec.weights_layout == "mapped" else "packed"
        # The client knows a name by one number for ever.
        former = self._fleet.former.get(spec.name)
        client_index = former.client_index if former is not None else -1
        return self._fleet.new_holder(
            spec.name, address, transport, numerics, layout, spec=spec, device=DeviceChoice.of(spec), client_index=client_index
        )

    def _choose(self, newcomer: Newcomer) -> list[Place]:
        placement, layers = self._placed.placement, self._placed.spec.layers
        return choose_shards(layers, placement, newcomer, self.load(), self._fleet.members)

    def _start(self, member: Holder, spec: WorkerSpec) -> list[Place]:
        """Starts and loads a worker, and returns what it has loaded."""
        self._fleet.start_again(member)
        classes = (member.numerics,) if spec.activations is not None else tuple({member.numerics, *member.offered})
        chosen = self._choose(Newcomer(spec, classes, room_of(member, spec.memory)))
        self._placed.check_replicas(self._placement_with(member, chosen), {**self._fleet.members, member.name: member})
        self._fleet.load_again(member, self._held_shards(member, chosen))
        return chosen

    def _placement_with(self, member: Holder, chosen: list[Place]) -> Placement:
        is_mapped = member.layout == "mapped"
        return with_holder(self._placed.placement, member.name, chosen, self._fleet.members, is_mapped=is_mapped)

    def _held_shards(self, member: Holder, chosen: list[Place]) -> list[HeldShard]:
        return shards_by_holder(self._placed.spec, self._placement_with(member, chosen))[member.name]

    def _join(self, member: Holder, chosen: list[Place], topology: Topology) -> None:
        """Gives a loaded worker its data path, and tells the calls that it is a holder."""
        placed, name = self._placed, member.name
        shards = self._held_shards(member, chosen)

        def take(*path: Any) -> None:
            # A former worker of this name is lost to the client. Where the arena is short, the
            # others keep their wider slots until the next change of mode.
            self._paths.introduce(member, *path)
            with self._lock:
                self._fleet.admit(member)
                placed.admit(name, shards, topology)
                self._place(self._placement_with(member, chosen))

        self._paths.make(member, take, arriving={name: shards})
        self._keeper.adopt(member)

    def _give_up(self, member: Holder, threads: ThreadPlan) -> None:
        """Undoes an arrival; never raises."""
        with suppress(DflashError):  # the runtime was closed meanwhile
            self._use_threads(threads)
            if member.client_index >= 0:
                self._client.mark_lost(member.client_index, "it was not added after all")
        self._fleet.end_member(member)
        self._forget(member)

    # -- one less ----------------------------------------------------------------------------------

    def remove(self, name: str, drain_s: float, *, force: bool) -> None:
        """Does what `ExpertRuntime.remove_worker` says."""
        self._check_host("remove_worker")
        _check_drain(drain_s)
        with self._one_change():
            self._process(name, "remove_worker")
            self._require_others(name, "remove_worker", force=force)
            end = self._ending("it was removed")
            self._keeper.let_go(name, Parting(drain_s, end, self._forget))
            with self._lock:
                self._tell_holders(balanced(without_holder(self._placed.placement, name), self.load()))
            self._keeper.await_end(name, drain_s + END_S)
        log.info("worker %s is removed", name)

    def restart(self, name: str, drain_s: float, *, force: bool) -> None:
        """Does what `ExpertRuntime.restart_worker` says."""
        _check_drain(drain_s)
        with self._one_change():
            member = self._process(name, "restart_worker")
            if not member.address.is_started_by_host:
                raise ConfigError(
                    f"restart_worker: somebody else starts worker {name}, at {member.address}: stop and start it there, and it "
                    "is dialled again; or remove it first and add it afterwards"
                )
            self._require_others(name, "restart_worker", force=force)
            parting = Parting(drain_s, self._ending("it is started anew"), self._forget)
            self._keeper.let_go(name, parting, is_recycled=True)
            limit_s = drain_s + END_S + START_PHASES * self._placed.settings.start_timeout_s
            state = self._keeper.await_end(name, limit_s)
        if state is None or state.state != State.READY.value:
            why = "it was removed meanwhile" if state is None else f"it is {state.state}: {state.reason}"
            raise WorkerLost(f"worker {name} was ended to be started anew, and is not back: {why}", worker=name)
        log.info("worker %s is started anew", name)

    def _process(self, name: str, doing: str) -> Holder:
        """Returns a member that is another process. Raises ConfigError."""
        member = self._fleet.members.get(name)
        if member is None:
            raise ConfigError(f"{doing}: no worker is named {name!r}; there are {', '.join(self._fleet.members)}")
        if member.session is None:
            raise ConfigError(f"{doing}: {name} computes in the host's own process, and ends with it")
        return member

    def _require_others(self, name: str, doing: str, *, force: bool) -> None:
        """Raises ConfigError where a worker is the last ready holder of a shard."""
        ready = {one.name for one in self._keeper.states() if one.state == State.READY.value}
        lone = only_at(self._placed.placement, name, ready)
        if lone and not force:
            shard = named(self._placed.spec.layers, lone[0])
            raise ConfigError(
                f"{doing}: worker {name} is the last ready holder of {len(lone)} shards, the first is {shard}; add a worker "
                "that holds them before, or say force: calls that need them then wait no longer than failure.park_s for "
                "another holder, and fail"
            )

    def _ending(self, reason: str) -> Callable[[Holder], None]:
        def end(member: Holder) -> None:
            with suppress(DflashError):  # the runtime was closed meanwhile
                self._client.mark_lost(member.client_index, reason)

        return end

    # -- what changes together ---------------------------------------------------------------------

    def _forget(self, member: Holder) -> None:
        """Makes a worker that is ended a former one; never raises. Its shards are others', or
        nobody's.
        """
        placed, name = self._placed, member.name
        with self._lock, suppress(DflashError):  # the runtime was closed meanwhile
            self._fleet.part_with(member)
            placed.part_with(name)
            self._use_threads(plan_without(placed.threads, name, placed.settings))
            self._place(without_holder(placed.placement, name))

    def _place(self, placement: Placement) -> None:
        """Puts a placement in force, with those first who balance the load."""
        placement = balanced(placement, self.load(placement))
        self._tell_holders(placement)
        self._placed.place(placement)

    def _tell_holders(self, placement: Placement) -> None:
        """Names the holders of a placement to the client, where they differ from those that were
        told last, or might.
        """
        everybody = self._fleet.everybody()
        for layer, shards, former in zip(
            self._placed.spec.layers, placement.layers, self._placed.placement.layers, strict=True
        ):
            for shard, before in zip(shards, former, strict=True):
                if shard.holders != before.holders:
                    holders = [everybody[name].client_index for name in shard.holders]
                    self._holders.set_workers((layer.index, shard.shard_id), holders)

    def _use_threads(self, threads: ThreadPlan) -> None:
        if threads.is_oversubscribed != self._placed.threads.is_oversubscribed:
            self._client.set_spinning(not threads.is_oversubscribed)
        self._placed.use_threads(threads)

    @contextmanager
    def _one_change(self, patience_s: float = 0.0) -> Iterator[None]:
        self._fleet.owner.require_here()
        if not self._changing.acquire(timeout=patience_s):
            raise ConfigError("another worker is being added, removed or started anew; wait until that is done")
        try:
            yield
        finally:
            self._changing.release()

    def load(self, placement: Placement | None = None) -> dict[Place, float]:
        """Returns the load of every shard of a placement, by default that in force: the time that
        its holders have computed for it, in ns, or as long as nobody has computed anything, its
        bytes. What a holder computed in a layer counts for all its shards there in equal parts.
        """
        placement = placement or self._placed.placement
        layers = self._placed.spec.layers
        everybody = self._fleet.everybody()
        counted = self._client.counters()
        found: dict[Place, float] = {}
        for at, (layer, shards) in enumerate(zip(layers, placement.layers, strict=True)):
            shares = Counter(holder for shard in shards for holder in shard.holders)
            for shard in shards:
                parts = (
                    counted.get((everybody[holder].client_index, layer.index), {}).get("worker_compute_ns", 0) / shares[holder]
                    for holder in shard.holders
                )
                found[at, shard.shard_id] = float(sum(parts))
        if any(found.values()):
            return found
        return {where: float(bytes_of(layers, placement, where)) for where in found}


def read_spec(wanted: WorkerSpec | Mapping[str, Any] | str) -> WorkerSpec:
    """Returns a worker's spec that is given as such, as a mapping with the keys of a topology's
    worker, or as YAML text of one. Raises ConfigError and TopologyError.
    """
    if isinstance(wanted, WorkerSpec):
        return wanted
    if isinstance(wanted, Mapping):
        try:
            wanted = json.dumps(dict(wanted))  # which is YAML too
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the worker to add cannot be written as YAML: {error}") from None
    return parse_worker(wanted, SOURCE)


def _check_drain(drain_s: float) -> None:
    if not (math.isfinite(drain_s) and 0 <= drain_s <= MAX_DRAIN_S):
        raise ConfigError(f"drain_s is {drain_s}; allowed are 0..{MAX_DRAIN_S:g} seconds")
