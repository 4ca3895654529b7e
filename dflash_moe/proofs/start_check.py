"""Whether a runtime could start, asked before its host loads or computes anything.

Workers are started or reached, and say what they can do with their cards. Then they are let go.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_moe.config import resolve_settings
from dflash_moe.experts.device_tensors import open_host_device
from dflash_moe.holders.placed_experts import PlacedExperts, slices_of
from dflash_moe.protocol.devices import DeviceChoice
from dflash_moe.protocol.identity import choose_numerics
from dflash_moe.topology import HOST

if TYPE_CHECKING:
    from dflash_moe.model.spec import ModelSpec
    from dflash_moe.topology import Topology


def check_start(topology: Topology, spec: ModelSpec, **overrides: Any) -> None:
    """Refuses what `ExpertRuntime.start` with these arguments would refuse before it loads weights,
    with the same errors, and leaves nothing behind.
    """
    settings = resolve_settings(topology.stated_settings, **overrides)
    slices_of(settings)
    placed = PlacedExperts(spec, topology, settings)
    try:
        host = DeviceChoice.of_host(topology.host)
        if not host.is_processor:
            open_host_device(host)
        placed.greet()
        if host.is_processor and topology.host.activations is not None:
            choose_numerics(placed.topology.numerics_of(HOST), placed.fleet.host_pool.isa, name=HOST)
    finally:
        placed.fleet.close()
