"""The topology file says what runs where. Here are its parser, whose errors name file and line, and
the dataclasses that everything else reads.

The public names load on first use: a worker needs addresses and the names of numerics classes, and
no parser of YAML.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_moe.config import MemoryBudget
    from dflash_moe.errors import TopologyError
    from dflash_moe.topology.addresses import Address, parse_address
    from dflash_moe.topology.spec import HOST, Emulate, ExpertSelection, HostSpec, PlacementSpec, WorkerSpec
    from dflash_moe.topology.topology import Topology

_LAZY = {
    "HOST": "dflash_moe.topology.spec",
    "Address": "dflash_moe.topology.addresses",
    "Emulate": "dflash_moe.topology.spec",
    "ExpertSelection": "dflash_moe.topology.spec",
    "HostSpec": "dflash_moe.topology.spec",
    "MemoryBudget": "dflash_moe.config",
    "PlacementSpec": "dflash_moe.topology.spec",
    "Topology": "dflash_moe.topology.topology",
    "TopologyError": "dflash_moe.errors",
    "WorkerSpec": "dflash_moe.topology.spec",
    "parse_address": "dflash_moe.topology.addresses",
}

__all__ = [
    "HOST",
    "Address",
    "Emulate",
    "ExpertSelection",
    "HostSpec",
    "MemoryBudget",
    "PlacementSpec",
    "Topology",
    "TopologyError",
    "WorkerSpec",
    "parse_address",
]


def __getattr__(name: str) -> Any:
    import importlib

    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
