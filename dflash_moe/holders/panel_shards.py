"""Which shards of a placement this machine keeps packed on its disk, and what a host says of that.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.config.values import format_bytes
from dflash_moe.errors import DflashError
from dflash_moe.holders.holder import Holder, asked_layout
from dflash_moe.placement import plan_placement
from dflash_moe.placement.held_shards import HeldShard, shards_by_holder
from dflash_moe.placement.numerics import settle_classes
from dflash_moe.placement.preset import FAST, Offer, choose_classes, is_stated
from dflash_moe.protocol.devices import DeviceChoice, open_device
from dflash_moe.protocol.identity import choose_numerics
from dflash_moe.store.folder import default_path
from dflash_moe.store.machine_panels import uses_panels
from dflash_moe.topology import HOST
from dflash_moe.topology.addresses import parse_address

if TYPE_CHECKING:
    from dflash_moe.config import Settings
    from dflash_moe.holders.placed_experts import PlacedExperts
    from dflash_moe.model.spec import ModelSpec
    from dflash_moe.placement import Placement
    from dflash_moe.topology import Topology

log_notices = logging.getLogger("dflash_moe.notices")

# A worker that has just been attached answers within milliseconds. One that does not is no reason
# to wait at a start.
ASK_S = 1.0


def panel_shards(spec: ModelSpec, topology: Topology, settings: Settings) -> list[HeldShard]:
    """Returns the shards that holders on this machine would map from files if a host were started
    with this topology and these settings. Nothing is started. Errors are those of a start before
    its first worker; workers elsewhere count as offering what this machine does.
    """
    topology = topology.with_settings(settings)
    placement = _with_classes(spec, topology, plan_placement(spec.layers, topology), settings)
    found = []
    for name, shards in shards_by_holder(spec, placement).items():
        worker = None if name == HOST else topology.worker(name)
        device = DeviceChoice.of_host(topology.host) if worker is None else DeviceChoice.of(worker)
        address = parse_address(None) if worker is None else worker.parsed_address
        layout = asked_layout(placement.layout_of(name), worker, device, settings.cache)
        if not address.may_be_elsewhere and device.is_processor and uses_panels(layout, settings.cache):
            found += shards
    return found


def _with_classes(spec: ModelSpec, topology: Topology, placement: Placement, settings: Settings) -> Placement:
    """Returns the placement with the classes that its holders would say they compute."""
    isa = _core.parse_isa(settings.cpu_isa or _core.best_isa())
    classes, offers = {}, {}
    for name in placement.bytes_by_holder():
        choice = DeviceChoice.of_host(topology.host) if name == HOST else DeviceChoice.of(topology.worker(name))
        device = open_device(choice, threads=1, name=name)
        classes[name], offered = choose_numerics(topology.numerics_of(name), isa, name=name, device=device)
        stated = classes[name] if is_stated(topology, name) else None
        offers[name] = Offer(offered, isa if device is None else device.arch, stated)
    placement = settle_classes(placement, classes)
    return choose_classes(spec.layers, placement, offers) if settings.preset == FAST else placement


def say_what_is_written(placed: PlacedExperts) -> None:
    """Tells people once where packed experts are being written, if workers that this host started
    have begun to. Never raises.
    """
    fleet, cache = placed.fleet, placed.settings.cache
    shards = [one for name, member in fleet.members.items() if _is_writing(member) for one in placed.held[name]]
    if not shards:
        return
    with suppress(DflashError):
        log_notices.info(
            "packed experts are written to %s meanwhile, about %s as far as that fits, so that the next start maps them; "
            "DFLASH_MOE_CACHE_PANELS=off keeps none",
            cache.path or default_path(), format_bytes(_bytes_of(shards)),
        )  # fmt: skip


def _is_writing(member: Holder) -> bool:
    if member.layout not in ("auto", "stored") or not member.address.is_started_by_host:
        return False
    with suppress(DflashError):  # what is wrong with it others find out
        if member.local is not None:
            return member.local.counters().get("panel_shards_left", 0) > 0
        if member.session is not None:
            return member.session.ask_stats(timeout_s=ASK_S).get("panel_shards_left", 0) > 0
    return False


def _bytes_of(shards: Iterable[HeldShard]) -> int:
    """Returns the bytes of all experts of some shards; what several hold counts once."""
    sizes = {
        (one.layer.index, one.weight_dtype, expert): one.layer.ffn.resident_bytes(one.weight_dtype)
        for one in shards
        for expert in one.experts
    }
    return sum(sizes.values())


def by_layer(shards: Sequence[HeldShard]) -> list[tuple[HeldShard, tuple[int, ...]]]:
    """Returns for each layer, format and class one of the shards, and the experts of all of them,
    ascending.
    """
    first: dict[tuple[int, str, str], HeldShard] = {}
    experts: dict[tuple[int, str, str], set[int]] = {}
    for one in shards:
        key = (one.layer.index, one.weight_dtype, one.numerics)
        first.setdefault(key, one)
        experts.setdefault(key, set()).update(one.experts)
    return [(first[key], tuple(sorted(found))) for key, found in experts.items()]
