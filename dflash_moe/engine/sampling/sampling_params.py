"""`SamplingParams` says how the tokens of a request are chosen and when the request ends.

The values are checked where they are given, so that nothing behind them meets an absurd one. There
is no torch here: a server that only talks to an engine has none.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_moe.errors import ConfigError, shown

# At this temperature a difference of 100 between two logits changes their ratio by 1 %: everything
# that is not masked is equally likely.
MAX_TEMPERATURE = 1e4
MAX_BIAS_ENTRIES = 1024
MAX_STOPS = 16
# In characters of one stop string. The server holds back as much text while it may be the
# beginning of one.
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_CHOICES = 64
MAX_LOGPROBS = 20
MAX_SEED = (1 << 64) - 1
_MAX_INT32 = (1 << 31) - 1

# Comparisons with NaN are false, so that each of these tests refuses it.
_NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("0..10000, where 0 takes the most likely token", lambda value: 0 <= value <= MAX_TEMPERATURE),
    "top_p": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "min_p": ("at least 0 and below 1", lambda value: 0 <= value < 1),
    "presence_penalty": ("-2..2", lambda value: -2 <= value <= 2),
    "frequency_penalty": ("-2..2", lambda value: -2 <= value <= 2),
    "repetition_penalty": ("above 0 and at most 10", lambda value: 0 < value <= 10),
}
_INTEGERS: dict[str, tuple[int, int]] = {
    "max_tokens": (1, _MAX_INT32),
    "top_k": (0, _MAX_INT32),
    "n": (1, MAX_CHOICES),
    "seed": (0, MAX_SEED),
    "logprobs": (0, MAX_LOGPROBS),
}
_MAY_BE_NONE = {"seed", "logprobs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, the same for each of its `n` choices. Immutable.

    `max_tokens` bounds a choice's new tokens. Where a model's rotary tables depend on the length
    of a sequence (rope types `longrope` and `dynamic`), they are those of prompt and `max_tokens`
    together: beyond the original length the tokens depend on `max_tokens`. Penalties, `logit_bias`
    and `token_mask` change the logits, in this order; `temperature` divides them, and 0 takes the
    largest, the lowest id among equals. `min_p`, `top_k` (0: off) and `top_p` then exclude
    unlikely tokens. `presence_penalty` and `frequency_penalty` look at the new tokens,
    `repetition_penalty` at the prompt too. `seed` is drawn when the request is submitted where it
    is None.

    A choice ends at `max_tokens`, at a token of `stop_token_ids`, at a text of `stop`, and at the
    model's own last token but for `ignore_eos`. `logprobs` asks for log-probabilities of each token
    and of so many alternatives. `token_mask` is a `TokenMask` of `engine.sampling.token_masks`, or
    a function like its method.

    Errors: ConfigError, which names the field, its value and the allowed ones.
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    token_mask: Any = None

    def __post_init__(self) -> None:
        for name, (allowed, is_allowed) in _NUMBERS.items():
            self._set(name, _number(name, getattr(self, name), allowed, is_allowed))
        for name, (lowest, highest) in _INTEGERS.items():
            if getattr(self, name) is not None or name not in _MAY_BE_NONE:
                self._set(name, _integer(name, getattr(self, name), lowest, highest))
        self._set("logit_bias", _bias(self.logit_bias))
        self._set("stop", _stop_texts(self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise _refusal("ignore_eos", self.ignore_eos, "True or False")
        mask = self.token_mask
        if not (mask is None or callable(getattr(mask, "allowed", mask)) or callable(getattr(mask, "ask", None))):
            raise _refusal(
                "token_mask", self.token_mask, "None, a function of the token ids, an object with a method `allowed`"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def check_ids(self, vocab_size: int) -> None:
        """Checks the ids of `logit_bias` and `stop_token_ids` against the model's vocabulary.
        Errors: ConfigError, which names field and id.
        """
        for name, token_ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token_id in token_ids:
                if token_id >= vocab_size:
                    raise ConfigError(f"{name}: token id {token_id} is not allowed; allowed: 0..{vocab_size - 1}")


def _refusal(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name}={shown(value)} is not allowed; allowed: {allowed}")


def _number(name: str, value: object, allowed: str, is_allowed: Callable[[float], bool]) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _refusal(name, value, f"a number {allowed}")
    try:
        number = float(value)
    except OverflowError:  # an integer with more than 308 digits
        raise _refusal(name, value, allowed) from None
    if not is_allowed(number):
        raise _refusal(name, value, allowed)
    return number


def _integer(name: str, value: object, lowest: int, highest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not lowest <= int(value) <= highest:
        raise _refusal(name, value, f"an integer {lowest}..{highest}" + (", or None" if name in _MAY_BE_NONE else ""))
    return int(value)


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _refusal("logit_bias", value, "a mapping from token ids to numbers")
    if len(value) > MAX_BIAS_ENTRIES:
        raise ConfigError(f"logit_bias has {len(value)} entries; allowed: at most {MAX_BIAS_ENTRIES}")
    return {
        _integer("logit_bias: token id", token_id, 0, _MAX_INT32): _number(
            f"logit_bias[{shown(token_id)}]", bias, "-100..100", lambda number: -100 <= number <= 100
        )
        for token_id, bias in value.items()
    }


def _stop_texts(value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)):
        raise _refusal("stop", value, "a text or a list of texts")
    if len(texts) > MAX_STOPS:
        raise ConfigError(f"stop has {len(texts)} texts; allowed: at most {MAX_STOPS}")
    for text in texts:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise _refusal("stop", text, f"texts of 1..{MAX_STOP_LENGTH} characters")
    return tuple(texts)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple, set, frozenset, range)):
        raise _refusal(name, value, "a list of token ids")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise ConfigError(f"{name} has {len(value)} ids; allowed: at most {MAX_STOP_TOKEN_IDS}")
    return tuple(_integer(f"{name}: token id", token_id, 0, _MAX_INT32) for token_id in value)
