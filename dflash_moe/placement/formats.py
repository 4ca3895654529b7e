"""Checks that every holder of a placement has kernels for the formats of its weights, before any
worker starts.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_moe.errors import UnsupportedError
from dflash_moe.model.formats.weight_formats import mapped_only, not_on_cards
from dflash_moe.placement.shards import PlacedLayer, Placement, Shard
from dflash_moe.topology import HOST, Topology


def check_formats(layers: Sequence[PlacedLayer], placement: Placement, topology: Topology) -> dict[str, str]:
    """Returns the holders that must compute from the mapped checkpoint, each with a format that
    makes it so.

    Raises UnsupportedError naming holder, layer and format where a card has no kernels for a
    format, and where a worker that must pack has weights that cannot be packed.
    """
    found: dict[str, str] = {}
    for layer, shards in zip(layers, placement.layers, strict=True):
        for shard in shards:
            for holder in shard.holders:
                format_name = _unpacked_format(layer, shard, holder, topology)
                if format_name:
                    found.setdefault(holder, format_name)
    return found


def _unpacked_format(layer: PlacedLayer, shard: Shard, holder: str, topology: Topology) -> str:
    kept = layer.resident_dtype(shard.weights)
    unpacked = mapped_only(kept)
    if holder == HOST:
        return unpacked[0] if unpacked else ""
    worker = topology.worker(holder)
    where = f"{topology.source}:{worker.line}: worker {worker.name}"
    has = f"layer {layer.index} ({layer.name}) has weights in"
    if worker.backend != "cpu" and not_on_cards(kept):
        raise UnsupportedError(
            f"{where} has backend {worker.backend}, and {has} {not_on_cards(kept)[0]}, for which cards have no kernels; "
            "give its experts to workers with backend: cpu or to the host"
        )
    if unpacked and worker.weights_layout in ("packed", "stored"):
        raise UnsupportedError(
            f"{where} has weights_layout: {worker.weights_layout}, and {has} {unpacked[0]}, which no kernel reads; "
            "use weights_layout: auto or mapped, under which every call dequantises what it needs"
        )
    if unpacked and worker.weights != "auto":
        raise UnsupportedError(
            f"{where} has weights: {worker.weights}, which are packed, and {has} {unpacked[0]}, which no kernel reads; use "
            "weights: auto"
        )
    return unpacked[0] if unpacked else ""
