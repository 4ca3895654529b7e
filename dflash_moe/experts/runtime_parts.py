"""What a running `ExpertRuntime` consists of: the client of its calls, and everybody who keeps the
workers behind it. The parts are built together, started in one order and ended in another.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_moe import _core
from dflash_moe.config.remedies import host_grace_ms
from dflash_moe.errors import DflashError
from dflash_moe.experts.auto import cost_classes
from dflash_moe.experts.expert_calls import ExpertCalls
from dflash_moe.experts.mode_switch import ModeSwitch
from dflash_moe.experts.observe import RuntimeReport
from dflash_moe.experts.snapshot import brief
from dflash_moe.holders.client_calls import ClientCalls
from dflash_moe.holders.control import ControlSocket, WorkerOrders
from dflash_moe.holders.elastic import Elastic
from dflash_moe.holders.events import HolderEvents
from dflash_moe.holders.holder_lists import HolderLists
from dflash_moe.holders.host_fallback import HostFallback
from dflash_moe.holders.newcomers import Newcomers
from dflash_moe.holders.panel_shards import say_what_is_written
from dflash_moe.holders.path_keeper import PathKeeper
from dflash_moe.holders.placed_experts import PlacedExperts
from dflash_moe.holders.row_audit import Audit, Taps
from dflash_moe.holders.worker_keeper import WorkerKeeper
from dflash_moe.placement.held_shards import holders_by_shard

if TYPE_CHECKING:
    from dflash_moe.config import Settings
    from dflash_moe.holders.fleet import ChannelDecorator, LoadingReport
    from dflash_moe.model.spec import ModelSpec
    from dflash_moe.topology import Topology

log = logging.getLogger(__name__)


class RuntimeParts:
    """The parts of one runtime, which none of them knows. Each is made after those that it calls;
    what the others have to hear of it goes through the events. `open`, `run` and `end` are called
    in this order, `end` whatever became of the others.
    """

    def __init__(
        self, spec: ModelSpec, topology: Topology, settings: Settings, overrides: Mapping[str, Any], *,
        channel_decorator: ChannelDecorator | None = None,
    ) -> None:  # fmt: skip
        """Builds the parts without starting anything. `settings` have the `overrides` of
        `ExpertRuntime.start`. Errors are those of PlacedExperts, and DflashError where this process
        is out of descriptors.
        """
        self._is_running, self._is_over = False, threading.Event()
        # Where this process runs out of descriptors, a part cannot be made; those that were made
        # before it give theirs back.
        with ExitStack() as built:
            self.events = HolderEvents()
            built.callback(self.events.bell.close)
            self._taps = Taps()
            built.callback(self._taps.close)
            self.placed = placed = PlacedExperts(
                spec, topology, settings, channel_decorator=channel_decorator,
                watch=self._taps.watch if settings.audit_cpu > 0 else None, on_damage=self.events.damage,
            )  # fmt: skip
            self._fleet = placed.fleet
            self.client = _core.Client(
                spin_ns=placed.threads.spin_ns,
                call_timeout_s=settings.call_timeout_s,
                stall_timeout_s=settings.stall_timeout_s,
                suspect_s=settings.suspect_ms / 1000,
                park_s=settings.park_s,
                reconnect_grace_s=host_grace_ms(settings) / 1000,
                hedge_share=settings.hedge,
            )
            built.callback(self.client.close)
            self.paths = PathKeeper(self.client, placed, self.events)
            self.holders = HolderLists(self.client)
            self.fallback = HostFallback(self.client, placed, self.paths, self.holders, self.events)
            self.audit = Audit(
                self._fleet, self._taps, Path(spec.path), lambda: placed.held, isa=placed.host_isa, cpu=settings.audit_cpu,
                events=self.events,
            )  # fmt: skip
            calls = ClientCalls(self.client, self._fleet, self.paths, self.fallback, self.audit)
            self.workers = WorkerKeeper(placed, calls, self.events)
            self.elastic = Elastic(self.client, placed, self.paths, self.workers, self.holders)
            self.newcomers = Newcomers(placed, self.elastic)
            self.calls = ExpertCalls(self.client, placed)
            self.modes = ModeSwitch(self.client, placed, self.paths, self.calls, overrides)
            self.report = RuntimeReport(
                self.client, placed, self.calls, workers=self.workers, fallback=self.fallback, audit=self.audit,
                holders=self.holders, events=self.events, is_over=self._is_over,
            )  # fmt: skip
            orders = WorkerOrders(placed, self.elastic, self.workers, lambda: brief(self.report.snapshot()))
            self._control = ControlSocket(orders.answer)
            built.pop_all()

    def open(self, on_loading: LoadingReport | None) -> None:
        """Starts and loads all workers, and tells the client of them and of every layer's holders.
        Errors are those of `ExpertRuntime.start`.
        """
        if self.calls.device_name:
            log.info("host.device: %s", self.calls.device_name)
        placed, client = self.placed, self.client
        placed.start(on_loading)
        plans = placed.plan_slots()
        for name, member in self._fleet.members.items():
            self.paths.introduce(member, *self._fleet.attach(member, plans[name]))
        classes = cost_classes(placed.spec.layers)
        numbers = {name: member.client_index for name, member in self._fleet.members.items()}
        layers = self._fleet.shards_by_layer(placed.held, numbers)
        for layer, shards in layers:
            client.define_layer(
                layer=layer.index,
                name=layer.name,
                in_size=layer.ffn.in_size,
                out_size=layer.ffn.out_size,
                num_experts=layer.num_experts,
                shards=shards,
                cost_class=classes[layer.index],
            )
        for where, holders in holders_by_shard(placed.spec, placed.placement).items():
            self.holders.begin(where, [numbers[name] for name in holders])
        self.fallback.start()
        client.set_profile(bool(placed.settings.profile))
        self.calls.open(layers)

    def run(self) -> None:
        """Starts the threads that keep what `open` has made."""
        self.paths.start()
        self.workers.start()
        self.audit.start()
        self._fleet.shards.learn(self.placed.held)
        self._control.start()
        self._is_running = True
        self.newcomers.start()
        say_what_is_written(self.placed)

    def note_end(self) -> None:
        """Takes what is told of a runtime that is closed, before it is; never raises."""
        if self._is_running and self._fleet.owner.is_here:
            with suppress(DflashError):
                self.report.keep_last()
                self.modes.explain()

    def end(self) -> None:
        """Ends a runtime that was closed or dropped; never raises. Its channels go once the last
        call has left. In a forked child it does nothing: workers and connections are the parent's,
        and a lock of any part may be one that a thread of the parent held at the fork, which
        nobody gives back in the child's copy.
        """
        if not self._fleet.owner.is_here:
            return
        self._is_over.set()
        self.calls.close()
        self.audit.call_off()
        self._fleet.shards.call_off()
        self.fallback.call_off()
        self.newcomers.call_off()
        self.workers.call_off()
        self.paths.call_off()
        self.fallback.close()
        self._fleet.close()
        self._control.close()
        self.newcomers.close()
        self.paths.close()
        self.workers.close()
        self.audit.close()
        self.client.close()
        self._taps.close()
        self.events.bell.close()
