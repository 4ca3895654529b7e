"""The fields of requests: which there are, which are honoured, which would change the answer and
are refused, and what becomes of the others.

The names are those of OpenAI's, Anthropic's and vLLM's APIs and of llama-server, as of the end of
2026. What is only about the caller (billing, tracing, caching) is ignored, and said to be.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any

from dflash_moe.server.front import sampling_fields, structured_fields
from dflash_moe.server.front.api_error import ApiError, brief

_SAMPLING = {*sampling_fields.PLAIN, *sampling_fields.OWN}
_BOTH = {*_SAMPLING, *structured_fields.NAMES, "model", "stream", "stream_options"}
# APIs with one choice, whose names for some fields are their own.
_ONE = {*_SAMPLING, "model", "stream", "chat_template_kwargs", "tools", "tool_choice"} - {
    "n", "stop", "logprobs", "top_logprobs", "max_tokens", "max_completion_tokens",
}  # fmt: skip
_MESSAGES = {"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs"}
_RESPONSES = {"input", "instructions", "max_output_tokens", "parallel_tool_calls", "reasoning", "text", "include"}
# The fields that each route honours.
HONOURED: dict[str, set[str]] = {
    "chat": {
        *_BOTH, "messages", "chat_template_kwargs", "reasoning_effort", "tools", "tool_choice", "parallel_tool_calls",
        "include_reasoning",
    },
    "completions": {*_BOTH, "prompt", "echo", "add_special_tokens"} - {"top_logprobs", "max_completion_tokens"},
    "messages": {*_ONE, *_MESSAGES, "max_tokens", "stop_sequences"},
    "count_tokens": _MESSAGES,
    "responses": {*_ONE, *_RESPONSES, "top_logprobs"},
    "tokenize": {
        "model", "prompt", "content", "messages", "tools", "tool_choice", "add_special_tokens", "add_special",
        "chat_template_kwargs", "reasoning_effort",
    },
    "detokenize": {"model", "tokens"},
}  # fmt: skip
# Fields that would change an answer and are not honoured, with the values that change nothing. None
# never does.
REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "text_format": (), "guided_whitespace_pattern": (), "min_tokens": (0,),
    "previous_response_id": (), "conversation": (), "suffix": ("",),
    "prompt_logprobs": (0, False), "prompt_embeds": (), "use_beam_search": (False,), "length_penalty": (1, 1.0),
    "early_stopping": (False,), "bad_words": ([],), "allowed_token_ids": ([],), "logits_processors": ([],),
    "truncate_prompt_tokens": (), "truncation": ("disabled",), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "include_stop_str_in_output": (False,), "detokenize": (True,),
    "chat_template": (), "continue_final_message": (False,), "add_generation_prompt": (True,), "documents": ([],),
    "mm_processor_kwargs": ({},), "media_io_kwargs": ({},), "audio": (), "modalities": (["text"],), "web_search_options": (),
    "return_tokens_as_token_ids": (False,), "return_token_ids": (False,), "repetition_detection": (), "kv_transfer_params": (),
    "thinking": (), "thinking_token_budget": (), "system": (), "input": (), "instructions": (), "stop_sequences": ([],),
    "n_predict": (-1,), "n_keep": (0, -1), "n_indent": (0,), "n_probs": (0,), "min_keep": (0,), "repeat_penalty": (1, 1.0),
    "repeat_last_n": (0, -1, 64), "typical_p": (1, 1.0), "tfs_z": (1, 1.0), "top_n_sigma": (-1, -1.0),
    "dynatemp_range": (0, 0.0),
    "dynatemp_exponent": (1, 1.0), "dry_multiplier": (0, 0.0), "xtc_probability": (0, 0.0), "mirostat": (0,), "samplers": (),
    "lora": ([],), "image_data": ([],), "input_prefix": ("",), "input_suffix": ("",), "return_progress": (False,),
    "post_sampling_probs": (False,), "logits_bias": (), "with_pieces": (False,), "parse_special": (True,),
    "return_token_strs": (False,), "t_max_predict_ms": (0, -1), "structural_tag": (), "verbosity": ("medium",), "best_of": (1,),
    "background": (False,), "mcp_servers": ([],), "output_format": (), "text": ({"format": {"type": "text"}},),
}  # fmt: skip
# The routes that write tokens. What one of them honours would change the answer of another one too,
# and is refused there unless it has a harmless value; but for what tells only how an answer is
# written, and for what clients of all APIs send along.
_ANSWERING = ("chat", "completions", "messages", "responses")
_HARMLESS = {"n": (1,), "stop": ([],), "logprobs": (False,), "top_logprobs": (0,), "echo": (False,)}
_ALONG = {
    "stream_options", "include", "include_reasoning", "reasoning", "output_config", "parallel_tool_calls",
    "chat_template_kwargs", "add_special_tokens",
}  # fmt: skip
_OF_OTHERS = {name: _HARMLESS.get(name, ()) for route in _ANSWERING for name in HONOURED[route] - _ALONG}
# What is ignored within a field that is honoured.
_IGNORED_WITHIN = {"thinking": ("budget_tokens", "display"), "reasoning": ("summary", "generate_summary")}
# Known fields that change no token: they are about the caller, or tune what another one refuses.
IGNORED = {
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "safety_identifier", "prediction", "moderation", "request_id", "priority", "cache_salt",
    "vllm_xargs", "bootstrap_host", "include_reasoning", "add_reasoning", "cache_prompt", "id_slot", "timings_per_token",
    "stream_interval", "response_fields", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
    "xtc_threshold", "mirostat_tau", "mirostat_eta", "n_discard", "reasoning_format", "reasoning_in_content",
    "thinking_forced_open", "parse_tool_calls", "container", "context_management", "cache_control",
    "inference_geo", "speed", "fallbacks", "diagnostics", "user_profile_id", "workspace_id", "background_options",
    "include", "max_tool_calls", "penalize_nl", "logprob_token_ids",
    "guided_decoding_backend", "backend", "grammar_lazy", "grammar_triggers", "preserved_tokens", "betas",
}  # fmt: skip
_KNOWN = {*IGNORED, *REFUSED, *(name for names in HONOURED.values() for name in names)}
# How alike a name and a known one are that is taken for a slip: one letter of six, or two of nine.
NEAR = 0.8
# The header that names ignored fields is cut to this length, and so is what is compared.
_MAX_HEADER = 1024
_MAX_COMPARED = 64
# A body with more fields is no request.
MAX_FIELDS = 200
# So many unknown names are compared with all known ones, which takes a millisecond each. Whoever
# sends more has made no slip.
_MAX_UNKNOWN = 8
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.\-]")
IGNORED_HEADER = "x-dflash-ignored"


class Body(dict[str, Any]):
    """The fields of a request. `size` is how many bytes it had."""

    def __init__(self, fields: Mapping[str, Any], size: int) -> None:
        super().__init__(fields)
        self.size = size


def parsed(raw: bytes) -> Body:
    """Returns the body of a request. Raises ApiError for what is no JSON object."""
    try:
        found = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is no UTF-8 (byte {error.start}); send JSON in UTF-8") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise ApiError(400, f"the body is {brief(found)[:80]}, expected a JSON object")
    return Body(found, len(raw))


def check(body: Mapping[str, Any], route: str) -> list[str]:
    """Returns the names of the fields that are ignored. Raises ApiError for a field that would
    change the answer and is not honoured, and for an unknown one that is nearly a known name.
    """
    if len(body) > MAX_FIELDS:
        raise ApiError(400, f"the body has {len(body)} fields; allowed: at most {MAX_FIELDS}")
    refused = {**_OF_OTHERS, **REFUSED} if route in _ANSWERING else REFUSED
    ignored = []
    num_unknown = 0
    for name, value in body.items():
        if value is None:
            continue
        if name in HONOURED[route]:
            if isinstance(value, dict):
                ignored += [f"{name}.{one}" for one in _IGNORED_WITHIN.get(name, ()) if value.get(one) is not None]
            continue
        if name in refused:
            if not any(type(value) is type(one) and value == one for one in refused[name]):
                raise ApiError(
                    400, f"{name}: this route does not honour it, and without it the answer would be another; leave it out",
                    param=name, code="unsupported_parameter",
                )  # fmt: skip
        elif name not in _KNOWN:
            num_unknown += 1
            if num_unknown <= _MAX_UNKNOWN and (near := _near(name)):
                text = f"{brief(name)} is no field of a request; did you mean {near}?"
                raise ApiError(400, text, param=name[:_MAX_COMPARED])
        ignored.append(name)
    return ignored


def _near(name: str) -> str | None:
    if len(name) > _MAX_COMPARED:
        return None
    found = difflib.get_close_matches(name.lower(), _KNOWN, n=1, cutoff=NEAR)
    return found[0] if found else None


def named(ignored: list[str]) -> str:
    """Returns names as a header has them."""
    return ", ".join(_NOT_PLAIN.sub("?", name[:_MAX_COMPARED]) for name in ignored)[:_MAX_HEADER]


def flag(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Returns a field that is true or false. Raises ApiError for anything else."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ApiError(400, f"{name}={brief(value)} is not allowed; allowed: true or false", param=name)
    return value
