"""The host of the campaigns `partitions` and `lossy-link`, which runs in a network namespace of its
own:

    python -m bench.campaigns.faults.partitioned_host MODEL KEY ADDRESS SIZE SEED HOST WORKER
    python -m bench.campaigns.faults.partitioned_host MODEL KEY ADDRESS SIZE SEED ORDERS

MODEL is a folder for its copy of the weights. HOST and WORKER are the two namespaces, whose link is
cut; ORDERS is the descriptor through which a lossy cable is told how to be. Every fault comes once
more while the mode is changed each second and this process has no descriptor left for a part of it.
It prints a line of JSON for each cut or fault, and at last one with the sums.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from bench.campaigns.faults.leftovers import belongings, left_since
from bench.campaigns.faults.load import ALONE, Load, is_used, make_model, state_of, wait_until
from bench.campaigns.faults.lossy_cable import FAULTS, WELL, RemoteCable
from bench.campaigns.faults.mode_changes import LACK_S, Changes, lack_descriptors
from bench.campaigns.faults.two_machines import HOST_LINK, WAYS, TwoMachines
from dflash_moe.config.settings import MAX_DEATHS
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.topology import Topology

EVERY_PACKET = 3  # ETH_P_ALL of linux/if_ether.h
# Calls that are looked for in what passed the link.
CAPTURED_CALLS = 5
# A short cut ends before the worker is given up after 2 s, a long one does not.
SHORT_S, LONG_S = (0.3, 1.0), (3.0, 4.0)
FAULT_S = (3.0, 5.0)


class Capture:
    """Every packet of one link, from now until `close`."""

    def __init__(self, link: str) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PACKET))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        self._socket.bind((link, 0))
        self._socket.settimeout(0.1)
        self._packets: list[bytes] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                self._packets.append(self._socket.recv(1 << 17))
            except TimeoutError:
                continue

    def close(self) -> bytes:
        """Returns what passed."""
        self._is_over.set()
        self._thread.join(10.0)
        self._socket.close()
        return b"".join(self._packets)


class Link(Protocol):
    """What is broken and mended again, some way or other."""

    def faults(self, size: int) -> Iterator[tuple[str, str, tuple[float, float]]]:
        """Returns the phase and the way of each fault, and the bounds of its length in seconds."""

    def cut(self, way: str) -> None:
        """Breaks it. Raises OSError."""

    def heal(self, way: str) -> dict[str, Any]:
        """Mends it, and returns what else is known of the fault. Raises OSError."""


class CutLink:
    """The link of two machines, which is cut."""

    def __init__(self, machines: TwoMachines) -> None:
        self._machines = machines
        self.cut = machines.cut

    def faults(self, size: int) -> Iterator[tuple[str, str, tuple[float, float]]]:
        """Returns short cuts and long ones in turn; where `size` is 1, one of all is long."""
        for number in range(size):
            for way in WAYS:
                is_long = number % 2 == 1 or (size == 1 and way == "both")
                yield ("until lost", way, LONG_S) if is_long else ("short", way, SHORT_S)

    def heal(self, way: str) -> dict[str, Any]:
        """Undoes `cut`."""
        self._machines.heal(way)
        return {}


class LossyLink:
    """A cable that loses packets, or delays them, or takes few at a time."""

    def __init__(self, cable: RemoteCable) -> None:
        self._cable = cable

    def faults(self, size: int) -> Iterator[tuple[str, str, tuple[float, float]]]:
        """Returns each of the faults `size` times."""
        for _ in range(size):
            for way in FAULTS:
                yield "lossy", way, FAULT_S

    def cut(self, way: str) -> None:
        """Makes the cable one of FAULTS."""
        self._cable.become(*FAULTS[way])

    def heal(self, _way: str) -> dict[str, Any]:
        """Makes it well, and returns the packets that passed and that did not."""
        return self._cable.become(WELL, WELL)


def main(model: str, key: str, address: str, size: str, seed: str, *where: str) -> None:
    """Does what the module text says."""
    link: Link = CutLink(TwoMachines((where[0], where[1]))) if len(where) > 1 else LossyLink(RemoteCable(int(where[0])))
    spec = make_model(Path(model))
    drawn = random.Random(f"partitions {seed}")
    before = belongings()
    sums = _captured(spec, key, address)
    settings = {**ALONE, "key_file": key, "restart_deaths": MAX_DEATHS, "restart_backoff_ms": (20, 200)}
    with ExpertRuntime.start(_topology(address, is_alone=False), model=spec, **settings) as runtime:
        load, changes = Load.quiet(runtime, seed=int(seed)), Changes()
        with load.running(seed=int(seed)):
            _break_often(link, int(size), drawn, load, is_changing=False)
            with changes.going_on(runtime):
                _break_often(link, int(size), drawn, load, is_changing=True)
        totals = runtime.stats()["totals"]
    sums |= {
        "changes": len(changes.took_s), "longest_change_s": max(changes.took_s, default=0.0),
        "changes_refused": changes.refused, "changes_failed": len(changes.errors),
        "first_failed_change": changes.errors[0] if changes.errors else "",
    }  # fmt: skip
    sums |= {"calls": load.calls, "failed_calls": load.failed, "wrong_results": load.wrong, "hedges": totals["hedges"]}
    _say(
        sums | {"failovers": totals["failovers"], "first_error": load.errors[0][2] if load.errors else ""} | left_since(before)
    )


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _topology(address: str, *, is_alone: bool) -> Topology:
    near = "" if is_alone else "  - {name: near, threads: 1}\n"
    replicas = 1 if is_alone else 2
    far = f"  - {{name: far, threads: 1, address: '{address}'}}\n"
    return Topology.parse(f"version: 1\nplacement: {{replicas: {replicas}}}\nworkers:\n{near}{far}")


def _captured(spec: ModelSpec, key: str, address: str) -> dict[str, Any]:
    """Calls the far worker alone while packets are captured, and looks for the rows that were sent
    and those that came back. `ipc.encryption` is what it is when nobody states it.
    """
    with ExpertRuntime.start(_topology(address, is_alone=True), model=spec, key_file=key, dtype="f32", **ALONE) as runtime:
        capture = Capture(HOST_LINK)
        load = Load.quiet(runtime, tokens=(16,))
        for _ in range(CAPTURED_CALLS):
            load.call(load.works[0])
        seen = capture.close()
    rows = [row.tobytes() for work in load.works for row in work.tensors[0]]
    rows += [row.tobytes() for work in load.works for row in work.expected]
    return {
        "captured_bytes": len(seen), "sent_bytes": sum(map(len, rows)), "known_rows_seen": sum(row in seen for row in rows),
    }  # fmt: skip


def _break_often(link: Link, size: int, drawn: random.Random, load: Load, *, is_changing: bool) -> None:
    for phase, way, bounds_s in link.faults(size):
        lack_s = drawn.uniform(*LACK_S) if is_changing else 0.0
        found = _break_once(link, way, drawn, load, drawn.uniform(*bounds_s), lack_s)
        _say({"phase": phase, "way": way, "is_changing": is_changing} | found)


def _break_once(link: Link, way: str, drawn: random.Random, load: Load, length_s: float, lack_s: float) -> dict[str, Any]:
    runtime = load.runtime
    before, deaths = runtime.stats()["totals"], state_of(runtime, "far").deaths
    time.sleep(drawn.random() * 0.02)
    load.take_worst_s()
    calls = load.calls
    link.cut(way)
    mended = time.monotonic() + length_s
    if lack_s:
        lack_descriptors(lack_s)
    time.sleep(max(0.0, mended - time.monotonic()))
    stall_s, calls = load.take_worst_s(), load.calls - calls
    known = link.heal(way)
    began = time.monotonic()

    is_healed = wait_until(is_used(runtime, "far"), every_s=0.005)
    healed_s = time.monotonic() - began
    # A call that the fault held up to its end has ended only now.
    stall_s = max(stall_s, load.take_worst_s())
    totals = runtime.stats()["totals"]
    counted = {name: totals[name] - before[name] for name in ("hedges", "failovers")}
    return {
        "at_s": time.monotonic(), "cut_s": length_s, "stall_ms": 1e3 * stall_s, "healed_s": healed_s,
        "deaths": state_of(runtime, "far").deaths - deaths, "calls_meanwhile": calls, **counted,
        "failed_calls": load.failed, "wrong_results": load.wrong, "verdict": "healed" if is_healed else "away", **known,
    }  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
