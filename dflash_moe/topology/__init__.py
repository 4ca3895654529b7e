"""The topology file says what runs where. Here are its parser, whose errors name file and line, and
the dataclasses that everything else reads.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dflash_moe.config import MemoryBudget
from dflash_moe.errors import TopologyError
from dflash_moe.topology.addresses import Address, parse_address
from dflash_moe.topology.spec import (
    HOST,
    Emulate,
    ExpertSelection,
    HostSpec,
    PlacementSpec,
    WorkerSpec,
)
from dflash_moe.topology.topology import Topology

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
