"""What travels between the engine process and its front, over one inherited pair of sockets: frames
of a u32 little-endian length and a msgpack list whose first entry is the kind.

    front to engine   [SUBMIT, id, token_ids, params, cache_salt, grammar]
                      [CANCEL, id, choice or None]     [ASK, id]     [MEASURE, id]     [UP]
    engine to front   [BEGIN, settings]          [MODEL, facts]     [STATE, state]   [END, within_s]
                      [REFUSED, id, error]       [DELTAS, [delta, ...]]
                      [ANSWER, id, is_alive, unready_reason]        [MEASURED, id, snapshot]

`id` is the front's number of a request. Token ids are int32, little endian. A grammar is in
llguidance's own form, and empty for none. Neither side believes the other: a length is compared
with a bound before anything is read, and whoever gets what it did not expect gives the connection
up.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgpack

from dflash_moe.engine.request import TokenDelta
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.errors import ConfigError, DflashError, ProtocolError, QueueFull, printable

SUBMIT, CANCEL, ASK, MEASURE, UP = "submit", "cancel", "ask", "measure", "up"
BEGIN, MODEL, STATE, END = "begin", "model", "state", "end"
REFUSED, DELTAS, ANSWER, MEASURED = "refused", "deltas", "answer", "measured"

# What the server does with requests now.
LOADING, READY, DRAINING = "loading", "ready", "draining"
# The codes of errors that are the server's own (docs/errors.md has the others).
TOO_LONG, UNREADY = "context_length_exceeded", "unready"

LENGTH_BYTES = 4
# A prompt of 16 million ids, more than any model has positions.
MAX_REQUEST_BYTES = 64 << 20
# The largest frame to the front has the tokenizer. That of 262,144 tokens has 33 MB.
MAX_REPLY_BYTES = 256 << 20

# What becomes of a grammar of 64 KiB, or of the schemas of tools, with all that stands around them.
MAX_GRAMMAR_CHARACTERS = 1 << 18

# Fields of SamplingParams that the engine needs; stop strings are looked for in the front.
PARAMS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "n", "stop_token_ids", "ignore_eos", "logprobs",
)  # fmt: skip


def packed(*message: Any) -> bytes:
    """Returns a whole frame."""
    body: bytes = msgpack.packb(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class FrameBuffer:
    """Cuts what comes from a socket into frames."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, received: bytes) -> list[list[Any]]:
        """Returns the messages that are whole with these bytes. Raises ProtocolError for a length
        beyond the bound and for what is no message.
        """
        self._buffer += received
        found, at = [], 0
        while len(self._buffer) - at >= LENGTH_BYTES:
            size = int.from_bytes(self._buffer[at : at + LENGTH_BYTES], "little")
            if not 0 < size <= self._max_bytes:
                raise ProtocolError(f"frame between engine and front: length {size} is outside 1..{self._max_bytes}")
            end = at + LENGTH_BYTES + size
            if len(self._buffer) < end:
                break
            found.append(_message(bytes(self._buffer[at + LENGTH_BYTES : end])))
            at = end
        del self._buffer[:at]
        return found


def _message(body: bytes) -> list[Any]:
    try:
        found = msgpack.unpackb(body)
    except Exception as error:  # noqa: BLE001 - the library raises a dozen kinds for bytes that are no message
        raise ProtocolError(f"frame between engine and front: no msgpack ({type(error).__name__})") from None
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise ProtocolError("frame between engine and front: no list that begins with its kind")
    return found


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Returns ids as they travel."""
    return _little_endian(array("i", token_ids)).tobytes()


def token_ids_of(content: object) -> list[int]:
    """Returns the ids of `token_bytes`. Raises ProtocolError for anything else."""
    if not isinstance(content, bytes) or len(content) % 4:
        raise ProtocolError("frame between engine and front: token ids are no whole int32 values")
    return _little_endian(array("i", content)).tolist()


def _little_endian(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def params_fields(params: SamplingParams) -> dict[str, Any]:
    """Returns what the engine needs of parameters, in types that travel."""
    found = {name: getattr(params, name) for name in PARAMS}
    found["logit_bias"] = [[token_id, bias] for token_id, bias in params.logit_bias.items()]
    found["stop_token_ids"] = list(params.stop_token_ids)
    return found


def params_of(fields: object) -> dict[str, Any]:
    """Returns the keyword arguments of SamplingParams that `params_fields` was made of, values
    unchecked. Raises ProtocolError for other names or types.
    """
    if not isinstance(fields, dict) or fields.keys() != set(PARAMS):
        raise ProtocolError("frame between engine and front: the parameters of a request are not those of this version")
    try:
        return {**fields, "logit_bias": dict(fields["logit_bias"])}
    except (TypeError, ValueError):
        raise ProtocolError("frame between engine and front: logit_bias is no list of pairs") from None


def delta_fields(request_id: int, delta: TokenDelta) -> list[Any]:
    """Returns a delta as it travels. What a plain one does not have is left out at its end."""
    found: list[Any] = [request_id, delta.choice, list(delta.token_ids), delta.time_s]
    if delta.logprobs is None and delta.finish_reason is None:
        return found
    logprobs = None if delta.logprobs is None else [[one.token_id, one.logprob, one.rank, one.best] for one in delta.logprobs]
    error = None if delta.error is None else error_fields(delta.error)
    return [*found, logprobs, delta.finish_reason, error, delta.num_cached_tokens, delta.queue_s]


def error_fields(error: DflashError) -> dict[str, Any]:
    """Returns an error as it travels."""
    found: dict[str, Any] = {"code": error.code or "internal", "message": printable(str(error))}
    if isinstance(error, QueueFull):
        found["retry_after_s"] = error.retry_after_s
    elif isinstance(error, ConfigError):
        found["code"] = "invalid_argument"
    return found
