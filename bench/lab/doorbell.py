"""`doorbell` measures which memory of the host a card takes, and what it costs to ring a
processor from there and to be answered.

It first registers memory as device steps do: the sealed segments of the shared transport (the
worker's mapped read-only), the same without the seal against writing, and pinned memory. Then it
runs a ping-pong over each: the card stores a number, a thread or another process answers with it,
and the card waits for that. Nothing else travels, so that this is the floor under `step`.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from bench.lab.bell_echo import EchoProcess, EchoThread
from dflash_moe import _measure
from dflash_moe.bench.harness import Recorder
from dflash_moe.bench.results import BenchResult, percentile, timing_fields
from dflash_moe.errors import DflashError

# A slot of a device step has this size, and a segment has one slot. The time to register a segment
# grows with its pages.
SLOT_BYTES = 4 << 20
SEALED, OPEN, PINNED = "sealed segments", "segments without the write seal", "pinned memory"
THREAD, PROCESS = "thread", "process"
# Each ping-pong has a memory, and someone who answers.
PAIRS = ((SEALED, THREAD), (SEALED, PROCESS), (OPEN, THREAD), (OPEN, PROCESS), (PINNED, THREAD))
# On a card the median wait of a kernel should stay below this.
MARK_US = 5.0


@dataclass(frozen=True, slots=True)
class DoorbellParams:
    """What is measured. With 0 as `rounds` there are 10,000 on a card and few on a simulated
    one.
    """

    backend: str
    device: int = 0
    rounds: int = 0
    # One ping-pong may take so long, and needs a tenth of it. What does not end is a row that says
    # so.
    budget_s: float = 3.0

    def resolved(self) -> DoorbellParams:
        """Returns the parameters with the rounds of the backend filled in."""
        return dataclasses.replace(self, rounds=self.rounds or (50 if self.backend == "sim" else 10_000))


@dataclass(slots=True)
class Words:
    """The two words of all ping-pongs over one kind of memory. Each ping-pong begins where the one
    before left them.
    """

    name: str
    memory: _measure.BellMemory
    next_number: int = 1

    def take_numbers(self, rounds: int) -> int:
        """Returns the first number of a ping-pong."""
        first, self.next_number = self.next_number, self.next_number + rounds
        return first

    @contextmanager
    def mapped(self, device: _measure.BellDevice) -> Iterator[int]:
        """Maps the words for the device within the block, which gets the number of mapped bytes."""
        try:
            yield self.memory.map(device)
        finally:
            self.memory.unmap(device)


def run_doorbell(params: DoorbellParams, *, recorder: Recorder | None = None) -> BenchResult:
    """Measures a row for each registration and each ping-pong, with `passed` and the driver's words
    where it failed. The file is saved after every row. Errors are those of opening the device.
    """
    recorder, params = recorder or Recorder(), params.resolved()
    result = recorder.begin("doorbell", dataclasses.asdict(params), interleaved=False)
    with recorder.recording(), ExitStack() as stack:
        words = {
            name: Words(name, _measure.BellMemory.of_segments(is_open=name == OPEN, slot_bytes=SLOT_BYTES))
            for name in (SEALED, OPEN)
        }
        # These processes are forked before the driver starts: a child must have neither its threads
        # nor its mappings.
        processes = {
            pair: stack.enter_context(
                EchoProcess.forked(words[pair[0]].memory, rounds=params.rounds, timeout_s=params.budget_s)
            )
            for pair in PAIRS
            if pair[1] == PROCESS
        }
        device = _measure.BellDevice(backend=params.backend, device=params.device)
        result.params["device_name"] = device.name
        words[PINNED] = Words(PINNED, _measure.BellMemory.pinned(device))
        for one in words.values():
            result.rows.append(_registration(one, device))
            recorder.save()
        for number, pair in enumerate(PAIRS):
            recorder.reporter.advance(number, len(PAIRS), f"{pair[0]}, {pair[1]}")
            result.rows.append(_ping_pong(pair, words[pair[0]], processes.get(pair), device, params))
            recorder.save()
        recorder.reporter.advance(len(PAIRS), len(PAIRS), "done")
    return result


def _registration(words: Words, device: _measure.BellDevice) -> dict[str, Any]:
    row: dict[str, Any] = {"name": f"register {words.name}", "memory": words.name}
    began = time.perf_counter()
    try:
        with words.mapped(device) as num_bytes:
            took = time.perf_counter() - began
    except DflashError as error:
        return row | {"passed": False, "error": str(error)}
    return row | {"passed": True, "bytes": num_bytes, **timing_fields([took])}


def _ping_pong(
    pair: tuple[str, str], words: Words, process: EchoProcess | None, device: _measure.BellDevice, params: DoorbellParams
) -> dict[str, Any]:
    memory, echo = pair
    row: dict[str, Any] = {"name": f"{echo}, {memory}", "memory": memory, "echo": echo}
    row |= {"rounds": params.rounds, "mark_us": MARK_US if params.backend != "sim" else None}
    try:
        with words.mapped(device):
            num_done, seen = _rounds(words, process, device, params)
    except DflashError as error:
        return row | {"passed": False, "error": str(error)}
    row |= {"passed": num_done == params.rounds, "answered": num_done, "seen": len(seen)}
    if not row["passed"]:
        row["error"] = _failure(num_done, len(seen), params)
    trips = [(after - before) / 1e9 for before, after in zip(seen, seen[1:], strict=False)]
    if trips:
        row |= {"p50_us": 1e6 * statistics.median(trips), "p99_us": 1e6 * percentile(trips, 0.99), "min_us": 1e6 * min(trips)}
        row |= timing_fields(trips, per_round=len(trips))
    return row


def _rounds(
    words: Words, process: EchoProcess | None, device: _measure.BellDevice, params: DoorbellParams
) -> tuple[int, list[int]]:
    """Returns the number of rounds that the card saw answered, and when the processor saw each of
    them, in nanoseconds.
    """
    first = words.take_numbers(params.rounds)
    echo = process or EchoThread(words.memory, rounds=params.rounds, timeout_s=params.budget_s)
    echo.begin(first)
    try:
        num_done = words.memory.ring(device, first=first, rounds=params.rounds, budget_s=params.budget_s)
    finally:
        seen = echo.seen()
    return num_done, seen


def _failure(num_done: int, num_seen: int, params: DoorbellParams) -> str:
    if not num_seen:
        return f"no store of the card was seen by the processor within {params.budget_s:g} s"
    if not num_done:
        return f"the processor saw {num_seen} stores of the card, which saw no answer within {params.budget_s:g} s"
    return f"{num_done} of {params.rounds} rounds were answered within {params.budget_s:g} s ({num_seen} seen by the processor)"
