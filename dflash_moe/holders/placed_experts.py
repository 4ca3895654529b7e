"""The routed experts of a model on the workers of a topology, from the plan to loaded weights, and
what their data paths and calls need to know. Who calls them is not known here.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.config.values import REPLICA
from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.holders.fleet import ChannelDecorator, ChannelWatch, DamageReport, Fleet, LoadingReport
from dflash_moe.holders.memory_check import check_memory
from dflash_moe.holders.threads import ThreadPlan, thread_plan
from dflash_moe.holders.transports import check_paths
from dflash_moe.placement import plan_placement
from dflash_moe.placement.fallback import check_fallback
from dflash_moe.placement.held_shards import HeldShard, shapes_of, shards_by_holder
from dflash_moe.placement.imposed import settle
from dflash_moe.placement.numerics import check_classes, check_replicas, settle_classes
from dflash_moe.placement.preset import FAST, Offer, choose_classes, dense_class, describe, is_stated, preferred
from dflash_moe.protocol.devices import DeviceChoice
from dflash_moe.protocol.identity import choose_numerics
from dflash_moe.topology import HOST
from dflash_moe.topology.numerics import DEFAULT_NUMERICS

if TYPE_CHECKING:
    from dflash_moe.config import Settings
    from dflash_moe.holders.holder import Holder
    from dflash_moe.model.spec import ModelSpec
    from dflash_moe.placement import Placement
    from dflash_moe.topology import Topology

# What is planned, for people: commands show it on stderr.
log_plan = logging.getLogger("dflash_moe.plan")


class PlacedExperts:
    """A model's experts, placed on the workers of a topology. `start` starts and loads these; they
    belong to `fleet`, which the owner of this object closes, also after an error.

    `settings` and `slices` are those in force, and change together (`use`).
    """

    def __init__(
        self,
        spec: ModelSpec,
        topology: Topology,
        settings: Settings,
        *,
        channel_decorator: ChannelDecorator | None = None,
        watch: ChannelWatch | None = None,
        on_damage: DamageReport = lambda _holder, _layer, _shard, _failure: None,
        retries_unfit: bool = False,
    ) -> None:
        """Plans everything and starts nothing; what is passed on is the fleet's. Raises ConfigError
        and UnsupportedError for a plan that cannot be carried out.
        """
        topology = topology.with_settings(settings)
        self._key = check_paths(topology, settings)
        self.spec = spec
        self.topology = topology
        self.settings = settings
        self.slices = slices_of(settings)
        if topology.placement.replicas > 1 and REPLICA not in settings.failure_order:
            raise ConfigError(
                f"placement.replicas is {topology.placement.replicas} and failure.order has no replica, so that nobody would "
                "ask the other holders: write it there, or placement.replicas: 1"
            )
        self.placement = plan_placement(spec.layers, topology)
        if settings.preset != FAST:
            # A preset chooses once all holders have said what they offer.
            check_classes(spec.layers, self.placement, topology, settings.numerics)
            check_fallback(spec.layers, self.placement, topology, settings)
        self.held: Mapping[str, Sequence[HeldShard]] = shards_by_holder(spec, self.placement)
        # The shards of the host's stand-ins by their names; replaced and never changed.
        self.standing_in: Mapping[str, Sequence[HeldShard]] = MappingProxyType({})
        self.threads = thread_plan(topology, settings, self.held)
        self.fleet = Fleet(
            spec, settings, self.threads, decorate=channel_decorator, watch=watch, on_damage=on_damage,
            retries_unfit=retries_unfit,
        )  # fmt: skip

    def start(self, on_loading: LoadingReport | None = None) -> None:
        """Starts and loads all workers. Errors: ConfigError, CheckpointError, UnsupportedError,
        ProtocolError, WorkerLost, WorkerTimeout.
        """
        self.greet()
        self._say_preset()
        self.fleet.load(self.held, on_loading)

    def greet(self) -> None:
        """Does all of `start` that comes before weights are loaded."""
        self.fleet.add_members(self.topology, self.held, HOST, self.placement.slots)
        self.fleet.start(self._key, self.topology.registration)
        self._settle_classes()
        needed = self.placement.bytes_by_holder()
        needed |= {name: member.slots_bytes for name, member in self.fleet.members.items() if member.slots_bytes}
        check_memory(self.fleet.members, needed, self.held)

    def _settle_classes(self) -> None:
        """Plans the numerics classes again now that the cards have said which class they compute
        bf16 in, and all holders what they offer to a preset, and checks which classes meet in a
        layer.
        """
        members = self.fleet.members
        placement = settle_classes(self.placement, {member.name: member.numerics for member in members.values()})
        imposed = self.topology.placement.imposed
        if imposed is not None:
            placement = settle(placement, imposed, self._offers())
        elif self.settings.preset == FAST:
            placement = choose_classes(self.spec.layers, placement, self._offers())
        if placement != self.placement or self.settings.preset == FAST:
            check_classes(self.spec.layers, placement, self.topology, self.settings.numerics)
            check_fallback(self.spec.layers, placement, self.topology, self.settings)
            self.placement, self.held = placement, shards_by_holder(self.spec, placement)
        self.check_replicas(self.placement, members)

    def check_replicas(self, placement: Placement, members: Mapping[str, Holder]) -> None:
        """Checks that all holders of each shard compute the same bits by what they have said of
        themselves. Raises UnsupportedError.
        """
        offers = {name: Offer(member.offered, member.architecture) for name, member in members.items()}
        check_replicas(self.spec.layers, placement, offers)

    def _offers(self) -> dict[str, Offer]:
        """Returns what each member offers to a preset, which a class that the topology states
        binds.
        """
        return {
            name: Offer(member.offered, member.architecture, member.numerics if is_stated(self.topology, name) else None)
            for name, member in self.fleet.members.items()
        }

    def _say_preset(self) -> None:
        """Says once per start which classes a preset took."""
        if self.topology.placement.imposed is not None:
            return
        if line := describe(self.settings.preset, self.placement, self.topology, self._dense_classes()):
            log_plan.info("%s", line)

    def dense_class(self, weight_format: str, isa: str) -> str | None:
        """Returns the class that a preset chooses for the host's own matrices in this format, which
        kernel set `isa` computes, and None where host.activations or the workers' say it.
        """
        imposed = self.topology.placement.dense
        if imposed is not None:
            return imposed.get(weight_format, DEFAULT_NUMERICS)
        if self.settings.preset != FAST or is_stated(self.topology, HOST):
            return None
        return dense_class(Offer(tuple(_core.numerics_classes(isa)), isa), weight_format)

    @property
    def host_numerics(self) -> str:
        """As `ExpertRuntime.host_numerics`."""
        try:
            return choose_numerics(self.topology.numerics_of(HOST), self.fleet.host_pool.isa, name=HOST)[0]
        except UnsupportedError:
            if self.topology.host.activations is not None:
                raise
            return DEFAULT_NUMERICS

    @property
    def host_device(self) -> DeviceChoice:
        """The device of attention and router."""
        return DeviceChoice.of_host(self.topology.host)

    def _dense_classes(self) -> list[str]:
        """Returns the classes that a preset tries for the host's own matrices."""
        is_ours = DeviceChoice.of_host(self.topology.host).is_processor and self.settings.host_operators != "torch"
        if self.settings.preset != FAST or is_stated(self.topology, HOST) or not is_ours:
            return []
        isa = _core.parse_isa(self.settings.cpu_isa or _core.best_isa())
        return preferred([Offer(tuple(_core.numerics_classes(isa)), isa)])

    @property
    def host_isa(self) -> str:
        """The kernel set with which this host's processor computes."""
        return _core.parse_isa(self.settings.cpu_isa or _core.best_isa())

    # Whoever changes members does so under a lock of its own, one after the other. The tables are
    # replaced and never changed, so that others may go through the ones that they found.

    def admit(self, name: str, shards: Sequence[HeldShard], topology: Topology) -> None:
        """Notes the shards of a worker that `topology` has."""
        self.held, self.topology = {**self.held, name: shards}, topology

    def part_with(self, name: str) -> None:
        """Forgets the shards of a worker that was removed."""
        self.held = {holder: shards for holder, shards in self.held.items() if holder != name}
        workers = tuple(worker for worker in self.topology.workers if worker.name != name)
        self.topology = replace(self.topology, workers=workers)

    def stand_in(self, name: str, shards: Sequence[HeldShard]) -> None:
        """Notes the shards of a stand-in."""
        self.standing_in = {**self.standing_in, name: shards}

    def place(self, placement: Placement) -> None:
        """Puts a placement in force that the client knows of."""
        self.placement = placement

    def use_threads(self, threads: ThreadPlan) -> None:
        """Plans the threads of workers that are started from now on anew."""
        self.threads = threads
        self.fleet.use_threads(threads)

    def use(self, settings: Settings) -> None:
        """Puts settings in force that differ from the former ones in mode, slices or wire dtypes
        only. Raises ConfigError where the slice of mode stream exceeds its maximum.
        """
        self.settings, self.slices = settings, slices_of(settings)

    @property
    def wire_dtypes(self) -> tuple[str, str]:
        """The dtypes of requests and of replies: those of the settings, else the model's own."""
        request = self.settings.dtype or self.spec.dtype
        return request, self.settings.reply_dtype or request

    def plan_slots(self, arriving: Mapping[str, Sequence[HeldShard]] = MappingProxyType({})) -> dict[str, _core.SlotPlan]:
        """Returns the slots of every holder's data path by its name, those of `arriving` holders
        with the shards that they will have too. A stand-in has slots that take what was cut for any
        worker, or where all of them were removed those that its own shards need.
        """
        plans = self._plan({**self.held, **arriving})
        stand_ins = {name: widest(plans or self._plan({name: shards})) for name, shards in self.standing_in.items()}
        return {**plans, **stand_ins}

    def _plan(self, held: Mapping[str, Sequence[HeldShard]]) -> dict[str, _core.SlotPlan]:
        shapes = [shapes_of(shards) for shards in held.values()]
        plans = _core.plan_arena(shapes, self.slices, *self.wire_dtypes, self.settings.shared_bytes or 0)
        return dict(zip(held, plans, strict=True))

    def window(self, slots: _core.SlotPlan | None) -> int:
        """Returns how many slices may be in flight at a member with these `slots`. Where the arena
        was short, it has fewer of them than the plan asked for, and the window shrinks with them.
        """
        if slots is None:
            return self.slices.window
        return min(self.slices.window, slots.num_slots - _core.SPARE_SLOTS)


def widest(plans: Mapping[str, _core.SlotPlan]) -> _core.SlotPlan:
    """Returns slots that take whatever was cut for any of the planned ones."""
    found = list(plans.values())
    return _core.SlotPlan(
        num_slots=max(plan.num_slots for plan in found),
        rows=max(plan.rows for plan in found),
        request_bytes=max(plan.request_bytes for plan in found),
        reply_bytes=max(plan.reply_bytes for plan in found),
    )


def slices_of(settings: Settings) -> _core.SlicePlan:
    """Plans how the settings cut calls into slices. Raises ConfigError where the slice of mode
    stream exceeds its maximum.
    """
    return _core.plan_slices(
        settings.mode,
        batch_capacity=settings.batch_capacity,
        stream_tokens=settings.stream_tokens,
        stream_tokens_max=settings.stream_tokens_max,
    )
