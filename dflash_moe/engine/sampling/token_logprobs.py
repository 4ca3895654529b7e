"""`TokenLogprobs` is what a request that asks for log-probabilities gets with each token. There is
no torch here, because processes that only pass tokens on have none.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural logarithms of probabilities at one position, float32 values. `rank` is 1 for the
    most likely token; `best` has (id, logprob) of the most likely ones, the lowest id first among
    equals. Tokens of probability 0 are not in it.
    """

    token_id: int
    logprob: float
    rank: int
    best: tuple[tuple[int, float], ...]
