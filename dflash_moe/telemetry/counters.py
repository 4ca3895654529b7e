"""Adds up the call counters of the host's side over workers and layers, into the mapping that
`ExpertRuntime.stats()` returns.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping

COUNTED = (
    "calls", "rows", "pairs", "request_bytes", "reply_bytes", "floor_bytes", "splits", "wait_ns", "worker_compute_ns",
    "worker_queue_ns", "failovers", "hedges", "hedges_won", "hedge_request_bytes", "hedge_reply_bytes", "superseded",
    "parked_ns",
)  # fmt: skip


def zero_counters() -> dict[str, float]:
    """Returns all counters at 0, and `waits`, which are the seconds in `wait_ns`."""
    return {**dict.fromkeys(COUNTED, 0), "waits": 0.0}


def add_counters(total: dict[str, float], part: Mapping[str, int]) -> None:
    """Adds `part` to `total` in place."""
    for key in COUNTED:
        total[key] += int(part.get(key, 0))
    total["waits"] = total["wait_ns"] / 1e9
