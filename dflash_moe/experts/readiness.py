"""Whether calls would be computed now, and where not, what is missing.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_moe.holders.holder_lists import Where

# A holder in one of these states is asked: at once, after the renewal of its data path, which takes
# milliseconds, or because no other one is there while it drains.
SERVING = frozenset(("ready", "retired", "draining"))


def unready_reason(
    holders: Mapping[Where, Sequence[int]],
    reports: Sequence[Mapping[str, Any]],
    *,
    layer_names: Mapping[int, str],
    remedy_of: Callable[[str], str],
) -> str:
    """Returns a sentence on the shards that nobody can be asked for, empty where there are none.
    `holders` are those of each shard by their place in `reports`, which are the client's.
    `remedy_of` says what is done about a worker that was lost.
    """
    missing = [where for where, places in holders.items() if not any(reports[place]["state"] in SERVING for place in places)]
    if not missing:
        return ""
    away = sorted({place for where in missing for place in holders[where]})
    told = "; ".join(_told(reports[place], remedy_of) for place in away) or "they have no holder"
    layer, shard = min(missing)
    return (
        f"{len(missing)} of {len(holders)} shards cannot be computed now, shard {shard} of {layer_names[layer]} for one: {told}"
    )


def _told(report: Mapping[str, Any], remedy_of: Callable[[str], str]) -> str:
    name = report["name"]
    if report["state"] == "suspect":
        return f"worker {name} {report['reason']}"
    return f"worker {name} is lost ({report['reason']}), and {remedy_of(name)}"
