"""`SamplingState` is what the sampler knows of one choice of a request: its parameters, its random
numbers, and how often each token was there, for the penalties.

Random numbers are counter-based. Sampling therefore consumes nothing: a row that is computed again,
in other company, after a preemption or as a draft's successor, draws the same number.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.forward.layer_loop import GREEDY, Draw

# It keeps these numbers apart from every other use of the hash.
_PERSON = b"dflash sampling"
_TRIPLE = struct.Struct("<QQQ")
_FIRST_CAPACITY = 64


def uniform_of(seed: int, choice: int, position: int) -> float:
    """Returns the random number in [0, 1) that belongs to a token: `position` is the number of
    tokens before it, prompt included, and `seed` has 64 bits.

    It is (h >> 11) * 2^-53. h is BLAKE2b with 8 bytes of digest and the personal string "dflash
    sampling", over seed, choice and position as little-endian integers of 64 bits; the digest is
    read as a little-endian integer.
    """
    digest = blake2b(_TRIPLE.pack(seed, choice, position), digest_size=8, person=_PERSON).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class SamplingState:
    """The state of one choice. Owned by the engine thread.

    Only `advance` changes it, which is called when a step is committed. A step that fails or whose
    drafts are rejected leaves nothing to restore.
    """

    __slots__ = ("_counts", "_plain", "bias", "choice", "has_bias", "has_penalties", "params", "seed")

    def __init__(self, params: SamplingParams, *, seed: int, choice: int = 0, prompt_ids: Sequence[int] = ()) -> None:
        self.params, self.seed, self.choice = params, seed, choice
        self.has_bias = bool(params.logit_bias)
        # The biased ids, int64, and their biases, float64, both [num_entries].
        self.bias = (
            np.array(list(params.logit_bias), np.int64),
            np.array(list(params.logit_bias.values()), np.float64),
        )
        looks_at_prompt = params.repetition_penalty != 1.0
        self.has_penalties = looks_at_prompt or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._counts = _TokenCounts(prompt_ids if looks_at_prompt else ())
        is_plain = not (self.has_bias or self.has_penalties or params.token_mask is not None or params.logprobs is not None)
        # The first fields of `draw`, None where logits are changed before, or asked for.
        self._plain = (params.temperature, params.top_k, params.top_p, params.min_p) if is_plain else None

    @property
    def is_greedy(self) -> bool:
        """Says whether the largest of the model's logits is taken as it is, masks aside."""
        return self.params.temperature == 0.0 and not self.has_bias and not self.has_penalties

    def draw(self, position: int) -> Draw | None:
        """Returns how the core chooses the token at `position` from the model's logits as they are;
        None where that is not all there is to it.
        """
        if self._plain is None:
            return None
        return (*self._plain, self.uniform(position)) if self._plain[0] > 0.0 else GREEDY

    def advance(self, token_ids: Sequence[int]) -> None:
        """Notes the new tokens of a committed step."""
        if self.has_penalties:
            self._counts.add(token_ids)

    def counts(self, tokens_before: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids that the penalties look at, int64 [num_ids], each once, and how often
        each is among the new tokens, float64 [num_ids]. `tokens_before` are counted as if they had
        been committed. The arrays are for reading, until the next `advance`.
        """
        return self._counts.with_tokens(tokens_before)

    def uniform(self, position: int) -> float:
        """Returns this choice's random number in [0, 1) for the token at `position`."""
        return uniform_of(self.seed, self.choice, position)


class _TokenCounts:
    """Counts tokens in arrays that grow, so that a step need not walk over all tokens again."""

    __slots__ = ("_counts", "_ids", "_places")

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_ids))}
        capacity = max(_FIRST_CAPACITY, 2 * len(self._places))
        self._ids, self._counts = np.zeros(capacity, np.int64), np.zeros(capacity, np.float64)
        self._ids[: len(self._places)] = list(self._places)

    def add(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token_id
            self._counts[place] += 1

    def with_tokens(self, token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        size = len(self._places)
        if not token_ids:
            return self._ids[:size], self._counts[:size]
        added = dict.fromkeys(token_id for token_id in token_ids if token_id not in self._places)
        places = {token_id: size + place for place, token_id in enumerate(added)}
        ids = np.concatenate((self._ids[:size], np.array(list(added), np.int64)))
        counts = np.concatenate((self._counts[:size], np.zeros(len(added))))
        for token_id in token_ids:
            counts[places[token_id] if token_id in places else self._places[token_id]] += 1
        return ids, counts
