"""Faults while the mode is changed every second, and while this process has no descriptor left for
a part of a second after each: workers are killed, stopped, scribble over shared memory, or are
behind a path that passes nothing, or everything late. Another worker holds their shards, or the
host's processor stands in for them, so that no call fails.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.campaigns.faults.by_hand import worker_by_hand
from bench.campaigns.faults.campaign import Campaign, Run, spread
from bench.campaigns.faults.hostile_path import HostilePath
from bench.campaigns.faults.leftovers import belongings, left_since
from bench.campaigns.faults.load import JOIN_S, Load, is_used, make_model, pids_of, start, state_of, wait_until
from bench.campaigns.faults.scribblers import scribble
from dflash_moe.config.settings import MAX_DEATHS
from dflash_moe.errors import DflashError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol.keys import write_key_file
from dflash_moe.topology import Topology

# The slots of each do not fit the next.
MODES: tuple[dict[str, Any], ...] = (
    {"mode": "batched", "batch_capacity": 4096},
    {"mode": "stream", "stream_tokens": 16},
    {"mode": "batched", "batch_capacity": 128},
)
EVERY_S = 1.0
# There is no descriptor left for so long, less than calls wait for somebody who comes back.
LACK_S = (0.2, 0.8)
# A passing fault lasts so long; one that is to last goes on until the worker is lost.
PASSING_S = (0.3, 1.0)
STALL_S = 2.0
STALL_GOAL_MS = 1e3 * (STALL_S + 0.5)
# By how much a path that is late holds up what it passes.
LATE_S = 0.05


class CutPath(HostilePath):
    """Passes nothing on while it is cut, and what it has then; or all of it late."""

    def __init__(self, host: str, port: int) -> None:
        self._is_whole = threading.Event()
        self._is_whole.set()
        self._late_s = 0.0
        super().__init__(host, port)

    def cut(self) -> None:
        """Passes nothing on from now on."""
        self._is_whole.clear()

    def slow(self) -> None:
        """Passes everything on late from now on."""
        self._late_s = LATE_S

    def heal(self) -> None:
        """Passes everything on at once again."""
        self._late_s = 0.0
        self._is_whole.set()

    def _forward(self, number: int, received: bytearray, to: socket.socket, is_dialled: bool) -> None:
        self._is_whole.wait(JOIN_S)
        time.sleep(self._late_s)
        super()._forward(number, received, to, is_dialled)

    def __enter__(self) -> CutPath:
        return self


@dataclass(slots=True)
class Changes:
    """The changes of mode of one scene: how long each took, how many were refused because this
    process lacked something, and what else became of them.
    """

    took_s: list[float] = field(default_factory=list)
    refused: int = 0
    errors: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def going_on(self, runtime: ExpertRuntime) -> Iterator[None]:
        """Changes the mode every second for the length of the block."""
        is_over = threading.Event()

        def change() -> None:
            number = 0
            while not is_over.wait(EVERY_S):
                number += 1
                began = time.monotonic()
                try:
                    runtime.set_mode(**MODES[number % len(MODES)])
                except DflashError as error:
                    self.refused += int(error.code == "system")
                    if error.code != "system":
                        self.errors.append(str(error))
                self.took_s.append(time.monotonic() - began)

        thread = threading.Thread(target=change)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(JOIN_S)


def lack_descriptors(seconds: float) -> None:
    """Keeps this process from opening anything for so long; also what is closed meanwhile is no
    room.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1, limits[1]))
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            time.sleep(0.005)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@dataclass(slots=True)
class Scene:
    """A runtime under load: `victims` may be broken, and `path` is the one to a worker by hand."""

    given: Run
    runtime: ExpertRuntime
    victims: tuple[str, ...]
    path: CutPath | None = None

    def break_once(self, kind: str) -> dict[str, Any]:
        """Breaks something, takes the descriptors away for a while, and waits until all is well;
        returns how it ended.
        """
        victim = self.given.drawn.choice(self.victims)
        deaths = state_of(self.runtime, victim).deaths
        mend = self._begin(kind, victim)
        began = time.monotonic()
        lack_descriptors(self.given.drawn.uniform(*LACK_S))
        if kind.endswith("until lost"):
            was_lost = wait_until(lambda: state_of(self.runtime, victim).deaths > deaths)
        else:
            was_lost = True
            time.sleep(max(0.0, began + self.given.drawn.uniform(*PASSING_S) - time.monotonic()))
        mend()
        healed = time.monotonic()
        is_back = wait_until(is_used(self.runtime, victim)) and was_lost
        return {
            "worker": victim, "deaths": state_of(self.runtime, victim).deaths - deaths, "back_s": time.monotonic() - healed,
            "verdict": "back" if is_back else "away",
        }  # fmt: skip

    def _begin(self, kind: str, victim: str) -> Callable[[], None]:
        """Breaks something, and returns what mends it."""
        if self.path is not None:
            (self.path.slow if kind == "late" else self.path.cut)()
            return self.path.heal
        pid = pids_of(self.runtime)[victim]
        if kind == "scribble":
            scribble(pid, self.given.drawn)
            return lambda: None
        _send(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        return lambda: _send(pid, signal.SIGCONT)


def _send(pid: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, what)


def run(given: Run) -> None:
    """Has each kind of fault `given.size` times, with each kind of remedy."""
    spec = make_model(given.folder / "model")
    often = {"restart_backoff_ms": (20, 100), "stall_timeout_s": STALL_S}
    processes = ("kill", "stop", "stop until lost")
    for who, kinds, overrides in (
        ("a replica", (*processes, "scribble"), {}),
        ("the host", processes, {"replicas": 1, "host_fallback": "mapped"}),
    ):
        before = belongings()
        with start(spec, **{**often, **overrides}) as runtime:
            _break_often(Scene(given, runtime, ("w0", "w1")), kinds, who)
        del runtime
        _judge_leftovers(given, before, who)
    before = belongings()
    with _reached(given, spec, **often) as (runtime, path):
        _break_often(Scene(given, runtime, ("far",), path), ("cut", "cut until lost", "late"), "a replica")
    del runtime, path
    _judge_leftovers(given, before, "a replica, by TCP")


@contextlib.contextmanager
def _reached(given: Run, spec: ModelSpec, **overrides: Any) -> Iterator[tuple[ExpertRuntime, CutPath]]:
    """Starts a worker by hand, `far`, behind a path that can be cut, and one of the host's own."""
    key = given.folder / "shared.key"
    write_key_file(key)
    with (
        worker_by_hand(spec, given.folder / "far", "tcp://127.0.0.1:0", "--key-file", str(key)) as worker,
        CutPath(*worker.place) as path,
    ):
        topology = Topology.parse(
            "version: 1\nplacement: {replicas: 2}\nworkers:\n"
            f"  - {{name: far, threads: 1, address: '{path.address}'}}\n  - {{name: near, threads: 1}}\n"
        )
        settings = {"host_fallback": "none", "key_file": key, "restart_deaths": MAX_DEATHS, **overrides}
        with ExpertRuntime.start(topology, model=spec, **settings) as runtime:
            yield runtime, path


def _break_often(scene: Scene, kinds: tuple[str, ...], who: str) -> None:
    given = scene.given
    load, changes = Load.quiet(scene.runtime, seed=given.seed), Changes()
    with load.running(seed=given.seed), changes.going_on(scene.runtime):
        for kind in kinds:
            calls, failed, wrong = load.calls, load.failed, load.wrong
            stalls_s, back_s = [], []
            away = 0
            for _ in range(given.size):
                load.take_worst_s()
                ended = scene.break_once(kind)
                stalls_s.append(load.take_worst_s())
                back_s.append(ended["back_s"])
                away += int(ended["verdict"] != "back")
                given.event(
                    kind, answered_by=who, stall_ms=1e3 * stalls_s[-1], failed_calls=load.failed, wrong_results=load.wrong,
                    **ended,
                )  # fmt: skip
            zero = {"failed calls": load.failed - failed, "wrong results": load.wrong - wrong, "not back": away}
            for what, value in zero.items():
                given.claim(f"{kind}, {who} answers: {what}", value, at_most=0)
            given.goal(f"{kind}, {who} answers: longest stall, ms", 1e3 * max(stalls_s), at_most=STALL_GOAL_MS)
            given.row(
                f"{kind}, {who} answers", stalls_s, faults=len(stalls_s), calls=load.calls - calls,
                failed_calls=zero["failed calls"], wrong_results=zero["wrong results"], not_back=away,
                **spread("stall", stalls_s), **spread("back", back_s, unit_ms=False),
                first_error=load.errors[0][2] if load.errors else "",
            )  # fmt: skip
    name = f"changes of mode, {who}, with {', '.join(kinds)}"
    given.claim(f"{name}: failed but for what the host lacked", len(changes.errors), at_most=0)
    given.claim(name, len(changes.took_s), at_least=1)
    given.row(
        name, changes.took_s, calls=len(changes.took_s), failed_calls=len(changes.errors), refused=changes.refused,
        **spread("stall", changes.took_s), first_error=changes.errors[0] if changes.errors else "",
    )  # fmt: skip


def _judge_leftovers(given: Run, before: Any, who: str) -> None:
    gc.collect()  # the threads with which a stand-in computed go with the runtime
    for what, value in left_since(before).items():
        given.claim(f"{who} answers: {what.replace('_', ' ')}", value, at_most=0)


def _lacking() -> str:
    return "" if os.geteuid() == 0 else "writing into another process needs root"


CAMPAIGN = Campaign(
    "mode-changes", "faults with the mode changed every second and descriptors running out", "times each kind", 5, 1, run,
    _lacking,
)  # fmt: skip
