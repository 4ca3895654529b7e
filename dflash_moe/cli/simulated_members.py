"""The state machines of a simulation's workers: those of the product (holders/membership.py), told
and asked in plain values by csrc/simulation.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from dflash_moe.holders.membership import Event, Happening, Life, RestartPolicy


class SimulatedMembers:
    """The machines of workers 0 to n - 1. Called with an event of one of them (its index, what
    happened, of which attempt, why, whether it died, and the virtual time in seconds), it returns
    the orders as (task, attempt, until), the state, whether the worker is coming back, and the
    latest attempt.
    """

    def __init__(self, seed: int, are_started_by_host: Sequence[bool], backoff_s: tuple[float, float]) -> None:
        rng, policy = random.Random(seed), RestartPolicy(backoff_s)
        self._members = [Life(f"w{i}", policy, rng, is_ours) for i, is_ours in enumerate(are_started_by_host)]

    def __call__(
        self, worker: int, what: str, attempt: int, reason: str, is_death: bool, now: float
    ) -> tuple[list[tuple[str, int, float]], str, bool, int]:
        member = self._members[worker]
        orders = member.on(Event(Happening(what), attempt, reason, is_death), now)
        told = [(order.task.value, order.attempt, order.until) for order in orders]
        return told, member.state.value, member.is_coming, member.attempt
