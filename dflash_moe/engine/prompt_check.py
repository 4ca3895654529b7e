"""What a submission must be before an engine takes it: token ids that the model has, few enough of
them, and parameters that can be computed.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from dflash_moe.engine.forward import Forward
from dflash_moe.engine.sampling_params import SamplingParams
from dflash_moe.errors import ConfigError, shown


def checked_prompt(forward: Forward, name: str, token_ids: Iterable[Any], params: SamplingParams, max_queue: int) -> list[int]:
    """Returns the ids of a prompt as integers. Raises ConfigError, which begins with `name`, for
    what an engine over `forward` with room for `max_queue` waiting requests can never compute.
    """
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"{name}: params {shown(params)} are not allowed; pass a SamplingParams")
    if isinstance(token_ids, str | bytes) or not hasattr(token_ids, "__iter__"):
        raise ConfigError(f"{name}: the prompt {shown(token_ids)} is not allowed; allowed: a sequence of token ids")
    vocab_size = forward.vocab_size
    prompt = [_token_id(name, token, vocab_size) for token in token_ids]
    if not prompt:
        raise ConfigError(f"{name}: the prompt has no tokens; at least 1 is needed")
    if params.n > max_queue:
        raise ConfigError(f"{name}: n={params.n} is not allowed; allowed: at most {max_queue} (engine.max_queue)")
    try:
        params.check_ids(vocab_size)
        forward.check_length(len(prompt) + params.max_tokens)
    except ConfigError as error:
        text = f"{name}: prompt of {len(prompt)} tokens and max_tokens {params.max_tokens}: {error}"
        raise error.reworded(text) from None
    return prompt


def _token_id(name: str, token: Any, vocab_size: int) -> int:
    try:
        found = -1 if isinstance(token, bool) else operator.index(token)
    except Exception:  # noqa: BLE001 - any object may stand there, and a tensor raises errors of its own
        found = -1
    if not 0 <= found < vocab_size:
        raise ConfigError(f"{name}: token id {shown(token)} is not allowed; the model has the ids 0..{vocab_size - 1}")
    return found
