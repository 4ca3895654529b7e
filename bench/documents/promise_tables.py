"""Writes the table of promises in docs/reliability.md: what each is tested by, and how often the
recorded campaigns broke something for it, with what came of that.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.documents.fault_tables import COUNTS
from bench.documents.recorded import Recorded
from bench.documents.text import markdown


@dataclass(frozen=True, slots=True)
class _Promise:
    """A promise in words, the tests that hold it, and its recorded campaigns as (result, rows whose
    name holds this, or "" for all).
    """

    words: str
    tests: str
    campaigns: tuple[tuple[str, str], ...] = ()


PROMISES = (
    _Promise(
        "no wrong number, whatever breaks", "simulator; every campaign compares each result bit for bit",
        (("worker_kills", ""), *((f"fault_{name}", "") for name in (
            "kills", "stops", "all-dead", "crash-loop", "partitions", "lossy-link", "proxies", "control-groups",
            "scribblers", "strangers", "registrations", "mode-changes", "soak",
        ))),
    ),
    _Promise("a failure that was simulated can be replayed", "`tests/unit/cli/test_simulate.py`"),
    _Promise(
        "a killed worker costs no call while another holds its shards", "`tests/fault/test_replicas.py`, campaign `kills`",
        (("worker_kills", ""), ("fault_kills", "")),
    ),
    _Promise("the host computes where nobody else can", "`tests/fault/test_host_fallback.py`"),
    _Promise(
        "with all holders dead calls end typed by their deadline, and all heals unaided",
        "`tests/fault/test_returning_workers.py`, campaign `all-dead`", (("fault_all-dead", ""),),
    ),
    _Promise(
        "a worker that stands still is answered for, given up, and back once it goes on", "campaigns `stops`, `control-groups`",
        (("fault_stops", ""), ("fault_control-groups", "freezer")),
    ),
    _Promise(
        "a worker that answers nothing, however well its pulse goes, is answered for, given up, and back once it answers",
        "`tests/fault/test_silent_workers.py`, `tests/csrc/simulation/judging_test.cc`, campaign `proxies`",
        (("fault_proxies", ""),),
    ),
    _Promise(
        "a change of mode waits for no worker, and a lack of descriptors is held against nobody",
        "`tests/fault/test_mode_changes.py`, `tests/fault/test_host_fallback.py`, campaign `mode-changes`",
        (("fault_mode-changes", "answers"),),
    ),
    _Promise(
        "time in which the host computed or was stopped counts against nobody",
        "`tests/csrc/simulation/judging_test.cc`, `tests/fault/test_stopped_host.py`",
    ),
    _Promise("a late writer harms nothing", "`tests/fault/test_late_writer.py`, `tests/csrc/client/liveness_test.cc`"),
    _Promise("the death of a host leaves nothing", "`tests/fault/test_dead_hosts.py`"),
    _Promise("any bytes get an answer or an error", "`make fuzz`: a target for each parser"),
    _Promise(
        "bad frames end their own connection only", "`tests/csrc/client/lies_test.cc`, campaign `strangers`",
        (("fault_strangers", "flipped"),),
    ),
    _Promise("the rings' memory order is right", "`tests/csrc/transport/conformance_test.cc`, also under ThreadSanitizer"),
    _Promise(
        "a peer that scribbles over shared memory ends its own path only",
        "`tests/csrc/transport/segment_test.cc`, campaign `scribblers`", (("fault_scribblers", ""),),
    ),
    _Promise("a slow reader is bounded", "credits: a peer has as many slots as were agreed; no test of its own"),
    _Promise(
        "strangers get nothing", "`tests/unit/protocol/test_auth.py`, campaigns `strangers`, `registrations`",
        (("fault_strangers", "bad"), ("fault_registrations", "bad")),
    ),
    _Promise(
        "a failing call of the system ends in a typed error or a recovery", "campaign `failing-calls`",
        (("fault_failing-calls", ""),),
    ),
    _Promise(
        "damaged files and full disks are named, and nothing of them is served",
        "`tests/fault/test_starts.py`, `tests/csrc/store/changed_files_test.cc`, campaign `damaged-files`",
        (("fault_damaged-files", ""),),
    ),
    _Promise(
        "corrupt safetensors are refused", "`tests/fuzz/fuzz_safetensors_header.py`, `tests/fault/test_weight_contents.py`",
    ),
    _Promise("a worker out of memory is a death", "campaign `control-groups`", (("fault_control-groups", "memory"),)),
    _Promise(
        "a partition is answered for and heals", "campaign `partitions`", (("fault_partitions", ""),),
    ),
    _Promise(
        "a network that loses, delays or slows packets costs no call while another worker holds the shards, and heals",
        "campaign `lossy-link`", (("fault_lossy-link", ""),),
    ),
    _Promise("workers are replaced one after the other under load", "`tests/fault/test_elastic.py`"),
    _Promise(
        "a crash loop is contained", "`tests/unit/holders/test_membership.py`, campaign `crash-loop`",
        (("fault_crash-loop", ""),),
    ),
    _Promise("a port or socket that is taken is named, never stolen", "`tests/unit/workers/test_listener.py`"),
    _Promise("a device step that fails is repeated as plain calls", "`tests/fault/test_device_step_failover.py`"),
    _Promise(
        "nothing grows: descriptors, threads, segments, memory", "campaign `soak`; `tests/leaks.py` after each test",
        (("fault_soak", ""),),
    ),
    _Promise(
        "a host that could not compute a call now says so and why, and requests of an engine go on by themselves",
        "`tests/fault/test_engine_faults.py`, `tests/unit/experts/test_readiness.py`",
    ),
    _Promise("a forked child disturbs nobody", "`tests/fault/test_forked_children.py`"),
    _Promise("other versions work or are refused by name", "`tests/unit/protocol/test_auth.py`, golden messages"),
    _Promise("constructs that make the above impossible are absent", "`tests/checks/constructs.py`"),
)  # fmt: skip
FAILED, WRONG = ("crash", "hang", "untyped", "lasting", "leak"), ("wrong_bits", "wrong_results", "wrong")


def promises(recorded: Recorded) -> str:
    """Writes a line for each promise."""
    lines = []
    for promise in PROMISES:
        rows = [
            row
            for name, part in promise.campaigns
            if name in recorded.names()
            for row in recorded.rows(name, lambda row, part=part: part in row["name"])  # type: ignore[misc]
        ]
        times = f"{sum(map(_times, rows)):,}" if rows else "-"
        wrong = str(sum(row.get(key, 0) for row in rows for key in WRONG)) if rows else "-"
        lines.append((promise.words, promise.tests, times, wrong))
    return markdown(("promise", "tested by", "recorded faults", "wrong results"), lines)


def _times(row: dict[str, Any]) -> int:
    if "tries" in row:
        return int(sum(row["tries"].values()))
    if "failed_calls_injected" in row:
        return int(row["failed_calls_injected"])
    if "lone_kills" in row:
        return int(row["kills"] + row["stops"] + row["lone_kills"])
    return int(next((row[key] for key in COUNTS if key in row), 0))


TABLES: dict[str, Callable[[Recorded], str]] = {"promises": promises}
