"""The requests of engine_requests.py, drawn from a seed and their number: lengths, sampling, forks,
shared beginnings, and when somebody cancels them. Equal numbers give equal requests in any order.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# Tokens of prompts are bytes, of which end of text is none.
NUM_BYTES = 256
MOST_PROMPT_TOKENS = 160
MOST_NEW_TOKENS = 64
# Prompts that share a beginning share one of so many, which end within a block and at its edge.
NUM_BEGINNINGS, BEGINNING_TOKENS = 8, (16, 100)
SHARED, GREEDY, STOPPING, CANCELLED = 0.4, 0.4, 0.2, 0.12
CHOICES, CHOICE_WEIGHTS = (1, 2, 4), (0.8, 0.12, 0.08)
# Half of the cancels come at a time, most of them while the request waits or runs.
MEAN_CANCEL_S = 0.5


@dataclass(frozen=True, slots=True)
class Drawn:
    """One request. `sampling` are fields of SamplingParams. It is cancelled once so many tokens of
    all its choices have come, or so long after it was submitted, and never where both are None.
    """

    number: int
    prompt_ids: tuple[int, ...]
    sampling: dict[str, Any]
    cancel_after_tokens: int | None = None
    cancel_after_s: float | None = None

    @property
    def num_choices(self) -> int:
        """The sequences that the prompt is forked into, 1 where it is not."""
        return int(self.sampling["n"])

    @property
    def max_tokens(self) -> int:
        """The most tokens of one choice."""
        return int(self.sampling["max_tokens"])

    @property
    def is_plain(self) -> bool:
        """Whether the plain loop knows all that is asked for: the most likely token, each time, up
        to a number.
        """
        return set(self.sampling) == {"max_tokens", "n", "temperature", "ignore_eos"} and self.sampling["temperature"] == 0.0

    def num_blocks(self, block_tokens: int) -> int:
        """Returns the blocks that it may come to, of which choices share those that the prompt
        fills.
        """
        shared = len(self.prompt_ids) // block_tokens
        whole = math.ceil((len(self.prompt_ids) + self.max_tokens) / block_tokens)
        return shared + self.num_choices * (whole - shared)


def draw(number: int, seed: int = 0) -> Drawn:
    """Returns the request of this number."""
    generator = random.Random(f"{seed} {number}")
    prompt = _prompt(generator, seed)
    sampling = _sampling(generator)
    if generator.random() >= CANCELLED:
        return Drawn(number, prompt, sampling)
    if generator.random() < 0.5:
        return Drawn(number, prompt, sampling, cancel_after_s=generator.expovariate(1 / MEAN_CANCEL_S))
    return Drawn(number, prompt, sampling, cancel_after_tokens=generator.randrange(sampling["max_tokens"]))


def wanted_blocks(drawn: Iterable[Drawn], at_once: int, block_tokens: int) -> int:
    """Returns the blocks that `at_once` requests want together, by the mean of those given."""
    counts = [one.num_blocks(block_tokens) for one in drawn]
    return math.ceil(at_once * sum(counts) / len(counts))


def _prompt(generator: random.Random, seed: int) -> tuple[int, ...]:
    beginning: list[int] = []
    if generator.random() < SHARED:
        shared = random.Random(f"{seed} beginning {generator.randrange(NUM_BEGINNINGS)}")
        beginning = _tokens(shared, shared.randint(*BEGINNING_TOKENS))
    return (*beginning, *_tokens(generator, generator.randint(1, MOST_PROMPT_TOKENS - len(beginning))))


def _tokens(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(NUM_BYTES) for _ in range(count)]


def _sampling(generator: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {"max_tokens": generator.randint(1, MOST_NEW_TOKENS), "n": 1, "ignore_eos": True}
    if generator.random() < GREEDY:
        found["temperature"] = 0.0
    else:
        found |= {"temperature": generator.uniform(0.3, 1.5), "seed": generator.getrandbits(31)}
        found["n"] = generator.choices(CHOICES, CHOICE_WEIGHTS)[0]
        limits: tuple[dict[str, Any], ...] = (
            {},
            {"top_p": 0.9},
            {"top_k": 20},
            {"min_p": 0.05},
            {"repetition_penalty": 1.2},
            {"presence_penalty": 0.5},
        )
        found |= generator.choice(limits)
    if generator.random() < STOPPING:
        found |= {"ignore_eos": False, "stop_token_ids": tuple(sorted(set(_tokens(generator, 4))))}
    return found
