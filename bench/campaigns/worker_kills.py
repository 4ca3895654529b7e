"""Kills of real worker processes while calls are under way: no call fails, no bit changes, and the
stall is short. One JSON, and one JSON line for each event where a file is named.

    python -m bench.campaigns.worker_kills [--kills 1000] [--stops 100] [--lone-kills 100]
        [--seed 0] [--transports shared,unix,tcp] [--program build/tests/worker_kills]
        [--events FILE] [--json bench/results/worker_kills.json]

The program is C++ (tests/csrc/failover): a client and two forked workers, which hold both shards of
a layer. At a drawn moment of a drawn call (idle, request on its way, computing, reply half written,
reply unread, any time) a worker is killed and later replaced, or stopped by SIGSTOP and sent on, or
killed as the only holder of its shard. A call's stall is what it takes beyond the median of
undisturbed calls of its size. `make campaign` builds the program. The same seed draws the same
events; when a signal arrives is up to the machine. Exit status 1 where something is not as it must
be; times are shown against their goals and decide nothing, since they are the machine's.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.campaigns.harness import ROOT, Broken, breaking_line
from dflash_moe.bench.results import percentile

PROGRAM = ROOT / "build" / "tests" / "worker_kills"
# Counts that must be zero.
CLEAN = ("failed_calls", "wrong_bits", "unsettled", "left_processes", "left_descriptors", "left_segments")
# An event takes a few calls, and one of 256 tokens some milliseconds; on a busy machine much more.
SECONDS_PER_EVENT = 2
STARTING_S = 120
GOALS = {"stall_p50_ms": 20.0, "stall_p99_ms": 100.0, "stop_stall_max_ms": 400.0}


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments()
    counts = {"kills": given.kills, "stops": given.stops, "lone_kills": given.lone_kills}
    found = Broken.begin("worker_kills", **counts, seed=given.seed)
    for transport in given.transports.split(","):
        summary, lines = _run(given, transport)
        events = [json.loads(line) for line in lines]
        found.events += events
        row = {"name": transport, **summary, "moments": _by_moment(events)}
        found.row(row, _shown(transport, summary), zero=CLEAN, goals=GOALS)
    return found.end(given)


def _run(given: argparse.Namespace, transport: str) -> tuple[dict[str, Any], list[str]]:
    """Returns the summary of one transport and a JSON line for each event."""
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events.jsonl"
        command = [given.program, "--transport", transport, "--seed", given.seed, "--kills", given.kills]
        command += ["--stops", given.stops, "--lone-kills", given.lone_kills, "--events", events]
        limit_s = STARTING_S + SECONDS_PER_EVENT * (given.kills + given.stops + given.lone_kills)
        done = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True, timeout=limit_s)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{given.program} over {transport}: {done.stderr.strip() or f'status {done.returncode}'}")
        return json.loads(done.stdout), events.read_text(encoding="utf-8").splitlines()


def _by_moment(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns counts and stalls for each kind of event and moment."""
    groups: dict[tuple[str, str], list[float]] = {}
    for event in events:
        moment = event["moment"] if event["obeyed"] else "after the call"
        groups.setdefault((event["kind"], moment), []).append(event["stall_ms"])
    return [
        {
            "kind": kind, "moment": moment, "count": len(stalls), "stall_p50_ms": percentile(stalls, 0.5),
            "stall_p99_ms": percentile(stalls, 0.99), "stall_max_ms": max(stalls),
        }
        for (kind, moment), stalls in sorted(groups.items())
    ]  # fmt: skip


def _shown(transport: str, summary: dict[str, Any]) -> str:
    return (
        f"{transport}: {summary['kills']} kills, {summary['stops']} stops, {summary['lone_kills']} kills of an only holder, "
        f"{summary['calls']} calls: {summary['failed_calls']} failed, {summary['wrong_bits']} with wrong bits; stall p50 "
        f"{summary['stall_p50_ms']:.1f} ms, p99 {summary['stall_p99_ms']:.1f} ms; stopped at most "
        f"{summary['stop_stall_max_ms']:.0f} ms; left {summary['left_processes']} processes, "
        f"{summary['left_descriptors']} descriptors"
    )


def _arguments() -> argparse.Namespace:
    parser = breaking_line(__doc__, "worker_kills")
    parser.add_argument("--kills", type=int, default=1000, help="over each transport [%(default)s]")
    parser.add_argument("--stops", type=int, default=100, help="likewise, SIGSTOP then SIGCONT [%(default)s]")
    parser.add_argument("--lone-kills", type=int, default=100, help="likewise, of a shard's only holder [%(default)s]")
    parser.add_argument("--transports", default="shared,unix,tcp", help="[%(default)s]")
    parser.add_argument("--program", type=Path, default=PROGRAM, help="[build/tests/worker_kills]")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
