"""What a submission must be before an engine takes it: token ids that the model has, few enough of
them, and parameters that can be computed. The longest request is the least of what the model, the
KV cache and the settings allow.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dflash_moe.engine.engine_settings import EngineSettings
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.errors import ConfigError, shown
from dflash_moe.forward.forward import Forward
from dflash_moe.operators.attention_probe import max_positions

log = logging.getLogger(__name__)


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


def checked_prompt(
    forward: Forward, name: str, token_ids: Iterable[Any], params: SamplingParams, settings: EngineSettings
) -> list[int]:
    """Returns the ids of a prompt as integers. Raises ConfigError, which begins with `name`, for
    what an engine over `forward` with these settings can never compute.
    """
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"{name}: params {shown(params)} are not allowed; pass a SamplingParams")
    if isinstance(token_ids, str | bytes) or not hasattr(token_ids, "__iter__"):
        raise ConfigError(f"{name}: the prompt {shown(token_ids)} is not allowed; allowed: a sequence of token ids")
    vocab_size = forward.vocab_size
    prompt = [_token_id(name, token, vocab_size) for token in token_ids]
    if not prompt:
        raise ConfigError(f"{name}: the prompt has no tokens; at least 1 is needed")
    if params.n > settings.max_queue:
        raise ConfigError(f"{name}: n={params.n} is not allowed; allowed: at most {settings.max_queue} (engine.max_queue)")
    try:
        params.check_ids(vocab_size)
        refuse_context(settings.max_context, len(prompt) + params.max_tokens)
        forward.check_length(len(prompt) + params.max_tokens)
    except ConfigError as error:
        text = f"{name}: prompt of {len(prompt)} tokens and max_tokens {params.max_tokens}: {error}"
        raise error.reworded(text) from None
    return prompt


class LengthWarning:
    """Warns once where a request's tokens depend on the length that it may reach. Any thread."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._is_said = False

    def look(self, name: str, num_prompt: int, max_tokens: int) -> None:
        """Looks at a request that is about to be submitted."""
        if not self._is_said and not self._forward.is_rotated_alike(num_prompt, num_prompt + max_tokens):
            self._is_said = True
            log.warning(
                "%s: its tokens depend on max_tokens: the model rotates by another table in a sequence of up to %d tokens "
                "(prompt and max_tokens) than in a prompt of %d, and one table holds for the whole sequence; give requests "
                "that are compared the same sum of both (docs/howto/python_engine.md)",
                name, num_prompt + max_tokens, num_prompt,
            )  # fmt: skip


def _token_id(name: str, token: Any, vocab_size: int) -> int:
    try:
        found = -1 if isinstance(token, bool) else operator.index(token)
    except Exception:  # noqa: BLE001 - any object may stand there, and a tensor raises errors of its own
        found = -1
    if not 0 <= found < vocab_size:
        raise ConfigError(f"{name}: token id {shown(token)} is not allowed; the model has the ids 0..{vocab_size - 1}")
    return found


def refuse_context(max_context: int | None, max_tokens: int) -> None:
    """Raises ConfigError where a request of `max_tokens` tokens is longer than the setting
    allows.
    """
    if max_context is not None and max_tokens > max_context:
        raise ConfigError(
            f"a sequence of {max_tokens} tokens was asked for, its prompt included; --max-context (engine.max_context) allows "
            f"{max_context}: raise it, or shorten the prompt or max_tokens"
        )
