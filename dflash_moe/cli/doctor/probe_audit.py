"""What `doctor` tells of the audit: after how many calls it finds a worker that computes wrongly.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dflash_moe.cli import options
from dflash_moe.config.detection import CERTAINTIES, ROW_S, detections

if TYPE_CHECKING:
    from dflash_moe.config import Settings
    from dflash_moe.topology import Topology


def probe_audit(topology: Topology, settings: Settings) -> dict[str, Any]:
    """Returns the budget `cpu`, the names of the `workers` that are audited, and `detections` for
    some numbers of rows that these workers answer together in a second.
    """
    workers = [worker.name for worker in topology.workers if worker.parsed_address.kind != "loopback"]
    found = [dataclasses.asdict(one) for one in detections(settings.audit_cpu)] if workers else []
    return {"cpu": float(settings.audit_cpu), "workers": workers, "detections": found}


def audit_line(found: dict[str, Any]) -> str:
    """Returns the line of the report."""
    if not found["workers"]:
        return "audit      none: all experts are computed in the host's own process"
    if not found["cpu"]:
        return "audit      off (audit.cpu): no row is computed again, and wrong numbers are noticed when a worker joins at most"
    return (
        f"audit      {', '.join(found['workers'])}: {found['cpu']:.4g} of a core computes {found['cpu'] / ROW_S:.3g} rows a "
        f"second again, at {1000 * ROW_S:g} ms a row"
    )


def show_detections(found: dict[str, Any]) -> None:
    """Prints the table of `detections` on stdout, unless it is empty."""
    if not found["detections"]:
        return
    shown = options.Table(
        "rows a second", "audited", "wrong", *(f"calls until caught, {100 * one:.0f}%" for one in CERTAINTIES)
    )
    for one in found["detections"]:
        shares = (f"{100 * one[key]:.3g}%" for key in ("audited_share", "wrong_share"))
        shown.add_row(f"{one['rows_per_s']:,}", *shares, *(f"{calls:,}" for calls in one["calls"]))
    options.show(shown)
