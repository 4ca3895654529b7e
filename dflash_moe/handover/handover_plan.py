"""The plan that a supervisor hands over: what a program has to know of workers, layers, shards and
tensors to call them (protocol/handover.py).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_moe.errors import ConfigError
from dflash_moe.experts.auto import cost_classes
from dflash_moe.model.ffn import ACTIVATIONS, GATES
from dflash_moe.protocol.handover import HandoverMessage, PlanHead, PlannedLayer, PlannedShard, PlannedTensor, PlannedWorker
from dflash_moe.protocol.messages import compress_experts
from dflash_moe.topology import HOST

if TYPE_CHECKING:
    from dflash_moe import _core
    from dflash_moe.holders.placed_experts import PlacedExperts
    from dflash_moe.model.spec import LayerSpec, ModelSpec
    from dflash_moe.topology import Topology

NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class HandoverModel:
    """A model whose experts are handed over: its layers, llama.cpp's name of its architecture, and
    the tensors that the workers stand in for.
    """

    spec: ModelSpec
    architecture: str
    tensors: tuple[PlannedTensor, ...]


def check_topology(topology: Topology) -> None:
    """Raises ConfigError for a topology of which a part would have to be in the process of the
    program: experts kept at the host, holders at `loopback`, and links that are emulated.
    """
    where = f"{topology.source}:{topology.host.line or 1}"
    budget = topology.host.experts_memory
    if budget.num_bytes or budget.fraction:
        raise ConfigError(
            f"{where}: host.experts keeps experts in the host's process, which is another program here; remove it"
        )
    for worker in topology.workers:
        where = f"{topology.source}:{worker.line or 1}: worker {worker.name}"
        if worker.parsed_address.kind == "loopback":
            raise ConfigError(f"{where}: address loopback is the host's process, which is another program here; remove it")
        link = worker.emulate
        if link is not None and (link.delay_ms or link.jitter_ms or link.mbit_s):
            raise ConfigError(
                f"{where}: delay, jitter and bandwidth are emulated in a host of ours only; remove them from emulate"
            )


def check_holders(placed: PlacedExperts) -> None:
    """Raises ConfigError where the placement leaves experts to the host, or gives a shard several
    holders, of which the program's library knows nothing.
    """
    if HOST in placed.held:
        raise ConfigError(f"{placed.topology.source}: the placement keeps experts at the host; place all of them on workers")
    if placed.topology.placement.replicas > 1:
        raise ConfigError(
            f"{placed.topology.source}: placement.replicas is {placed.topology.placement.replicas}; programs that call the "
            "workers by themselves take one holder per shard: write replicas: 1"
        )


def plan_messages(model: HandoverModel, placed: PlacedExperts, slots: dict[str, _core.SlotPlan]) -> list[HandoverMessage]:
    """Returns the messages of the plan in their order. Workers are numbered in the order of the
    fleet.
    """
    members = list(placed.fleet.members.values())
    layers = placed.fleet.shards_by_layer(placed.held, {member.name: index for index, member in enumerate(members)})
    settings = placed.settings
    head = PlanHead(
        num_workers=len(members), num_layers=len(layers), num_shards=sum(len(shards) for _, shards in layers),
        num_tensors=len(model.tensors), architecture=model.architecture, fingerprint=placed.spec.fingerprint,
        spin_ns=placed.threads.spin_ns, call_timeout_ns=round(settings.call_timeout_s * NS),
        stall_timeout_ns=round(settings.stall_timeout_s * NS),
    )  # fmt: skip
    request_dtype, reply_dtype = placed.wire_dtypes
    workers = [
        PlannedWorker(
            name=member.name, slice_tokens=placed.slices.slice_tokens, window=placed.window(slots[member.name]),
            is_measured=placed.slices.is_measured, request_dtype=request_dtype, reply_dtype=reply_dtype,
        )
        for member in members
    ]  # fmt: skip
    classes = cost_classes(placed.spec.layers)
    shards = [
        PlannedShard(
            layer=layer.index, shard=shard, worker=worker, weights_fingerprint=fingerprint,
            expert_ranges=tuple(compress_experts(experts)),
        )
        for layer, found in layers
        for shard, worker, fingerprint, experts in found
    ]  # fmt: skip
    planned = [_planned_layer(layer, classes[layer.index]) for layer, _ in layers]
    return [head, *workers, *planned, *shards, *model.tensors]


def _planned_layer(layer: LayerSpec, cost_class: int) -> PlannedLayer:
    ffn = layer.ffn
    return PlannedLayer(
        layer=layer.index, name=layer.name, in_size=ffn.in_size, intermediate_size=ffn.intermediate_size,
        out_size=ffn.out_size, num_experts=layer.num_experts, top_k=layer.top_k, cost_class=cost_class,
        activation=ACTIVATIONS.index(ffn.activation), gate=GATES.index(ffn.gate), alpha=ffn.alpha, up_offset=ffn.up_offset,
        gate_max=_limit(ffn.gate_max), up_limit=_limit(ffn.up_limit), has_gate_up_bias=ffn.has_gate_up_bias,
        has_down_bias=ffn.has_down_bias,
    )  # fmt: skip


def _limit(value: float) -> float:
    return 0.0 if math.isinf(value) else value
