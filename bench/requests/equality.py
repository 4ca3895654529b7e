"""Compares what requests got in the company of others with what the same requests get alone: from
the plain loop where it knows all that they ask for, and else from an engine that has nothing else.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from bench.requests.clients import Outcome
from bench.requests.drawn import Drawn

Alone = Callable[[Drawn], Outcome]


def keep_in(file: TextIO) -> Callable[[Outcome], None]:
    """Returns what writes an outcome as a line of a file, because the memory of the run must not
    grow by what is kept of it.
    """

    def keep(outcome: Outcome) -> None:
        file.write(json.dumps([outcome.number, outcome.tokens, outcome.reasons]) + "\n")

    return keep


def kept_in(path: Path) -> Iterator[Outcome]:
    """Yields the outcomes of a file."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            number, tokens, reasons = json.loads(line)
            yield Outcome(number, tuple(map(tuple, tokens)), tuple(reasons))


@dataclass(slots=True)
class Equality:
    """How many choices were compared, how many tokens of them, and what differs."""

    choices: int = 0
    tokens: int = 0
    cancelled: int = 0
    different: list[str] = field(default_factory=list)

    def compare(self, kept: Iterable[Outcome], draw: Callable[[int], Drawn], alone: Alone) -> None:
        """Computes each kept request alone and compares it choice by choice."""
        for outcome in kept:
            self._compare(outcome, alone(draw(outcome.number)))

    def _compare(self, outcome: Outcome, alone: Outcome) -> None:
        for choice, tokens in enumerate(outcome.tokens):
            own, reason = alone.tokens[choice], outcome.reasons[choice]
            self.choices += 1
            self.tokens += len(tokens)
            if reason == "cancelled":
                self.cancelled += 1
                is_equal = tokens == own[: len(tokens)]
            else:
                is_equal = (tokens, reason) == (own, alone.reasons[choice])
            if not is_equal:
                self.different.append(_difference(outcome, alone, choice))

    def row(self, name: str) -> dict[str, Any]:
        """Returns the row of the result, with the first differences alone."""
        counts = {"choices": self.choices, "tokens": self.tokens, "cancelled": self.cancelled}
        return {"name": name, **counts, "unequal": len(self.different), "different": self.different[:20]}


def _difference(outcome: Outcome, alone: Outcome, choice: int) -> str:
    tokens, own = outcome.tokens[choice], alone.tokens[choice]
    place = next(
        (at for at, (one, other) in enumerate(zip(tokens, own, strict=False)) if one != other),
        min(len(tokens), len(own)),
    )
    return (
        f"request {outcome.number}, choice {choice}: {len(tokens)} tokens ({outcome.reasons[choice]}), alone {len(own)} "
        f"({alone.reasons[choice]}), they part at token {place}"
    )
