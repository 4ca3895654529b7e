"""Several hosts on one worker: what they get done together, what a token of one waits beside
another's prefill, and what a host that is killed, frozen or slow costs the others. One JSON.

    python -m bench.campaigns.several_hosts [--rounds 5] [--seconds 3] [--faults 100]
        [--json bench/results/several_hosts.json]

The worker has one thread and one core, and all hosts share another one. The model has two layers of
32 experts, top-8, hidden size 2048 and intermediate size 768, in bf16: 302 MB a layer.

Part `together`: four hosts, each with two calls of 8 rows under way. A round measures each of them
alone, one after the other, and then all at once; `in_turn` is what the four would get done in the
same time one after the other. In bf16, and in int4 made at load.

Part `token_beside_prefill`: one host calls with one row again and again, and another one begins
prefills of 4,096 rows meanwhile. A round measures the token's calls without and with the other one.
The bound is 1.25 times what a piece of the prefill and the own row take, and 5 ms: a piece are the
fewest rows that give each expert 8, so 32 of them here, and both are measured alone. Then the
prefills go on for long, and the token's host comes back after silences, since pieces grow with
those: what its first call takes.

Part `faults`: a host calls with 8 rows, and another one floods the worker with as much as its
credits allow. A round measures the first one's calls beside the other one as it is, and while the
other one is frozen and thawed, or stopped for nine tenths of the time, so that it reads slowly; the
p99 of each is to be set against that beside the flood. And while one host after the other floods
the worker and is killed: that is to be set against hosts that come and flood it one after the other
too, but say goodbye and end by themselves.

Every call of every part must have the bits of the first one of its batch, and none may fail.

Needs two cores, 4 GB of memory and 2 GB of disk; about 20 minutes.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.campaigns.faults.by_hand import HandStarted, worker_by_hand
from bench.campaigns.faults.load import ALONE
from bench.campaigns.harness import command_line
from dflash_moe.bench.results import BenchResult, percentile, timing_fields
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.telemetry.machine import usable_cores
from dflash_moe.testing.tiny import routed_batch, tiny_checkpoint, tiny_spec
from dflash_moe.topology import Topology

NUM_HOSTS, ROWS, CALLS_UNDER_WAY = 4, 8, 2
HIDDEN_SIZE, NUM_EXPERTS, TOP_K, NUM_LAYERS = 2048, 32, 8, 2
_SIZES = {
    "hidden_size": HIDDEN_SIZE, "moe_intermediate_size": 768, "num_experts": NUM_EXPERTS, "top_k": TOP_K,
    "num_layers": NUM_LAYERS,
}  # fmt: skip
PREFILL_ROWS, PIECE_ROWS = 4096, 32
# As many as give each of 32 experts 8 pairs while 8 of them are asked for a row.
assert PIECE_ROWS * TOP_K == 8 * NUM_EXPERTS
# After which the token's host comes back beside a prefill.
SILENCES_S = (0.5, 2.0, 8.0)
WORKER_CORE, HOST_CORE = 0, 1
# A host answers within so much time, in which it starts and loads, or measures; and it is gone.
ANSWER_S, STOP_S = 120.0, 60.0
# What happens to the other host, and what calls beside it are set against.
FAULTS = {"killed": "in turn", "frozen": "flood", "slow": "flood"}
# So many hosts flood the worker in one measurement, one after the other, and each for so much of
# its part of the time.
HOSTS_IN_TURN, FLOODED = 4, 0.9
# For how long the other host is stopped, and then runs.
STOPPED_S = {"frozen": 0.5, "slow": 0.09}
RUNNING_S = {"frozen": 0.5, "slow": 0.01}


@dataclass(slots=True)
class Host:
    """A host in a process of its own, which calls when it is told to and says what that took."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, model: Path, worker: HandStarted, weights: str) -> Host:
        """Starts it at the worker. It is ready once it has said so."""
        reached = f"address: '{worker.address}', weights: {weights}"
        topology = f"version: 1\nworkers:\n  - {{name: far, threads: 1, {reached}}}\n"
        command = ["taskset", "-c", str(HOST_CORE), sys.executable, "-m", "bench.campaigns.several_hosts", "--host"]
        process = subprocess.Popen(
            [*command, str(model), topology], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )  # fmt: skip
        host = cls(process)
        host.answer()
        return host

    def begin(self, rows: int, seconds: float, threads: int = 1) -> None:
        """Has it call for so long; `answer` waits for the end."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{rows} {seconds} {threads}\n")
        self.process.stdin.flush()

    def answer(self) -> list[float]:
        """Returns the seconds of each call that it has made."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], ANSWER_S)[0]:
            raise RuntimeError(f"a host said nothing for {ANSWER_S:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a host ended: exit status {self.process.wait(STOP_S)}")
        samples: list[float] = json.loads(line)
        return samples

    def call(self, rows: int, seconds: float, threads: int = 1) -> list[float]:
        """Has it call, and returns what each call took, in seconds."""
        self.begin(rows, seconds, threads)
        return self.answer()

    def leave(self) -> None:
        """Has it say goodbye and end once it has called."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def stop(self) -> None:
        """Ends it, whatever it does."""
        self.process.kill()
        self.process.wait(STOP_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def be_host(model: Path, topology: str) -> None:
    """The loop of a host: orders come line by line, and answers go back."""
    runtime = ExpertRuntime.start(Topology.parse(topology), model=tiny_spec(model, dtype="bf16"), **ALONE)
    with runtime:
        print(json.dumps([]), flush=True)
        for line in sys.stdin:
            rows, seconds, threads = line.split()
            print(json.dumps(_call(runtime, int(rows), float(seconds), int(threads))), flush=True)


@cache
def _batches(rows: int, seed: int) -> list[Any]:
    """Returns batches of so many rows, which are made once."""
    return [routed_batch(rows, HIDDEN_SIZE, NUM_EXPERTS, TOP_K, seed=seed + one) for one in range(4)]


def _call(runtime: ExpertRuntime, rows: int, seconds: float, threads: int) -> list[float]:
    samples: list[float] = []  # appending is atomic
    until = time.monotonic() + seconds

    def call_on(seed: int) -> None:
        batches = _batches(rows, seed)
        layer, expected = 0, dict[int, np.ndarray[Any, Any]]()
        while not layer or time.monotonic() < until:  # once at least, however late this thread comes to run
            began = time.monotonic()
            found = runtime.experts(layer % NUM_LAYERS, *batches[layer % len(batches)])
            samples.append(time.monotonic() - began)
            if not np.array_equal(expected.setdefault(layer % len(batches), found), found):
                print("wrong bits", file=sys.stderr, flush=True)
                os._exit(1)
            layer += 1

    # Numbers of processes differ, and so do the rows of hosts.
    callers = [threading.Thread(target=call_on, args=(os.getpid() * 16 + 4 * one,)) for one in range(threads)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    return samples


@contextmanager
def hosts_of(model: Path, worker: HandStarted, count: int, weights: str = "auto") -> Iterator[list[Host]]:
    """Starts so many hosts at one worker."""
    with ExitStack() as stack:
        hosts = []
        for _ in range(count):
            host = Host.start(model, worker, weights)
            stack.callback(host.stop)
            hosts.append(host)
        yield hosts


@contextmanager
def _worker(spec: ModelSpec, folder: Path) -> Iterator[HandStarted]:
    address = f"unix://{folder}/far.sock"
    with worker_by_hand(spec, folder, address, "--threads", "1", prefix=["taskset", "-c", str(WORKER_CORE)]) as worker:
        yield worker


def _timing(samples: Sequence[float]) -> dict[str, Any]:
    """Returns the fields of a row of calls, which keeps their quantiles: a fast machine makes
    thousands.
    """
    return {**timing_fields(samples, per_round=len(samples)), "p99_s": percentile(samples, 0.99)}


@dataclass(slots=True)
class Campaign:
    """What was asked for, and what came of it."""

    spec: ModelSpec
    folder: Path
    rounds: int
    seconds: float
    faults: int
    rows: list[dict[str, Any]]  # of the result; measuring adds to them

    def measure(self, parts: Sequence[str]) -> None:
        """Measures the parts, each with a worker of its own."""
        if "together" in parts:
            for weights in ("auto", "int4"):
                self._together(weights)
        if "token" in parts:
            self._token_beside_prefill()
        if "faults" in parts:
            self._faults()

    def _together(self, weights: str) -> None:
        alone: list[list[float]] = []  # rows a second, by round and host
        at_once: list[float] = []
        with (
            _worker(self.spec, self.folder / f"together_{weights}") as worker,
            hosts_of(Path(self.spec.path), worker, NUM_HOSTS, weights) as hosts,
        ):
            for number in range(-1, self.rounds):
                rates = [self._rate([host]) for host in hosts]
                together = self._rate(hosts)
                if number < 0:
                    continue  # warms all of them up
                alone.append(rates)
                at_once.append(together)
                print(f"together {weights}: {together:.0f} rows/s, in turn {sum(rates) / len(rates):.0f}", flush=True)
        in_turn = [sum(rates) / len(rates) for rates in alone]
        name = "bf16" if weights == "auto" else weights
        ratios = [both / one for both, one in zip(at_once, in_turn, strict=True)]
        self.rows.append(
            {
                "name": name, "together_rows_per_s": median(at_once), "in_turn_rows_per_s": median(in_turn),
                "together_over_in_turn": median(ratios), "rounds_together": at_once, "rounds_in_turn": in_turn,
            }
        )  # fmt: skip

    def _rate(self, hosts: Sequence[Host]) -> float:
        """Returns how many rows a second so many hosts get done at once."""
        for host in hosts:
            host.begin(ROWS, self.seconds, CALLS_UNDER_WAY)
        return sum(len(host.answer()) for host in hosts) * ROWS / self.seconds

    def _token_beside_prefill(self) -> None:
        quiet, beside, pieces, bounds = [], [], [], []
        first: dict[float, list[float]] = {silence: [] for silence in SILENCES_S}
        with (
            _worker(self.spec, self.folder / "token") as worker,
            hosts_of(Path(self.spec.path), worker, 2) as (token, prefill),
        ):
            token.call(1, self.seconds)
            prefill.call(PREFILL_ROWS, self.seconds)
            for _ in range(self.rounds):
                quiet.append(token.call(1, self.seconds))
                pieces.append(prefill.call(PIECE_ROWS, self.seconds))
                token.begin(1, self.seconds)
                prefill.begin(PREFILL_ROWS, self.seconds)
                beside.append(token.answer())
                prefill.answer()
                bounds.append(1.25 * (median(pieces[-1]) + median(quiet[-1])) + 0.005)
                print(f"token: p99 {percentile(beside[-1], 0.99):.4f} s, bound {bounds[-1]:.4f} s", flush=True)
            for _ in range(self.rounds):
                prefill.begin(PREFILL_ROWS, sum(SILENCES_S) + self.seconds)
                for silence, samples in first.items():
                    token.call(1, 0.2)  # pieces are as small as they get from here on
                    time.sleep(silence)
                    samples.append(token.call(1, 0.2)[0])
                prefill.answer()
                print(f"first calls: {[samples[-1] for samples in first.values()]}", flush=True)
        for name, rounds in (("token alone", quiet), ("piece alone", pieces), ("token beside a prefill", beside)):
            self.rows.append({"name": name, **_timing([one for samples in rounds for one in samples])})
        self.rows[-1]["bound_s"] = median(bounds)
        for silence, samples in first.items():
            self.rows.append({"name": f"first call after {silence:g} s", **_timing(samples)})

    def _faults(self) -> None:
        calls: dict[str, list[float]] = {what: [] for what in ("flood", "in turn", *FAULTS)}
        ratios: dict[str, list[float]] = {what: [] for what in FAULTS}
        count = dict.fromkeys(FAULTS, 0)
        with (
            _worker(self.spec, self.folder / "faults") as worker,
            hosts_of(Path(self.spec.path), worker, 1) as (host,),
        ):
            host.call(ROWS, self.seconds)
            while any(count[what] < self.faults for what in FAULTS):
                found = {what: self._beside(host, worker, what, count) for what in calls}
                for what, samples in found.items():
                    calls[what] += samples
                for what, other in FAULTS.items():
                    ratios[what].append(percentile(found[what], 0.99) / percentile(found[other], 0.99))
                print("faults:", {what: (count[what], round(median(ratios[what]), 3)) for what in FAULTS}, flush=True)
        for what, samples in calls.items():
            row = {"name": f"beside {what}", **_timing(samples)}
            if what in count:
                row |= {"faults": count[what], "set_against": f"beside {FAULTS[what]}"}
            self.rows.append(row)

    def _beside(self, host: Host, worker: HandStarted, what: str, count: dict[str, int]) -> list[float]:
        """Returns what calls take beside another host to which this happens again and again."""
        is_in_turn = what in ("in turn", "killed")
        with hosts_of(Path(self.spec.path), worker, HOSTS_IN_TURN if is_in_turn else 1) as others:
            # Hosts start and make their batches before anything is measured: they use the core of
            # the one that is.
            for other in others:
                other.call(ROWS, 0.0, CALLS_UNDER_WAY)
            host.begin(ROWS, self.seconds)
            until = time.monotonic() + self.seconds
            for other in others:
                flood_s = self.seconds / HOSTS_IN_TURN * FLOODED
                other.begin(ROWS, flood_s if what == "in turn" else 3600.0, CALLS_UNDER_WAY)
                if what == "in turn":
                    other.leave()
                if is_in_turn:
                    time.sleep(flood_s)
                if what == "killed":
                    other.process.kill()
                    count[what] += 1
                while what in STOPPED_S and time.monotonic() < until:
                    other.process.send_signal(signal.SIGSTOP)
                    time.sleep(STOPPED_S[what])
                    other.process.send_signal(signal.SIGCONT)
                    time.sleep(RUNNING_S[what])
                    count[what] += 1
            return host.answer()


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    parser = command_line(__doc__, "several_hosts")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds [%(default)s]")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement [%(default)s]")
    parser.add_argument("--faults", type=int, default=100, help="of each kind [%(default)s]")
    parser.add_argument("--parts", default="together,token,faults", help="comma-separated [%(default)s]")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the campaign out")
    parser.add_argument("--host", nargs=2, metavar=("MODEL", "TOPOLOGY"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.host:
        be_host(Path(given.host[0]), given.host[1])
        return 0
    if usable_cores() < 2:
        print("two cores are needed: one for the worker, one for the hosts", file=sys.stderr)
        return 2
    sizes = _SIZES | ({"moe_intermediate_size": 16} if given.tiny else {})
    params = {"rounds": given.rounds, "seconds": given.seconds, "hosts": NUM_HOSTS, "rows": ROWS, **sizes}
    result = BenchResult("several_hosts", params)  # of the sources as they are now
    with tempfile.TemporaryDirectory(prefix="dflash-hosts-") as folder:
        spec = tiny_checkpoint(Path(folder) / "model", dtype="bf16", **sizes)
        campaign = Campaign(spec, Path(folder), given.rounds, given.seconds, given.faults, result.rows)
        campaign.measure(given.parts.split(","))
    result.complete = True
    result.write(given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
