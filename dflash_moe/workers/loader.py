"""Loads one shard's experts from the worker's own checkpoint: only their bytes are touched, and
progress is reported.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_moe import _core
from dflash_moe.errors import CheckpointError, ProtocolError
from dflash_moe.model.checkpoint import Checkpoint, shard_fingerprint
from dflash_moe.model.expert_loading import load_experts
from dflash_moe.model.ffn import FfnSpec
from dflash_moe.protocol.messages import LoadShard, expand_experts

Report = Callable[[int], None]  # gets the shard's experts loaded so far, after each


def load_shard(
    worker: _core.Worker, checkpoint: Checkpoint, model_fingerprint: str, message: LoadShard, report: Report, *, threads: int
) -> None:
    """Defines and fills one shard. Errors: ProtocolError (bad FfnSpec or ids), CheckpointError
    naming tensor and file.
    """
    ffn = FfnSpec.from_wire(message.ffn)
    experts = expand_experts(message.expert_ranges)
    if not experts:
        raise ProtocolError(f"message LoadShard: field expert_ranges: {message.name} shard {message.shard} has no experts")
    found = shard_fingerprint(model_fingerprint, message.name, experts, message.weight_dtype, message.numerics)
    if found != message.weights_fingerprint:
        raise CheckpointError(
            f"weights_fingerprint of {message.name} shard {message.shard}: the host has {message.weights_fingerprint:#018x}, "
            f"this worker {found:#018x}; both must read the same checkpoint"
        )
    layer, shard = message.layer, message.shard
    worker.define_shard(
        layer, shard, ffn.kernel_spec(), len(experts), message.weight_dtype, message.weights_fingerprint, message.numerics
    )
    load_experts(worker, checkpoint, ffn, experts, layer=layer, shard=shard, threads=threads, report=report)
