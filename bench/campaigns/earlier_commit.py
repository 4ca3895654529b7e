"""What calls and decoded tokens take here and at an earlier commit, one worker and no faults. One
JSON, whose rows `bench compare --rows` judges.

    python -m bench.campaigns.earlier_commit BUILD [--rounds 15] [--calls 2000] [--new-tokens 128]
        [--json bench/results/earlier_commit.json]

BUILD is a checkout of the earlier commit with its core built (`make core`). Rows named `earlier`
are its own; rows named `hedge 0` and `default` are of this tree, without hedging and with the
default. Each round measures all three, in another order each time: processes of their own, the host
pinned to one core and the worker to the other. A sample is one expert call of one token (f32,
hidden size 2048) over each transport, or one token of the shipped model, decoded over shared
memory. At last two workers hold every shard, and the share of slices is counted that were also
asked of the second one. About six minutes.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "bench" / "results" / "earlier_commit.json"
TRANSPORTS = ("loopback", "shared", "unix", "tcp")
HIDDEN_SIZE, NUM_EXPERTS, TOP_K = 2048, 8, 2
_SIZES = {
    "hidden_size": HIDDEN_SIZE, "moe_intermediate_size": 16, "num_experts": NUM_EXPERTS, "top_k": TOP_K, "num_layers": 1,
}  # fmt: skip
WARMUP_CALLS = 200
PROMPT_TOKENS = 32
# One child starts at most five runtimes and makes some thousand calls.
CHILD_S = 300.0


@dataclass(slots=True)
class Variant:
    """A tree, the lines that its topologies get, and what was measured of it: seconds by `what`,
    which is a transport or `decode`, round after round.
    """

    name: str
    tree: Path
    lines: str
    samples_s: dict[str, list[list[float]]] = field(default_factory=dict)

    def measure(self, calls: int, new_tokens: int, folder: Path) -> None:
        """Takes the samples of one round."""
        child = [sys.executable, __file__, "--child", str(calls), "--lines", self.lines]
        for transport, samples in json.loads(self._run(child)).items():
            self.samples_s.setdefault(transport, []).append(samples)
        topology, result = folder / "topology.yaml", folder / "decode.json"
        topology.write_text(_topology("shared", self.lines), encoding="utf-8")
        self._run(
            [
                sys.executable, "-m", "dflash_moe", "bench", "decode", "--model", "demo", "--topology", topology, "--no-local",
                "--modes", "batched", "--repeat", "1", "--prompt-tokens", str(PROMPT_TOKENS), "--new-tokens", str(new_tokens),
                "--json", result,
            ]
        )  # fmt: skip
        (row,) = json.loads(result.read_text(encoding="utf-8"))["rows"]
        self.samples_s.setdefault("decode", []).append(row["samples_s"])

    def _run(self, command: list[Any]) -> str:
        env = {**os.environ, "PYTHONPATH": str(self.tree)}
        if not (self.tree / "dflash_moe" / "config" / "cache.py").is_file():
            # A tree without these settings keeps nothing on disk, and refuses their variables.
            env = {name: value for name, value in env.items() if not name.startswith("DFLASH_MOE_CACHE_")}
        done = subprocess.run(
            command, cwd=self.tree, env=env, text=True, capture_output=True, timeout=CHILD_S, check=False
        )  # fmt: skip
        if done.returncode != 0:
            words = " ".join(map(str, command))
            raise SystemExit(f"{self.name}: exit status {done.returncode} of {words}\n{done.stderr[-2000:]}")
        return done.stdout

    def commit(self) -> str:
        """Returns the commit of the tree, with a plus sign where files differ from it."""
        about = ["git", "-C", str(self.tree), "describe", "--always", "--abbrev=40", "--dirty=+"]
        return subprocess.run(about, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    arguments = _parser().parse_args()
    if arguments.child is not None:
        print(json.dumps(_calls(arguments.child, arguments.lines)))
        return 0
    sys.path.insert(0, str(ROOT))
    from dflash_moe.bench.harness import Recorder
    from dflash_moe.cli.bench.progress import reporting

    build = arguments.build
    if build is None or not list(build.glob("dflash_moe/_core.*.so")):
        raise SystemExit(f"{build} is no checkout with a built core; make one: git worktree add DIR COMMIT && make -C DIR core")
    variants = [
        Variant("earlier", build.resolve(), ""),
        Variant("hedge 0", ROOT, "failure: {hedge: 0}\n"),
        Variant("default", ROOT, ""),
    ]
    params = {
        "rounds": arguments.rounds, "calls": arguments.calls, "new_tokens": arguments.new_tokens,
        "prompt_tokens": PROMPT_TOKENS, "earlier_commit": variants[0].commit(),
    }  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder,
        reporting() as reporter,
        (recorder := Recorder(arguments.json, reporter)).recording(),
    ):
        result = recorder.begin("earlier_commit", params)
        for number in range(arguments.rounds):
            for place in range(len(variants)):
                variant = variants[(number + place) % len(variants)]
                recorder.reporter.advance(len(variants) * number + place, len(variants) * arguments.rounds, variant.name)
                variant.measure(arguments.calls, arguments.new_tokens, Path(folder))
            result.rows = [_row(variant, what) for variant in variants for what in variant.samples_s]
            recorder.save()
        result.summary = [_replicas(arguments.rounds * arguments.calls)]
    for row in result.rows:
        print(f"{row['name']:8} {row['transport']:16} {row['median_s'] * 1e6:9.2f} us")
    print("two holders: {hedges:,} of {calls:,} slices were asked of both".format(**result.summary[0]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?", type=Path, metavar="BUILD", help="checkout of the earlier commit, built")
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds [15]")
    parser.add_argument("--calls", type=int, default=2000, help="calls over each transport in a round [2000]")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens decoded in a round [128]")
    parser.add_argument("--json", type=Path, default=RESULT, help="result file [bench/results/earlier_commit.json]")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lines", default="", help=argparse.SUPPRESS)
    return parser


def _row(variant: Variant, what: str) -> dict[str, Any]:
    from dflash_moe.bench.results import timing_fields

    rounds = variant.samples_s[what]
    samples = [sample for one in rounds for sample in one]
    what = "shared, decode" if what == "decode" else what
    return {"name": variant.name, "transport": what, "tokens": 1, **timing_fields(samples, per_round=len(rounds[0]))}


def _topology(transport: str, lines: str) -> str:
    address = "" if transport == "shared" else f", address: {transport}"
    return f"version: 1\nhost: {{threads: 1}}\nworkers: [{{name: w0, backend: cpu, threads: 1{address}}}]\n{lines}"


def _replicas(calls: int) -> dict[str, Any]:
    """Returns the slices of calls to two holders (`calls` of a worker's counters), and how many of
    them were asked of both.
    """
    from dflash_moe import ExpertRuntime, Topology
    from dflash_moe.testing.tiny import routed_batch, tiny_checkpoint

    workers = ", ".join(f"{{name: w{number}, backend: cpu, threads: 1}}" for number in range(2))
    topology = Topology.parse(f"version: 1\nplacement: {{replicas: 2}}\nworkers: [{workers}]\n")
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder:
        spec = tiny_checkpoint(Path(folder), **_SIZES)
        with ExpertRuntime.start(topology, model=spec) as runtime:
            batch = routed_batch(1, HIDDEN_SIZE, NUM_EXPERTS, TOP_K)
            for _ in range(WARMUP_CALLS):
                runtime.experts(0, *batch)
            before = runtime.stats()["totals"]
            for _ in range(calls):
                runtime.experts(0, *batch)
            after = runtime.stats()["totals"]
    counted = {name: after[name] - before[name] for name in ("calls", "hedges", "hedges_won")}
    return {"name": "replicas 2", **counted, "hedged_share": counted["hedges"] / counted["calls"]}


def _calls(calls: int, lines: str) -> dict[str, list[float]]:
    """Returns the seconds of each call by transport. It runs in a process that imports the package
    of the tree that is measured, so that it uses only what both trees have.
    """
    import time

    import torch

    from dflash_moe import ExpertRuntime, Topology
    from dflash_moe.testing.tiny import routed_batch, tiny_checkpoint

    found: dict[str, list[float]] = {}
    cpus = sorted(os.sched_getaffinity(0))
    batch = tuple(torch.from_numpy(array) for array in routed_batch(1, HIDDEN_SIZE, NUM_EXPERTS, TOP_K))
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder:
        spec = tiny_checkpoint(Path(folder), **_SIZES)
        for transport in TRANSPORTS:
            topology = Topology.parse(_topology(transport, lines))
            with ExpertRuntime.start(topology, model=spec, mode="batched") as runtime:
                _pin(runtime, cpus)
                for _ in range(WARMUP_CALLS):
                    runtime.experts(0, *batch)
                samples = found[transport] = []
                for _ in range(calls):
                    began = time.perf_counter()
                    runtime.experts(0, *batch)
                    samples.append(time.perf_counter() - began)
            # The next worker starts free, as this one did.
            os.sched_setaffinity(0, cpus)
    return found


def _pin(runtime: Any, cpus: list[int]) -> None:
    """Has this thread run on the first core and a worker process on the last one."""
    for process in runtime.worker_processes():
        if process.pid != os.getpid():
            for thread in os.listdir(f"/proc/{process.pid}/task"):
                os.sched_setaffinity(int(thread), {cpus[-1]})
    os.sched_setaffinity(0, {cpus[0]})


if __name__ == "__main__":
    raise SystemExit(main())
