"""Makes `SamplingParams` of a request's body: fields under the names of vLLM, which are those of
OpenAI where that has them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dflash_moe.engine.sampling.sampling_params import MAX_BIAS_ENTRIES, SamplingParams
from dflash_moe.errors import ConfigError
from dflash_moe.server.front.api_error import ApiError, brief

# Fields that SamplingParams takes as they are.
PLAIN = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "n",
    "stop_token_ids", "ignore_eos",
)  # fmt: skip
OWN = ("max_tokens", "max_completion_tokens", "top_k", "stop", "logit_bias", "logprobs", "top_logprobs")
# An id of a token as JSON has the keys of a map.
_TOKEN_ID = re.compile(r"[0-9]{1,10}", re.ASCII)


def sampling_params(body: Mapping[str, Any], defaults: Mapping[str, Any], *, max_tokens: int, is_chat: bool) -> SamplingParams:
    """Returns the parameters of a request. `defaults` are those of absent fields, and `max_tokens`
    what has room. Raises ApiError naming the field that is wrong.
    """
    given: dict[str, Any] = {name: body[name] for name in PLAIN if body.get(name) is not None}
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is not None:
            max_tokens = body[name]
    # vLLM turns it off by -1.
    if body.get("top_k") is not None:
        given["top_k"] = 0 if body["top_k"] == -1 else body["top_k"]
    if body.get("stop") is not None:
        # OpenAI's client sends an empty list for none.
        given["stop"] = body["stop"]
    if body.get("logit_bias") is not None:
        given["logit_bias"] = _logit_bias(body["logit_bias"])
    wanted = (_chat_logprobs if is_chat else _completion_logprobs)(body)
    try:
        return SamplingParams(**{**defaults, **given, "max_tokens": max_tokens, "logprobs": wanted})
    except ConfigError as error:
        named = re.match(r"\w+", str(error))
        raise ApiError(400, str(error), param=named[0] if named else None, code=error.code) from None


def _logit_bias(value: object) -> dict[int, Any]:
    if isinstance(value, Mapping) and len(value) > MAX_BIAS_ENTRIES:
        text = f"logit_bias has {len(value)} entries; allowed: at most {MAX_BIAS_ENTRIES}"
        raise ApiError(400, text, param="logit_bias")
    if not isinstance(value, Mapping) or not all(_TOKEN_ID.fullmatch(str(key)) for key in value):
        raise ApiError(
            400, f"logit_bias={brief(value)} is not allowed; allowed: a map from token ids to numbers", param="logit_bias"
        )
    return {int(key): bias for key, bias in value.items()}


def _chat_logprobs(body: Mapping[str, Any]) -> int | None:
    asked, top = body.get("logprobs"), body.get("top_logprobs")
    if asked is not None and not isinstance(asked, bool):
        raise ApiError(400, f"logprobs={brief(asked)} is not allowed; allowed: true or false", param="logprobs")
    if not asked:
        if top:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    return 0 if top is None else top


def _completion_logprobs(body: Mapping[str, Any]) -> int | None:
    asked = body.get("logprobs")
    if isinstance(asked, bool):
        raise ApiError(400, f"logprobs={asked} is not allowed; allowed: a number of alternatives", param="logprobs")
    return asked
