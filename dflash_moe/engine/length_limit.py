"""The longest request that an engine takes: the least of what the model, the KV cache and the
settings allow.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_moe.operators.attention_probe import max_positions

if TYPE_CHECKING:
    from dflash_moe.engine.engine_settings import EngineSettings
    from dflash_moe.forward.forward import Forward


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """A request may have `num_tokens` tokens, its prompt included; `reason` says what sets the
    limit.
    """

    num_tokens: int
    reason: str


def length_limit(forward: Forward, settings: EngineSettings) -> LengthLimit:
    """Returns the limit of an engine over `forward` with these settings. A longer request is
    refused by `checked_prompt`.
    """
    room = forward.blocks.num_blocks * forward.blocks.block_tokens
    limits = [LengthLimit(room, "for which the KV cache has room (engine.kv_memory)")]
    if settings.max_context is not None:
        limits.append(LengthLimit(settings.max_context, "which --max-context allows (engine.max_context)"))
    if positions := max_positions(forward.model.config):
        limits.append(LengthLimit(positions, "for which the model has positions (max_position_embeddings)"))
    return min(limits, key=lambda limit: limit.num_tokens)
