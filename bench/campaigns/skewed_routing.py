"""What a second holder of every shard gains where routing is skewed: all rows go to experts of one
worker, or evenly to those of two, with one holder of each shard and with two.

    python -m bench.campaigns.skewed_routing [--rounds 15] \
        [--json bench/results/skewed_routing.json]

Two workers of one thread each, over shared memory. A sample is the time from the first of so many
calls, submitted at once, to the last result, which is compared bit for bit. A call in mode
`batched` is one slice for each shard, so that one call alone has one worker compute it: that row
shows that a second holder costs nothing there. `share` is the time beside that of one holder in the
same round, the median over rounds; 0.5 is the floor of two equal workers. About one minute.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.campaigns.harness import command_line
from dflash_moe import ExpertRuntime, Topology
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.results import timing_fields
from dflash_moe.testing.tiny import tiny_checkpoint

HIDDEN_SIZE, MOE_INTERMEDIATE_SIZE, NUM_EXPERTS, TOP_K = 1024, 512, 32, 4
TOKENS, NUM_CALLS = 128, 4
# The placement gives the first half of the experts to the first worker.
ROUTINGS = {"skewed": NUM_EXPERTS // 2, "even": NUM_EXPERTS}


@dataclass(slots=True)
class Calls:
    """So many calls at once to a runtime, with the results that they must have."""

    name: str
    runtime: ExpertRuntime
    holders: int
    routing: str
    batches: list[tuple[Any, Any, Any]]
    expected: list[bytes]
    samples_s: list[float] = field(default_factory=list)
    rounds: int | None = None
    differing: int = 0

    @property
    def label(self) -> str:
        """The name of the row."""
        return self.name

    def measure(self, *, keep: bool) -> None:
        """Submits the calls and waits for all results."""
        began = time.perf_counter()
        calls = [self.runtime.submit(0, *batch) for batch in self.batches]
        results = [call.result() for call in calls]
        took_s = time.perf_counter() - began
        self.differing += sum(
            np.asarray(result).tobytes() != expected for result, expected in zip(results, self.expected, strict=True)
        )
        if keep:
            self.samples_s.append(took_s)

    def row(self) -> dict[str, Any] | None:
        """Returns the row of what is kept."""
        if not self.samples_s:
            return None
        return {
            "name": self.name, "routing": self.routing, "calls": len(self.batches), "tokens": TOKENS, "holders": self.holders,
            "differing_results": self.differing, **timing_fields(self.samples_s, per_round=1),
        }  # fmt: skip


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    parser = command_line(__doc__, "skewed_routing")
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds [15]")
    arguments = parser.parse_args()
    recorder = Recorder(arguments.json)
    sizes = {
        "hidden_size": HIDDEN_SIZE, "moe_intermediate_size": MOE_INTERMEDIATE_SIZE, "num_experts": NUM_EXPERTS, "top_k": TOP_K,
        "num_layers": 1,
    }  # fmt: skip
    result = recorder.begin("skewed_routing", {**sizes, "workers": 2, "threads": 1, "tokens": TOKENS, "mode": "batched"})
    with recorder.recording(), _runtimes(sizes) as runtimes:
        cases = _cases(runtimes)
        run_rounds(recorder, cases, rounds=arguments.rounds)
        result.summary = _shares(cases)
    for row in result.rows:
        print(f"{row['name']:32} {1e3 * row['median_s']:8.2f} ms")
    for line in result.summary:
        print(f"{line['routing']}, {line['calls']} at once: {line['share']:.3f} of the time of one holder")
    return 1 if any(case.differing for case in cases) else 0


@contextlib.contextmanager
def _runtimes(sizes: dict[str, int]) -> Iterator[dict[int, ExpertRuntime]]:
    """Starts a runtime for each number of holders, over the same weights."""
    workers = "[{name: w0, threads: 1}, {name: w1, threads: 1}]"
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder, contextlib.ExitStack() as stack:
        spec = tiny_checkpoint(Path(folder), **sizes)
        found = {}
        for holders in (1, 2):
            topology = Topology.parse(f"version: 1\nplacement: {{replicas: {holders}}}\nworkers: {workers}\n")
            found[holders] = stack.enter_context(ExpertRuntime.start(topology, model=spec, mode="batched", dtype="f32"))
        yield found


def _cases(runtimes: dict[int, ExpertRuntime]) -> list[Calls]:
    drawn = np.random.default_rng(0)
    cases = []
    for routing, num_hot in ROUTINGS.items():
        batches = [_batch(drawn, num_hot) for _ in range(NUM_CALLS)]
        expected = [np.asarray(runtimes[1].experts(0, *batch)).tobytes() for batch in batches]
        for num_calls in (1, NUM_CALLS):
            for holders, runtime in runtimes.items():
                name = f"{routing}, {num_calls} calls, {holders} holders"
                cases.append(Calls(name, runtime, holders, routing, batches[:num_calls], expected[:num_calls]))
    return cases


def _batch(drawn: np.random.Generator, num_hot: int) -> tuple[Any, Any, Any]:
    """Returns hidden states, ids among the first `num_hot` experts, and weights."""
    topk_ids = np.stack([drawn.choice(num_hot, TOP_K, replace=False) for _ in range(TOKENS)]).astype(np.int64)
    hidden_states = drawn.standard_normal((TOKENS, HIDDEN_SIZE), dtype=np.float32)
    return hidden_states, topk_ids, drawn.random((TOKENS, TOP_K), dtype=np.float32)


def _shares(cases: list[Calls]) -> list[dict[str, Any]]:
    """Returns for each pair of rows the time with two holders beside that with one."""
    found = []
    for one, two in zip(cases[::2], cases[1::2], strict=True):
        ratios = [with_two / alone for alone, with_two in zip(one.samples_s, two.samples_s, strict=True)]
        share = {"share": statistics.median(ratios), "share_min": min(ratios), "share_max": max(ratios)}
        found.append({"routing": one.routing, "calls": len(one.batches), **share})
    return found


if __name__ == "__main__":
    sys.exit(main())
