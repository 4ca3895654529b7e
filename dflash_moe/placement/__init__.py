"""Placement says who holds which experts: here are shards and the policies that place them. It is
pure arithmetic over the sizes of layers and a topology.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dflash_moe.placement.plan import plan_placement
from dflash_moe.placement.shards import PlacedLayer, Placement, Shard
from dflash_moe.topology import HOST

__all__ = ["HOST", "PlacedLayer", "Placement", "Shard", "plan_placement"]
