"""What engine_requests.py must find, and the lines of its summary.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.requests.clients import Load
from bench.requests.equality import Equality

# An allocator keeps this much more or less from one quarter of a run to another. A leak of half a
# kilobyte a request gives 2.5 MiB between the quarters of 10,000 requests.
MOST_GROWN_BYTES = 2 << 20


def requests_row(load: Load, wanted_blocks: int, num_blocks: int, stats: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row of what was asked for and how it ended."""
    return {
        "name": "requests", "requests": load.num_requests, "finished": load.finished, "forked": load.forked,
        "choices": dict(sorted(load.reasons.items())), "tokens": load.tokens, "seconds": load.seconds,
        "wanted_blocks": wanted_blocks, "num_blocks": num_blocks, **stats, "faults": list(load.faults),
    }  # fmt: skip


def memory_row(load: Load) -> dict[str, Any]:
    """Returns the row of memory over time."""
    trace = load.trace
    looks = {"finished": trace.finished, "elapsed_s": trace.elapsed_s, "anonymous_bytes": trace.anonymous_bytes}
    return {"name": "memory", **looks, "grown_bytes": trace.grown_bytes()}


def summarise(
    load: Load, checks: Sequence[Equality], blocks: Mapping[str, Any], stats: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Returns a line for each thing that must be so. Preemptions, forks, cancels and prefix hits
    must have happened, since a run without them says nothing about them.
    """
    choices = sum(check.choices for check in checks)
    lost = blocks["num_blocks"] - blocks["num_free"]
    return [
        _line("requests that did not end as they should", load.num_requests - load.finished, at_most=0),
        _line("choices compared with the same request alone", choices, at_least=1),
        _line("choices with other tokens than alone", sum(len(check.different) for check in checks), at_most=0),
        _line("blocks that nobody gave back", lost, at_most=0),
        _line("errors in the books of blocks", int(bool(blocks["error"])), at_most=0),
        _line(
            "bytes that memory grew by from the second quarter to the last",
            load.trace.grown_bytes(),
            at_most=MOST_GROWN_BYTES,
        ),
        _line("requests forked", load.forked, at_least=1),
        _line("choices cancelled", load.reasons["cancelled"], at_least=1),
        *(_line(name.replace("_", " "), count, at_least=1) for name, count in stats.items()),
    ]


def _line(what: str, value: int, *, at_most: int | None = None, at_least: int | None = None) -> dict[str, Any]:
    if at_most is not None:
        return {"what": what, "value": value, "at_most": at_most, "met": value <= at_most}
    return {"what": what, "value": value, "at_least": at_least, "met": at_least is not None and value >= at_least}


def shown_line(line: Mapping[str, Any]) -> str:
    """Returns a line of the summary as a sentence."""
    mark = f"at most {line['at_most']}" if "at_most" in line else f"at least {line['at_least']}"
    return f"{line['what']}: {line['value']}; {mark}: {'met' if line['met'] else 'NOT MET'}"
