"""Writes the tables of the engine: requests at a time, steps in two micro-batches, and the run of
many random requests.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bench.documents.recorded import Recorded, Row
from bench.documents.text import digits, markdown, mebibytes, ratio, seconds

SCHEDULER, MICRO_BATCHES, REQUESTS = "engine_scheduler", "micro_batches", "engine_requests"
# What the engine itself may take of the steps of this row, and what a token of one request may take
# in it, by what it takes in the plain loop.
SHARE_ROW, MOST_SHARE = "batch-16", 0.02
LOOP_ROW, MOST_TIME_BY_LOOP = "loop", 1.03
# What a step consists of, in the order in which it does it.
STEP_PARTS = {
    "forward_s": "forward pass",
    "plan_s": "plan",
    "sample_s": "sample",
    "commit_s": "commit",
    "deliver_s": "deliver",
}
# Counts of a run of requests that its result may have, and what they count.
COUNTS = {
    "preemptions": "preemptions",
    "recomputed_tokens": "tokens computed again after a preemption",
    "cached_tokens": "tokens found in the cache of prefixes",
}


def scheduler(recorded: Recorded) -> str:
    """Writes speeds and times of so many requests at a time, and of one without the engine."""
    compared = {entry["name"]: entry for entry in recorded.summary(SCHEDULER)}
    lines = []
    for row in recorded.rows(SCHEDULER):
        entry = compared[row["name"]]
        lines.append((
            "1, plain loop" if row["name"] == LOOP_ROW else str(row["batch"]),
            digits(row["decode_tokens_per_s"]), digits(entry["throughput_ratio"]), digits(row["prefill_tokens_per_s"]),
            *(seconds(row[name][which]) for name in ("ttft_s", "tpot_s") for which in ("p50", "mean")),
            "yes" if entry["same_tokens"] else "NO",
        ))  # fmt: skip
    head = ("requests", "decode tokens/s", "x one request", "prefill tokens/s", "first token, p50", "mean",
            "each later one, p50", "mean", "same tokens")  # fmt: skip
    return markdown(head, lines)


def steps(recorded: Recorded) -> str:
    """Writes what a step of the engine consists of, and its own share of it."""
    rows = recorded.rows(SCHEDULER, lambda row: "engine_share" in row)
    head = ("requests", "steps", "sequences x steps", *STEP_PARTS.values(), "the engine's own share")
    return markdown(
        head,
        (
            (
                str(row["batch"]),
                str(row["steps"]),
                ", ".join(f"{size} x {count}" for size, count in row["batch_sizes"].items()),
                *(seconds(row["per_step_s"][part]) for part in STEP_PARTS),
                f"{100 * row['engine_share']:.2f}%",
            )
            for row in rows
        ),
    )


def scheduler_marks(recorded: Recorded) -> str:
    """Writes the marks of the engine itself."""
    share = recorded.row(SCHEDULER, name=SHARE_ROW)["engine_share"]
    # Both complete the same tokens, round by round.
    (by_loop,) = (entry["throughput_ratio"] for entry in recorded.summary(SCHEDULER) if entry["name"] == LOOP_ROW)
    found = [("the engine's own share of steps of 16 requests", share, MOST_SHARE),
             ("time of a token of one request, by that in the plain loop", by_loop, MOST_TIME_BY_LOOP)]  # fmt: skip
    return _marks([{"what": what, "value": value, "at_most": most, "met": value <= most} for what, value, most in found])


def micro_batches(recorded: Recorded) -> str:
    """Writes steps in one batch, in two micro-batches, and as auto chose."""
    lines = []
    for row in recorded.rows(MICRO_BATCHES):
        what, _, way = row["name"].rpartition(", ")
        lines.append((
            what, way, seconds(row["median_s"]), seconds(row["p95_s"]), ratio(row["share"]) if "share" in row else "-",
            f"{row['split_steps']} of {row['steps']}", _percent_or_none(row, "overlap_share"),
            f"{row['others_busy_cores']:.2f}",
        ))  # fmt: skip
    head = (
        "step",
        "computed in",
        "p50",
        "p95",
        "of one batch",
        "steps cut",
        "of waiting hidden",
        "cores that others took",
    )
    return markdown(head, lines)


def _percent_or_none(row: Row, key: str) -> str:
    return f"{100 * row[key]:.0f}%" if key in row else "-"


def requests(recorded: Recorded) -> str:
    """Writes what became of all requests."""
    rows = {row["name"]: row for row in recorded.rows(REQUESTS)}
    run, memory, blocks = rows.pop("requests"), rows.pop("memory"), rows.pop("blocks")
    counts = [
        ("requests", run["requests"]),
        ("of them finished", run["finished"]),
        ("of them forked into several choices", run["forked"]),
        *((f"choices that ended: {reason}", count) for reason, count in run["choices"].items()),
        ("tokens that callers got", run["tokens"]),
        *((what, run[key]) for key, what in COUNTS.items() if key in run),
        ("blocks that outstanding requests wanted together", run["wanted_blocks"]),
        ("blocks that there were", blocks["num_blocks"]),
        ("of them free in the end", blocks["num_free"]),
    ]
    counts += [(f"choices compared with the same one {name}", row["choices"]) for name, row in rows.items()]
    lines = [(what, f"{count:,}") for what, count in counts]
    lines += [("time", seconds(run["seconds"])), ("looks at memory", f"{len(memory['anonymous_bytes']):,}")]
    lines.append(("anonymous MiB at the last look", mebibytes(memory["anonymous_bytes"][-1])))
    return markdown(("what", "count"), lines)


def summary_marks(name: str) -> Callable[[Recorded], str]:
    """Returns the writer of the summary of a result that says what must be so."""
    return lambda recorded: _marks(recorded.summary(name))


def _marks(found: Iterable[Mapping[str, Any]]) -> str:
    lines = []
    for line in found:
        sign, mark = next((sign, line[key]) for key, sign in (("at_most", "<="), ("at_least", ">=")) if key in line)
        value = f"{line['value']:,}" if isinstance(mark, int) else f"{line['value']:.4f}"
        lines.append((line["what"], value, f"{sign} {mark:,}", "yes" if line["met"] else "NO"))
    return markdown(("what", "value", "mark", "met"), lines)


TABLES: dict[str, Callable[[Recorded], str]] = {
    "scheduler": scheduler,
    "scheduler-steps": steps,
    "scheduler-marks": scheduler_marks,
    "micro-batches": micro_batches,
    "micro-batches-mark": summary_marks(MICRO_BATCHES),
    "engine-requests": requests,
    "engine-requests-marks": summary_marks(REQUESTS),
}
