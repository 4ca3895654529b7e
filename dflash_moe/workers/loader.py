"""Loads one shard as a host asks for it, from the worker's own checkpoint. Only the bytes of the
shard are touched, and progress is reported.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_moe import _core
from dflash_moe.errors import CheckpointError, ProtocolError
from dflash_moe.model.checkpoint import Checkpoint, shard_fingerprint
from dflash_moe.model.ffn import FfnSpec
from dflash_moe.protocol.messages import LoadShard, expand_experts
from dflash_moe.store.expert_store import ExpertStore
from dflash_moe.store.scrub import HeldWeights

# A report is called after each expert with the number of the shard's experts loaded so far.
Report = Callable[[int], None]


def load_shard(
    store: ExpertStore, checkpoint: Checkpoint, model_fingerprint: str, message: LoadShard, report: Report,
    is_given_up: Callable[[], bool],
) -> _core.ResidentShard:  # fmt: skip
    """Loads the shard that `message` asks for and returns its loan, which the caller gives back.
    `is_given_up` ends the wait for what other hosts load before.

    Errors: ProtocolError for a bad FfnSpec or bad ids; CheckpointError naming tensor and file, or
    both fingerprints where the host reads another checkpoint; those of `ExpertStore.load`.
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
    return store.load(
        checkpoint,
        ffn,
        experts,
        name=f"{message.name}, shard {message.shard}",
        weight_dtype=message.weight_dtype,
        weights_fingerprint=message.weights_fingerprint,
        numerics=message.numerics,
        report=report,
        is_given_up=is_given_up,
    )


def held_weights(
    message: LoadShard, loan: _core.ResidentShard, checkpoint: Checkpoint, tell: Callable[[int, int, int, str], None]
) -> HeldWeights:
    """Returns what loading an expert of this shard again needs, and whom to tell of it."""
    return HeldWeights(
        layer=message.layer,
        shard=message.shard,
        name=f"{message.name}, shard {message.shard}",
        ffn=FfnSpec.from_wire(message.ffn),
        experts=expand_experts(message.expert_ranges),
        weights_fingerprint=message.weights_fingerprint,
        loan=loan,
        checkpoint=checkpoint,
        tell=tell,
    )
