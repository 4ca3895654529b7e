"""Writes the tables of the fault campaigns.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable

from bench.documents.recorded import Recorded
from bench.documents.text import markdown

KILLS = "worker_kills"
# The prefix of an event's figures, and what it is called.
EVENTS = {"": ("kills", "killed"), "stop_": ("stops", "stopped"), "lone_": ("lone_kills", "killed, the only holder")}


def worker_kills(recorded: Recorded) -> str:
    """Writes what kills and stops cost the calls that they fell into, over each transport."""
    lines = [
        (
            row["name"], what, f"{row[count]:,}", str(row["failed_calls"]), str(row["wrong_bits"]),
            *(f"{row[f'{prefix}stall_{name}_ms']:.1f} ms" for name in ("p50", "p99", "max")),
        )
        for row in recorded.rows(KILLS)
        for prefix, (count, what) in EVENTS.items()
    ]  # fmt: skip
    head = ("transport", "worker", "times", "failed calls", "with wrong bits", "stall p50", "p99", "max")
    return markdown(head, lines)


TABLES: dict[str, Callable[[Recorded], str]] = {"worker-kills": worker_kills}
