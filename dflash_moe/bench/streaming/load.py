"""Submits requests as a schedule has them, and reads what comes of them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dflash_moe.bench.streaming.endpoint import Endpoint
from dflash_moe.bench.streaming.stream import Streamed, stream

ABSOLUTE, RELATIVE = "absolute", "relative"


@dataclass(frozen=True, slots=True)
class Schedule:
    """When requests are due. With an interval of 0 s one is due as soon as fewer than `concurrency`
    are open. Otherwise request i is due i intervals after the first one (`absolute`, whatever
    happens), or an interval after the one before it was submitted (`relative`). It is submitted
    then, or once fewer than `concurrency` are open; with None any number may be.
    """

    interval_s: float = 0.0
    kind: str = ABSOLUTE
    concurrency: int | None = None


@dataclass(slots=True)
class Load:
    """What was measured of one round of requests. CPU seconds are those of this process, and of
    each of the server's where they are ours.
    """

    streamed: list[Streamed]
    client_cpu_s: float = 0.0
    server_cpu_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def completed(self) -> list[Streamed]:
        """The requests all of whose tokens came."""
        return [one for one in self.streamed if not one.error]

    @property
    def tokens(self) -> int:
        """The tokens of completed requests."""
        return sum(one.tokens for one in self.completed)

    @property
    def wall_s(self) -> float:
        """From the first submission until the last token of a completed request; there must be
        one.
        """
        return max(one.times[-1] for one in self.completed) - min(one.submitted for one in self.completed)


def run_load(endpoint: Endpoint, requests: Sequence[bytes], schedule: Schedule, timeout_s: float) -> Load:
    """Sends all requests and waits until each has ended, which takes at most `timeout_s` for one.
    What fails is said in its `Streamed`.
    """
    began = time.process_time()
    streamed = asyncio.run(_run(endpoint, requests, schedule, timeout_s))
    return Load(streamed, time.process_time() - began)


async def _run(endpoint: Endpoint, requests: Sequence[bytes], schedule: Schedule, timeout_s: float) -> list[Streamed]:
    slots = asyncio.Semaphore(schedule.concurrency or len(requests))
    found: list[Streamed] = []
    tasks = []
    due = time.monotonic()
    for request in requests:
        if found and schedule.interval_s:
            due += schedule.interval_s
            await asyncio.sleep(due - time.monotonic())
        await slots.acquire()
        now = time.monotonic()
        if not schedule.interval_s:
            due = now
        found.append(Streamed(due))
        tasks.append(asyncio.create_task(_one(endpoint, request, found[-1], timeout_s, slots)))
        if schedule.kind == RELATIVE:
            due = now
    await asyncio.gather(*tasks)
    return found


async def _one(
    endpoint: Endpoint, request: bytes, streamed: Streamed, timeout_s: float, slots: asyncio.Semaphore
) -> None:  # fmt: skip
    try:
        await stream(endpoint, request, streamed, timeout_s)
    finally:
        slots.release()
