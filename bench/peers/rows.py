"""The rows of engine_against_peers.py: their names, what each reads of memory, and how fast the
same threads can read.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from bench.peers.batches import ALONE, NUM_SEQUENCES, measure_llama_batch, measure_our_batch, measure_vllm_batch
from bench.peers.programs import Neighbours
from bench.peers.sides import ACTIVATIONS, PLACES, Measured, Plan, measure_llama, measure_ours, measure_vllm
from dflash_moe.bench.results import timing_fields

PHASES = ("decode", "prefill")
PEERS = {"llama": measure_llama, "vllm": measure_vllm}
BATCH_PEERS = {"llama": measure_llama_batch, "vllm": measure_vllm_batch}
# Each thread reads so much, more than any cache holds, so often in a round: a quarter of a second,
# in which a neighbour shows.
READ_BYTES, READS = 256 << 20, 25


@dataclass(slots=True)
class ReadSpeed:
    """How many bytes a second a number of threads read from memory, in every round: a
    `harness.Case`.
    """

    num_threads: int
    rounds: int | None = None
    bytes_per_s: list[float] = field(default_factory=list)
    others_cores: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name of the case in reports of progress."""
        return f"read speed of {self.num_threads} threads"

    def measure(self, *, keep: bool) -> None:
        """Reads memory in this process, which is otherwise idle."""
        from dflash_moe import _core, _measure

        neighbours = Neighbours()
        found = _measure.read_bytes_per_s(_core.best_isa(), self.num_threads, READS, READ_BYTES)
        if keep:
            self.bytes_per_s += found
            self.others_cores.append(neighbours.busy_cores())

    def row(self) -> dict[str, Any] | None:
        """Returns the row, whose samples are seconds for READ_BYTES of every thread."""
        if not self.bytes_per_s:
            return None
        name = f"read-{self.num_threads}"
        seconds = [self.num_threads * READ_BYTES / speed for speed in self.bytes_per_s]
        own = {"name": name, "phase": "read", "threads": self.num_threads, "bytes_per_s": self.median}
        return own | timing_fields(seconds, per_round=READS) | {"others_busy_cores": max(self.others_cores)}

    @property
    def median(self) -> float:
        """The speed of all rounds so far."""
        return statistics.median(self.bytes_per_s)


@dataclass(slots=True)
class RowCase:
    """One side in one phase, format and place: a `harness.Case`."""

    plan: Plan
    phase: str
    fmt: str
    place: str
    side: str
    activations: str
    read: ReadSpeed
    rounds: int | None = None
    samples_s: list[float] = field(default_factory=list)
    loop_s: list[float] = field(default_factory=list)
    last: Measured | None = None
    anonymous_bytes: list[int] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    others_cores: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name of the row."""
        return row_name(self.phase, self.fmt, self.place, self.side, self.activations)

    def measure(self, *, keep: bool) -> None:
        """Starts the side, waits for its end and keeps what it measured."""
        neighbours = Neighbours()
        is_batch = self.phase in NUM_SEQUENCES
        if self.side == "ours":
            ours = measure_our_batch if is_batch else measure_ours
            found = ours(self.plan, self.fmt, self.phase, self.place, self.activations)
        else:
            peers = BATCH_PEERS if is_batch else PEERS
            found = peers[self.side](self.plan, self.fmt, self.phase, self.place)
        if keep:
            self.last = found
            self.samples_s += found.samples_s
            self.loop_s += found.loop_s
            self.anonymous_bytes.append(found.finished.anonymous_bytes)
            self.resident_bytes.append(found.finished.resident_bytes)
            self.others_cores.append(neighbours.busy_cores())

    def row(self) -> dict[str, Any] | None:
        """Returns the result row. `share_of_read` is the time that reading its bytes takes the same
        threads, divided by its own.
        """
        if self.last is None:
            return None
        timing = timing_fields(self.samples_s, per_round=len(self.last.samples_s))
        tokens = self.plan.prompt_tokens if self.phase == "prefill" else NUM_SEQUENCES.get(self.phase, 1)
        found = {
            "name": self.label, "phase": self.phase, "format": self.fmt, "place": self.place, "side": self.side,
            "shape": self.plan.shape(self.fmt).name, "tokens": tokens, **timing,
            "tokens_per_s": tokens / timing["median_s"],
            "bytes_read": self.bytes_read, "read_threads": self.read.num_threads, "commands": self.last.commands,
            "anonymous_bytes": max(self.anonymous_bytes), "resident_bytes": max(self.resident_bytes),
            "others_busy_cores": max(self.others_cores), **self.last.more,
        }  # fmt: skip
        if self.read.bytes_per_s:
            found["read_s"] = self.bytes_read / self.read.median
            found["share_of_read"] = found["read_s"] / timing["median_s"]
        if self.loop_s:
            # Samples are pairs, so that what slows both for a while does not count.
            found["time_by_loop"] = statistics.median(own / loop for own, loop in zip(self.samples_s, self.loop_s, strict=True))
        return found

    @property
    def bytes_read(self) -> int:
        """The bytes that the model's stored form makes a sample read at least: for decode those of
        a token in the middle of the run, for many sequences those of a step there, and for prefill
        all weights once.
        """
        shape, stored = self.plan.shape(self.fmt), "f16" if self.fmt == "16bit" else self.fmt
        if self.phase == "prefill":
            return shape.weight_bytes(stored, experts=shape.num_experts)
        if count := NUM_SEQUENCES.get(self.phase):
            return shape.step_bytes(stored, self.plan.batch_prompt_tokens + self.plan.batch_new_tokens // 2, count)
        return shape.token_bytes(stored, self.plan.prompt_tokens + self.plan.new_tokens // 2)


def row_name(phase: str, fmt: str, place: str, side: str, activations: str = "") -> str:
    """Returns the name of a row. Ours says its class where that is not the format's own."""
    suffix = f"_{activations}" if side == "ours" and activations not in ("", ACTIVATIONS[fmt]) else ""
    return f"{phase}-{fmt}-{place}-{side}{suffix}"


def all_cases(plan: Plan, *, with_real_shape: bool) -> tuple[list[ReadSpeed], list[RowCase]]:
    """Returns every row, of absent sides too, and the read speeds of one and of two threads."""
    one, two = ReadSpeed(1), ReadSpeed(2)
    names = [(phase, *names) for phase in PHASES for names in _sides(with_real_shape)]
    names += [(phase, *names) for phase in NUM_SEQUENCES for names in _batch_sides(phase, with_real_shape)]
    # A token's host and worker take turns, each with its one thread.
    return [one, two], [RowCase(plan, *own, two if own[2] == "local" else one) for own in names]


def _sides(with_real_shape: bool) -> Iterator[tuple[str, str, str, str]]:
    for fmt in ("16bit", "q8_0"):
        own = ACTIVATIONS[fmt]
        yield fmt, "local", "llama", ""
        if fmt == "16bit":
            yield fmt, "local", "vllm", ""
        yield fmt, "local", "ours", own
        yield fmt, "rpc", "llama", ""
        for place in PLACES[1:] if fmt == "16bit" else ("shared",):
            yield fmt, place, "ours", own
        if fmt == "16bit":
            yield fmt, "local", "ours", "f32"
            yield fmt, "shared", "ours", "f32"
    if with_real_shape:
        yield "q4_k", "local", "llama", ""
        for place in ("local", "shared", "tcp"):
            yield "q4_k", place, "ours", ACTIVATIONS["q4_k"]


def _batch_sides(phase: str, with_real_shape: bool) -> Iterator[tuple[str, str, str, str]]:
    for fmt in ("16bit", "q8_0"):
        own = ACTIVATIONS[fmt]
        if phase != ALONE:
            yield fmt, "local", "llama", ""
            if fmt == "16bit":
                yield fmt, "local", "vllm", ""
        yield fmt, "local", "ours", own
        if phase == "batch16":
            yield fmt, "shared", "ours", own
    if with_real_shape and phase != ALONE:
        yield "q4_k", "local", "llama", ""
        yield "q4_k", "local", "ours", ACTIVATIONS["q4_k"]


def chosen_cases(cases: list[RowCase], only: str) -> tuple[list[RowCase], dict[str, str]]:
    """Returns the cases that can be measured and whose names match a pattern of `only`, and why
    others of these names are left out. Raises SystemExit for a pattern that matches nothing.
    """
    patterns = [pattern.strip() for pattern in only.split(",") if pattern.strip()] or ["*"]
    names = [case.label for case in cases]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise SystemExit(f"--only {pattern}: no such row; there are {', '.join(names)}")
    wanted = [case for case in cases if any(fnmatchcase(case.label, pattern) for pattern in patterns)]
    left_out = {case.label: reason for case in wanted if (reason := _what_is_absent(case))}
    return [case for case in wanted if case.label not in left_out], left_out


def _what_is_absent(case: RowCase) -> str:
    if case.side == "llama" and case.plan.llama_bin is None:
        return "no --llama-bin"
    if case.side == "vllm" and case.plan.vllm_python is None:
        return "no --vllm-python"
    return ""
