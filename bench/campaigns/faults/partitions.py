"""The network between two machines is cut and heals, in one direction, in the other, in both, and
by pulling the cable. A worker on the host's own machine holds all shards too, so that calls are
answered meanwhile, and the far worker serves again by itself. Connections are encrypted as
`ipc.encryption: auto` has it beyond one machine, and a capture of packets holds no known row. Every
cut comes once more while the mode is changed every second and the host runs out of descriptors.

The far machine is a network namespace with a link (two_machines.py). The host's half runs in the
other one (partitioned_host.py).
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.campaigns.faults.by_hand import worker_by_hand
from bench.campaigns.faults.campaign import Campaign, Run, spread
from bench.campaigns.faults.load import make_model
from bench.campaigns.faults.mode_changes import STALL_GOAL_MS
from bench.campaigns.faults.two_machines import WAYS, WORKER_ADDRESS, TwoMachines, why_not
from dflash_moe.protocol.keys import write_key_file

ROOT = Path(__file__).resolve().parents[3]
# A cut lasts a few seconds, and what follows is waited for at most a minute.
SECONDS_PER_CUT = 90.0
STARTING_S = 120.0
SERVED_GOAL_MS, HEALED_GOAL_S = 400.0, 2.0
# What a row is called besides, by `is_changing` of its events.
BESIDES = {False: "", True: ", mode changed and descriptors gone"}


def run(given: Run) -> None:
    """Cuts the link `given.size` times in each of four ways."""
    machines = TwoMachines()
    try:
        if reason := machines.make():
            raise OSError(reason)
        events, found = between(given, machines, len(WAYS), machines.host, machines.worker)
    finally:
        machines.close()
    _judge(given, events, found)


def between(
    given: Run, machines: TwoMachines, num_ways: int, *where: str, descriptors: tuple[int, ...] = ()
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Runs a worker on one machine and the host on the other, which finds `where` it breaks the
    network in each of so many ways and inherits `descriptors`. Notes what it says of each fault,
    and returns all of that and the sums at its end. Raises OSError where the host fails.
    """
    spec = make_model(given.folder / "model")
    key = given.folder / "shared.key"
    write_key_file(key)
    prefix = machines.within(machines.worker)
    listen = f"tcp://{WORKER_ADDRESS}:0"
    with worker_by_hand(spec, given.folder, listen, "--key-file", str(key), prefix=prefix) as worker:
        host = [*machines.within(machines.host), sys.executable, "-m", "bench.campaigns.faults.partitioned_host"]
        arguments = [str(given.folder / "copy"), str(key), worker.address, str(given.size), str(given.seed), *where]
        limit_s = STARTING_S + SECONDS_PER_CUT * num_ways * given.size * len(BESIDES)
        done = subprocess.run(
            [*host, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=False,
            pass_fds=descriptors,
        )  # fmt: skip
    if done.returncode != 0:
        raise OSError(f"the host in its namespace ended with status {done.returncode}")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for one in lines[:-1]:
        # The monotonic clock is that of all processes.
        given.event(**one | {"at_s": round(one["at_s"] - given.began, 3)})
    return lines[:-1], lines[-1]


def judge(given: Run, events: list[dict[str, Any]], found: dict[str, Any]) -> None:
    """Notes what must hold however the network is broken, and the times beside their goals."""
    for what in ("failed_calls", "wrong_results", "known_rows_seen", "left_processes", "left_descriptors", "left_threads"):
        given.claim(what.replace("_", " "), found[what], at_most=0)
    given.claim("not healed", sum(one["verdict"] != "healed" for one in events), at_most=0)
    given.claim("captured bytes", found["captured_bytes"], at_least=found["sent_bytes"])
    given.claim("changes of mode", found["changes"], at_least=1)
    given.claim("changes of mode that failed but for what the host lacked", found["changes_failed"], at_most=0)
    for (is_changing, besides), goal_ms in zip(BESIDES.items(), (SERVED_GOAL_MS, STALL_GOAL_MS), strict=True):
        chosen = [one for one in events if one["is_changing"] == is_changing]
        given.goal(f"served{besides}, ms", max(one["stall_ms"] for one in chosen), at_most=goal_ms)
        given.goal(f"healed{besides}, s", max(one["healed_s"] for one in chosen), at_most=HEALED_GOAL_S)


def fault_rows(given: Run, name: str, count: str, alike: list[dict[str, Any]], sums: tuple[str, ...] = ()) -> None:
    """Adds a row of the faults of one kind, of which `count` is the name, and one of those that
    came while the mode was changed. Of `sums` a row has the sums.
    """
    for is_changing, besides in BESIDES.items():
        chosen = [one for one in alike if one["is_changing"] == is_changing]
        stalls_s = [one["stall_ms"] / 1e3 for one in chosen]
        healed_s = [one["healed_s"] for one in chosen]
        given.row(
            f"{name}{besides}", stalls_s, **{count: len(chosen)}, **{one: sum(event[one] for event in chosen) for one in sums},
            **spread("stall", stalls_s), **spread("healed", healed_s, unit_ms=False),
        )  # fmt: skip


def _judge(given: Run, events: list[dict[str, Any]], found: dict[str, Any]) -> None:
    judge(given, events, found)
    lasting = [one for one in events if one["phase"] == "until lost"]
    given.claim("long cuts that nobody noticed", sum(one["deaths"] == 0 for one in lasting), at_most=0)
    for way in WAYS:
        for length in ("short", "until lost"):
            chosen = [one for one in events if one["way"] == way and one["phase"] == length]
            if chosen:
                fault_rows(given, f"{way}, {length}", "cuts", chosen)
    given.row("all", **found)


CAMPAIGN = Campaign(
    "partitions", "the network between two machines cut and healed", "cuts in each of four ways", 10, 1, run, why_not
)
