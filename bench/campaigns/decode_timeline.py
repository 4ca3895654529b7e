"""Where a decoded token spends its time, and who wakes whom: on one core and on two, with one
thread of torch and with two.

    python -m bench.campaigns.decode_timeline [--rounds 5] \
        [--json bench/results/decode_timeline.json]

A host and two workers of one thread each over shared memory, batched. Every case runs in a process
of its own, because the cores of its workers and the threads of torch are decided before they start.
The parts of a token follow, in each call, the worker whose reply comes last: until its request is
published (the host routes, encodes and wakes), the request's way, the worker, the reply's way, the
sum. What is left of a token is the host: attention, router, norms and head, in torch. Wake-ups are
voluntary context switches: a thread that slept, and was woken.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.campaigns.harness import ROOT, command_line
from bench.lab.reference_model import reference_model
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.results import timing_fields

DEMO = ROOT / "bench" / "demo_model" / "dflash_moe_demo" / "model"
NUM_WORKERS = 2
CHILD_S = 600.0
# The chain of one call: each part lasts from the time named before it to its own.
CHAIN = {
    "publish": ("begun_ns", "published_ns"), "request": ("published_ns", "worker_received_ns"),
    "worker": ("worker_received_ns", "worker_finished_ns"), "reply": ("worker_finished_ns", "arrived_ns"),
}  # fmt: skip
PARTS = (*CHAIN, "combine")
SLEEPERS = ("host", "torch", "workers")


@dataclass(slots=True)
class TimelineCase:
    """One line of the table: a `harness.Case` that measures in a child process."""

    model: Path
    cores: int
    torch_threads: int
    prompt_tokens: int
    new_tokens: int
    found: list[dict[str, Any]] = field(default_factory=list)
    rounds: int | None = None

    @property
    def label(self) -> str:
        """For progress."""
        return f"{self.model.name}, {self.cores} cores, {self.torch_threads} threads of torch"

    def measure(self, *, keep: bool) -> None:
        """Starts the child and takes what it prints."""
        asked = {name: getattr(self, name) for name in ("cores", "torch_threads", "prompt_tokens", "new_tokens")}
        child = ["--child", json.dumps({"model": str(self.model), **asked})]
        command = [sys.executable, "-m", "bench.campaigns.decode_timeline", *child]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CHILD_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{self.label}: {done.stderr.strip()[-2000:]}")
        if keep:
            self.found.append(json.loads(done.stdout.splitlines()[-1]))

    def row(self) -> dict[str, Any] | None:
        """Times of every token of all rounds; parts and wake-ups are means per token."""
        if not self.found:
            return None
        token_s = [seconds for one in self.found for seconds in one["token_s"]]
        parts = {part: _mean(one["parts_s"][part] for one in self.found) for part in PARTS}
        return {
            "name": f"{self.model.name}, {self.cores} cores, {self.torch_threads} threads of torch",
            "model": self.model.name,
            "cores": self.cores,
            "torch_threads": self.torch_threads,
            "prompt_tokens": self.prompt_tokens,
            **timing_fields(token_s, per_round=self.new_tokens),
            "token_s": _mean(token_s),
            "tokens_per_s": 1 / _mean(token_s),
            "tokens_per_s_by_round": [len(one["token_s"]) / sum(one["token_s"]) for one in self.found],
            "layers": self.found[-1]["layers"],
            "parts_s": {**parts, "host": _mean(token_s) - sum(parts.values())},
            "wakes": {who: _mean(one["wakes"][who] for one in self.found) for who in SLEEPERS},
        }


def main() -> int:
    """See the module text."""
    arguments = _arguments()
    if arguments.child:
        print(json.dumps(_child(**json.loads(arguments.child))))
        return 0
    deep = arguments.model or reference_model(say=lambda line: print(line, flush=True))
    cases = [
        TimelineCase(model, cores, torch_threads, prompt_tokens, new_tokens)
        for model, prompt_tokens, new_tokens in (
            (DEMO, arguments.short_prompt, 64),
            (deep, arguments.short_prompt, 32),
            (deep, arguments.long_prompt, 16),
        )
        for cores, torch_threads in ((1, 1), (2, 1), (2, 2))
    ]
    recorder = Recorder(arguments.json)
    recorder.begin("decode_timeline", {"workers": NUM_WORKERS, "rounds": arguments.rounds, "seed": 0})
    with recorder.recording():
        run_rounds(recorder, cases, rounds=arguments.rounds, warmup=0)
    for case in cases:
        row = case.row()
        assert row is not None
        host_ms = row["parts_s"]["host"] * 1e3
        print(f"{row['name']}, after {row['prompt_tokens']}: {row['tokens_per_s']:.1f} tokens/s, {host_ms:.2f} ms in the host")
    return 0


def _child(model: str, cores: int, torch_threads: int, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
    """Decodes on the first `cores` cores; times of the tokens, parts and wake-ups per token."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    # What the command line sets where threads outnumber cores; read when torch loads.
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    import torch
    from transformers import DynamicCache

    from dflash_moe import ExpertRuntime, Topology
    from dflash_moe.bench.forward import random_prompt
    from dflash_moe.integrations.transformers import load_model

    torch.set_num_threads(torch_threads)
    topology = Topology.local(num_workers=NUM_WORKERS)
    with ExpertRuntime.start(topology, model=model, mode="batched", profile=True) as runtime, torch.inference_mode():
        host_model = load_model(model, runtime)
        cache = DynamicCache(config=host_model.config)

        def step(ids: torch.Tensor) -> torch.Tensor:
            logits = host_model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            return torch.tensor([[int(torch.argmax(logits))]])

        token = step(random_prompt(host_model, prompt_tokens, 0))
        for _ in range(4):  # threads and paths have run once
            token = step(token)
        runtime.take_traces()
        pids = [process.pid for process in runtime.worker_processes()]
        before, times = _sleeps(pids), [time.perf_counter()]
        for _ in range(new_tokens):
            token = step(token)
            times.append(time.perf_counter())
        after, traces = _sleeps(pids), runtime.take_traces()
    return {
        "token_s": [end - begin for begin, end in zip(times, times[1:], strict=False)],
        "layers": len({one["layer"] for one in traces}),
        "parts_s": {part: seconds / new_tokens for part, seconds in _parts(traces).items()},
        "wakes": {who: (after[who] - before[who]) / new_tokens for who in SLEEPERS},
    }


def _parts(traces: Iterable[Mapping[str, int]]) -> dict[str, float]:
    """Seconds of each part, summed over all calls."""
    calls: dict[int, list[Mapping[str, int]]] = {}
    for one in traces:
        calls.setdefault(one["call_id"], []).append(one)
    total = dict.fromkeys(PARTS, 0.0)
    for slices in calls.values():
        last = max(slices, key=lambda one: one["arrived_ns"])
        for part, (begin, end) in CHAIN.items():
            total[part] += (last[end] - last[begin]) * 1e-9
        total["combine"] += (max(one["combined_ns"] for one in slices) - last["arrived_ns"]) * 1e-9
    return total


def _sleeps(worker_pids: Sequence[int]) -> dict[str, int]:
    """Voluntary context switches so far: of the host's main thread, of its other threads (torch's
    pool, where it has one), and of all workers.
    """
    own = _switches(os.getpid())
    main = own.pop(os.getpid())
    workers = sum(sum(_switches(pid).values()) for pid in worker_pids)
    return {"host": main, "torch": sum(own.values()), "workers": workers}


def _switches(pid: int) -> dict[int, int]:
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                found[int(task.name)] = int(line.split()[1])
    return found


def _mean(values: Iterable[float]) -> float:
    all_values = list(values)
    return sum(all_values) / len(all_values)


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, "decode_timeline")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds [5]")
    parser.add_argument("--short-prompt", type=int, default=64, help="tokens of the short prompts [64]")
    parser.add_argument("--long-prompt", type=int, default=4248, help="tokens of the long prompt [4248]")
    parser.add_argument("--model", type=Path, help="instead of the reference model")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
