"""Faults inside of device steps, on the simulated card: workers killed or stopped and the host's
thread interrupted at drawn moments of decode steps. Every step ends with the bits of an undisturbed
one, by a replay with plain calls where it must, and the next one is the device's again.

    python -m bench.campaigns.device_step_faults [--faults 200] [--lone-faults 20] [--seed 0]
        [--events FILE] [--json bench/results/device_step_faults.json]

Three worker processes on the CPU hold every shard twice (`replicas`), or one holds all (`lone`,
whose steps wait for its restart). A step calls each layer of a small model with the former layer's
result. A fault is a SIGKILL, a SIGSTOP (sent on once the step has ended) or a Ctrl-C in the thread
of the step, which the caller answers by repeating the step. It comes a drawn time after the begin
of a drawn layer's call, up to what a call takes; a few thus come after the step. A step's stall is
what it takes beyond the median of undisturbed steps. The same seed draws the same faults. Exit
status 1 where a step failed, bits differ, or steps did not return to the device; times are shown
against their goal and decide nothing, since they are the machine's.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.campaigns.harness import Broken, breaking_line
from dflash_moe import DflashError, ExpertRuntime, Topology
from dflash_moe.bench.results import percentile
from dflash_moe.testing.tiny import routed_batch, tiny_checkpoint

LAYERS, HIDDEN, EXPERTS, TOP_K, TOKENS = 3, 96, 9, 3, 4
KINDS = ("kill", "stop", "interrupt")
# Undisturbed steps, whose median is what a step takes.
QUIET_STEPS = 20
# A worker is ready again, and the next step the device's, within this time, or the campaign gives
# up. A started process takes a second, on a busy machine much more.
READY_S = 60.0
# Counts that must be zero.
CLEAN = ("failed_steps", "wrong_bits", "not_back")
GOALS: dict[str, dict[str, float]] = {"replicas": {"stall_max_ms": 1000.0}, "lone": {}}
HOST = "version: 1\nhost: {device: 'sim:0', simulate: cuda}\n"
SCENES = {
    "replicas": HOST + "placement: {policy: even, replicas: 2}\nworkers:\n"
    + "".join(f"  - {{name: w{i}, backend: cpu, threads: 1}}\n" for i in range(3)),
    "lone": HOST + "workers:\n  - {name: w0, backend: cpu, threads: 1}\n",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """One fault, and how the step went that it fell into."""

    kind: str
    worker: str
    layer: int
    delay_ms: float
    took_ms: float
    stall_ms: float
    was_replayed: bool
    error: str
    is_right: bool
    # When the worker was ready again, counted from the end of the step, and whether a step was the
    # device's then.
    back_ms: float
    is_back: bool


class Scene:
    """A runtime and its steps."""

    def __init__(self, runtime: ExpertRuntime) -> None:
        self.runtime = runtime
        self.inputs = routed_batch(TOKENS, HIDDEN, EXPERTS, TOP_K, seed=1)
        # What begins with the call of this layer, once.
        self.striker: tuple[int, threading.Timer] | None = None
        self.expected = self.calls()
        self.usual_s = self._usual_s()

    def calls(self) -> bytes:
        """Makes the calls of a step, and returns the bits of every layer's result."""
        hidden, ids, weights = self.inputs
        found = []
        for layer in range(LAYERS):
            if self.striker is not None and self.striker[0] == layer:
                # Taken first, because its own interrupt may come while it starts.
                (_, striker), self.striker = self.striker, None
                striker.start()
            hidden = self.runtime.experts(layer, hidden, ids, weights)
            found.append(np.asarray(hidden).tobytes())
        return b"".join(found)

    def step(self) -> bytes:
        """Makes one step as a model's loop does."""
        return self.runtime.run_step(self.calls)

    def counts(self) -> dict[str, int]:
        """Returns how steps went so far."""
        found: dict[str, int] = self.runtime.stats()["device_steps"]
        return found

    def _usual_s(self) -> float:
        times = []
        for _ in range(QUIET_STEPS):
            began = time.monotonic()
            assert self.step() == self.expected
            times.append(time.monotonic() - began)
        return statistics.median(times)

    def is_back(self, until: float) -> bool:
        """Waits until all workers are ready and a step is the device's from its begin to its end,
        without a replay; returns whether that came about.
        """
        while time.monotonic() < until:
            if all(one.state == "ready" for one in self.runtime.workers()):
                before = self.counts()
                assert self.step() == self.expected
                after = self.counts()
                if after["steps"] == before["steps"] + 1 and after["replays"] == before["replays"]:
                    return True
            time.sleep(0.02)
        return False

    def strike(self, kind: str, worker: str, layer: int, delay_s: float) -> Event:
        """Makes a step, with a fault `delay_s` after the begin of a layer's call."""
        pid = next(one.pid for one in self.runtime.worker_processes() if one.name == worker)
        target, number = {
            "kill": (pid, signal.SIGKILL), "stop": (pid, signal.SIGSTOP), "interrupt": (os.getpid(), signal.SIGINT),
        }[kind]  # fmt: skip
        before = self.counts()["replays"]
        striker = threading.Timer(delay_s, os.kill, (target, number))
        found, error = b"", ""
        self.striker = (layer, striker)
        began = time.monotonic()
        try:
            try:
                found = self.step()
                took_s = time.monotonic() - began
                striker.join()
                time.sleep(0)  # an interrupt that comes after the step is raised here
            except KeyboardInterrupt:
                found = self.step()
                took_s = time.monotonic() - began
        except DflashError as failed:
            error, took_s = str(failed), time.monotonic() - began
        striker.join()
        was_replayed = self.counts()["replays"] > before
        ended = time.monotonic()
        if kind == "stop":
            # One that was stopped for as long as a lost one was killed by the supervisor.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        is_back = self.is_back(ended + READY_S)
        return Event(
            kind, worker, layer, delay_s * 1e3, took_s * 1e3, (took_s - self.usual_s) * 1e3, was_replayed, error,
            found == self.expected, (time.monotonic() - ended) * 1e3, is_back,
        )  # fmt: skip


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments()
    broken = Broken.begin("device_step_faults", faults=given.faults, lone_faults=given.lone_faults, seed=given.seed)
    for name, count in (("replicas", given.faults), ("lone", given.lone_faults)):
        events, usual_ms = _run(name, count, given.seed)
        broken.events += [{"scene": name, **asdict(event)} for event in events]
        for kind in KINDS:
            found = [event for event in events if event.kind == kind]
            if found:
                row = _row(name, kind, found, usual_ms)
                broken.row(row, _shown(row), zero=CLEAN, goals=GOALS[name])
    return broken.end(given)


def _run(name: str, count: int, seed: int) -> tuple[list[Event], float]:
    """Returns the events of one scene, and how many milliseconds a step takes without one."""
    rng = random.Random(f"{name} {seed}")
    with tempfile.TemporaryDirectory() as folder:
        spec = tiny_checkpoint(
            Path(folder), hidden_size=HIDDEN, num_experts=EXPERTS, top_k=TOP_K, num_layers=LAYERS
        )  # fmt: skip
        topology = Topology.parse(SCENES[name])
        # Workers die far more often than one whose process is broken.
        limits: dict[str, Any] = {"restart_deaths": 1000, "park_s": READY_S, "call_timeout_s": READY_S}
        with ExpertRuntime.start(topology, model=spec, **limits) as runtime:
            scene = Scene(runtime)
            workers = [one.name for one in runtime.workers()]
            events: list[Event] = []
            while len(events) < count and (not events or events[-1].is_back):
                delay_s = rng.uniform(0, 1) * scene.usual_s / LAYERS
                events.append(scene.strike(rng.choice(KINDS), rng.choice(workers), rng.randrange(LAYERS), delay_s))
            return events, scene.usual_s * 1e3


def _row(scene: str, kind: str, events: list[Event], usual_ms: float) -> dict[str, Any]:
    stalls = [event.stall_ms for event in events]
    back = [event.back_ms for event in events]
    return {
        "name": f"{scene}: {kind}", "scene": scene, "kind": kind, "faults": len(events), "usual_step_ms": usual_ms,
        "replays": sum(event.was_replayed for event in events),
        "failed_steps": sum(event.error != "" for event in events),
        "wrong_bits": sum(not event.is_right and event.error == "" for event in events),
        "not_back": sum(not event.is_back for event in events),
        "stall_p50_ms": percentile(stalls, 0.5), "stall_p99_ms": percentile(stalls, 0.99), "stall_max_ms": max(stalls),
        "back_p50_ms": percentile(back, 0.5), "back_max_ms": max(back),
    }  # fmt: skip


def _shown(row: dict[str, Any]) -> str:
    return (
        f"{row['name']}: {row['faults']} faults, {row['replays']} steps replayed, {row['failed_steps']} failed, "
        f"{row['wrong_bits']} with wrong bits, {row['not_back']} not back on the device; a step takes "
        f"{row['usual_step_ms']:.1f} ms, stall p50 {row['stall_p50_ms']:.1f} ms, p99 {row['stall_p99_ms']:.1f} ms, "
        f"max {row['stall_max_ms']:.0f} ms; all well again after {row['back_p50_ms']:.0f} ms, at most "
        f"{row['back_max_ms']:.0f} ms"
    )


def _arguments() -> argparse.Namespace:
    parser = breaking_line(__doc__, "device_step_faults")
    parser.add_argument("--faults", type=int, default=200, help="where every shard has two holders [%(default)s]")
    parser.add_argument("--lone-faults", type=int, default=20, help="where one worker holds all [%(default)s]")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
