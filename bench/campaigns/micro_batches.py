"""Steps in two micro-batches against the same steps in one batch: the host on one core, and a
worker with all routed experts on another, over shared memory.

    python -m bench.campaigns.micro_batches [--rounds 9] [--json bench/results/micro_batches.json]

Prefill of two prompts of 256 tokens, prefill of one of 512, which is cut, and decode of 16
sequences, which is expected to lose; one batch, two, and what auto chooses of what it has seen of
all of these are measured in each round, and their bits compared. Rows beside that of one batch have
`share`, their time as a share of its time, the median over rounds, and where steps were cut
`overlap_share`, how much of the time in which a half awaited its experts the other half computed.
About one minute.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.campaigns.harness import model_line, model_of
from bench.peers.programs import Neighbours
from dflash_moe import ExpertRuntime, Topology
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.results import timing_fields
from dflash_moe.forward.forward import PackedForward, StepRows
from dflash_moe.forward.host_model import open_host

HOST_CPU, WORKER_CPU = 0, 1
TOPOLOGY = f"""
version: 1
host: {{threads: 1, activations: bf16}}
workers:
  - {{name: w0, backend: cpu, threads: 1, activations: bf16, cpus: "{WORKER_CPU}"}}
"""
# By name: how many tokens each sequence gets in a step and stores before it, and steps a round.
STEPS = {
    "prefill 2 x 256": ([256, 256], 0, 1),
    "prefill 512": ([512], 0, 1),
    "decode 16": ([1] * 16, 64, 8),
}
WAYS = {"1": "one batch", "2": "two micro-batches", "auto": "auto"}
# What a prefill of two prompts in two micro-batches may take, by what it takes in one batch.
MARK_ROW, MOST_SHARE = "prefill 2 x 256, two micro-batches", 0.85


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    parser = model_line(__doc__, "micro_batches")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds [9]")
    arguments = parser.parse_args()
    if not {HOST_CPU, WORKER_CPU} <= os.sched_getaffinity(0):
        print(f"micro_batches: needs CPUs {HOST_CPU} and {WORKER_CPU} for itself", file=sys.stderr)
        return 1
    model = model_of(arguments)
    recorder = Recorder(arguments.json)
    result = recorder.begin("micro_batches", {"threads": 1, "activations": "bf16", "transport": "shared"})
    with recorder.recording(), _opened(model) as (packed, pids):
        cases = [case for name, step in STEPS.items() for case in _ways(packed, pids, name, *step)]
        run_rounds(recorder, cases, rounds=arguments.rounds)
        result.summary = summarise(result.rows)
    for row in result.rows:
        print(shown_row(row))
    return 0


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the line that says whether the mark was met."""
    value = next(float(row["share"]) for row in rows if row["name"] == MARK_ROW)
    return [
        {
            "what": f"time of {MARK_ROW}, by one batch's",
            "value": value,
            "at_most": MOST_SHARE,
            "met": value <= MOST_SHARE,
        }
    ]


def shown_row(row: Mapping[str, Any]) -> str:
    """Returns a row as a line for whoever runs the campaign."""
    text = f"{row['name']:35} {1e3 * row['median_s']:8.1f} ms"
    text += f", {row['share']:.3f} of one batch" if "share" in row else ""
    text += f", {row['overlap_share']:.0%} of waiting hidden" if "overlap_share" in row else ""
    text += f", cut {row['split_steps']} of {row['steps']} steps" if row["asked"] == "auto" else ""
    return f"{text}; others took {row['others_busy_cores']:.2f} cores"


@contextmanager
def _opened(model: Path) -> Iterator[tuple[PackedForward, tuple[int, ...]]]:
    """Opens the model with all threads of this process on one core. Yields its forward pass and the
    processes of workers.
    """
    with ExpertRuntime.start(Topology.parse(TOPOLOGY), model=model, transport="shared") as runtime:
        # The worker has left this process and its own core already. A plan of threads on one core
        # would have told everybody to sleep instead of spin, so that this comes after it.
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {HOST_CPU})
        host = open_host(model, runtime, micro_batches="1")
        assert host.packed is not None, host.report.lines()
        assert host.packed.micro_batches is not None
        try:
            yield host.packed, tuple(worker.pid for worker in runtime.worker_processes())
        finally:
            host.packed.micro_batches.close()


@dataclass(slots=True)
class _Case:
    """Steps of `counts` tokens of sequences that store `stored` tokens each, in one batch or in
    two, or as auto chooses.
    """

    label: str
    packed: PackedForward
    counts: list[int]
    stored: int
    steps: int
    asked: str
    one: _Case | None = None
    rounds: int | None = None
    samples_s: list[float] = field(default_factory=list)
    logits: torch.Tensor | None = None
    worker_pids: tuple[int, ...] = ()
    overlap: list[float] = field(default_factory=list)
    split_steps: int = 0
    others_cores: list[float] = field(default_factory=list)

    def measure(self, *, keep: bool) -> None:
        packed, batches = self.packed, self.packed.micro_batches
        assert batches is not None
        generator = torch.Generator().manual_seed(len(self.counts))

        def tokens(count: int) -> list[int]:
            drawn: list[int] = torch.randint(0, packed.vocab_size, (count,), generator=generator).tolist()
            return drawn

        sequences = [packed.admit(self.stored + self.steps * count) for count in self.counts]
        batches.asked = "1"
        if self.stored:
            packed.forward([StepRows(sequence, tokens(self.stored)) for sequence in sequences])
        batches.asked = self.asked
        before, neighbours = batches.stats(), Neighbours(lambda: self.worker_pids)
        for _ in range(self.steps):
            rows = [StepRows(sequence, tokens(count)) for sequence, count in zip(sequences, self.counts, strict=True)]
            begun = time.perf_counter()
            self.logits = packed.forward(rows)
            if keep:
                self.samples_s.append(time.perf_counter() - begun)
        for sequence in sequences:
            sequence.release()
        if keep:
            self.others_cores.append(neighbours.busy_cores())
            self._book(before, batches.stats())
        if self.one is not None and self.one.logits is not None:
            assert torch.equal(self.logits.view(torch.int32), self.one.logits.view(torch.int32)), f"{self.label}: other bits"

    def _book(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Counts what was cut between two looks at the statistics."""
        if split := after["split_steps"] - before["split_steps"]:
            self.split_steps += split
            self.overlap.append((after["hidden_s"] - before["hidden_s"]) / (after["awaited_s"] - before["awaited_s"] or 1.0))

    def row(self) -> dict[str, Any] | None:
        if not self.samples_s:
            return None
        fields: dict[str, Any] = {
            "name": self.label,
            "asked": self.asked,
            "steps": len(self.samples_s),
            "split_steps": self.split_steps,
            "others_busy_cores": max(self.others_cores),
            "others_busy_cores_by_round": self.others_cores,
        }
        if self.one is not None and len(self.one.samples_s) == len(self.samples_s):
            pairs = zip(self.samples_s, self.one.samples_s, strict=True)
            fields["share"] = statistics.median(other / one for other, one in pairs)
        if self.overlap:
            fields["overlap_share"] = statistics.median(self.overlap)
        return fields | timing_fields(self.samples_s, per_round=self.steps)


def _ways(packed: PackedForward, pids: tuple[int, ...], name: str, counts: list[int], stored: int, steps: int) -> list[_Case]:
    cases: list[_Case] = []
    for asked, way in WAYS.items():
        one = cases[0] if cases else None
        cases.append(_Case(f"{name}, {way}", packed, counts, stored, steps, asked, one, worker_pids=pids))
    return cases


if __name__ == "__main__":
    sys.exit(main())
