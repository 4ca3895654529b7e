"""What engine_against_peers.py must reach, and the summary that says whether it did.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# A side that decodes at this share of the read speed of its threads counts as equal to any other:
# beyond it a difference is the memory's.
EQUAL_SHARE = 0.9
# What others may take of the machine while a row is measured. An idle machine's own services take
# less than 0.03 of a core.
QUIET_CORES = 0.1
# Of anonymous memory by bytes of weights, with 1 GB for the interpreter, torch and scratch memory;
# packed weights in Q4_K are larger than stored ones by a fourteenth. Weights that lie twice give 2.
MOST_MEMORY = 1.35


# What a token of one request may take in the engine, by what it takes in the plain loop.
MOST_TIME_BY_LOOP = 1.03


@dataclass(frozen=True, slots=True)
class Ratio:
    """The time of the best of `peers` divided by that of row `ours`, both medians."""

    ours: str
    peers: tuple[str, ...]
    at_least: float | None = None
    goal: float | None = None

    def line(self, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
        """Returns the line of the summary, None where a row of ours or all peers are missing."""
        there = [rows[name] for name in self.peers if name in rows]
        if self.ours not in rows or not there:
            return None
        own, best = rows[self.ours], min(there, key=lambda row: float(row["median_s"]))
        ratio = best["median_s"] / own["median_s"]
        is_at_memory = own["phase"] == "decode" and own.get("share_of_read", 0.0) >= EQUAL_SHARE
        counted = max(ratio, 1.0) if is_at_memory else ratio
        found = {"what": self.ours, "against": best["name"], "ratio": ratio, "share_of_read": own.get("share_of_read")}
        if missing := [name for name in self.peers if name not in rows]:
            found["not_measured"] = missing
        if self.at_least is not None:
            found |= {"at_least": self.at_least, "met": counted >= self.at_least}
        if self.goal is not None:
            found |= {"goal": self.goal, "goal_met": counted >= self.goal}
        return found


RATIOS = (
    Ratio("decode-16bit-local-ours", ("decode-16bit-local-llama", "decode-16bit-local-vllm"), 0.9, 1.0),
    Ratio("prefill-16bit-local-ours", ("prefill-16bit-local-llama", "prefill-16bit-local-vllm"), 1.05, 1.3),
    Ratio("decode-q8_0-local-ours", ("decode-q8_0-local-llama",), 0.9),
    Ratio("prefill-q8_0-local-ours", ("prefill-q8_0-local-llama",), 2.0),
    Ratio("decode-16bit-shared-ours", ("decode-16bit-rpc-llama",), 1.3, 1.5),
    Ratio("prefill-16bit-shared-ours", ("prefill-16bit-rpc-llama",), 3.5),
    Ratio("decode-q8_0-shared-ours", ("decode-q8_0-rpc-llama",), 1.3, 1.5),
    Ratio("prefill-q8_0-shared-ours", ("prefill-q8_0-rpc-llama",), 3.5),
    *(
        Ratio(f"{phase}-16bit-{place}-ours", (f"{phase}-16bit-shared-ours",), 0.95)
        for phase in ("decode", "prefill")
        for place in ("unix", "tcp")
    ),
    # Of many sequences none counts as equal because it is at the memory's speed.
    Ratio("batch4-16bit-local-ours", ("batch4-16bit-local-llama", "batch4-16bit-local-vllm"), 1.0),
    Ratio("batch16-16bit-local-ours", ("batch16-16bit-local-llama", "batch16-16bit-local-vllm"), 1.05, 1.2),
    Ratio("batch4-q8_0-local-ours", ("batch4-q8_0-local-llama",), 1.05),
    Ratio("batch16-q8_0-local-ours", ("batch16-q8_0-local-llama",), 1.3),
    *(Ratio(f"batch16-{fmt}-shared-ours", (f"batch16-{fmt}-local-ours",), 0.9) for fmt in ("16bit", "q8_0")),
    # The real shape: where one sequence is at the memory's speed, nobody can be 1.3 times as fast.
    Ratio("decode-q4_k-local-ours", ("decode-q4_k-local-llama",), 1.0, 1.3),
    Ratio("batch4-q4_k-local-ours", ("batch4-q4_k-local-llama",)),
    Ratio("batch16-q4_k-local-ours", ("batch16-q4_k-local-llama",), 1.5),
    Ratio("prefill-q4_k-local-ours", ("prefill-q4_k-local-llama",)),
    # These have no target: the class in which every format is exact.
    Ratio("decode-16bit-local-ours_f32", ("decode-16bit-local-llama", "decode-16bit-local-vllm")),
    Ratio("prefill-16bit-local-ours_f32", ("prefill-16bit-local-llama", "prefill-16bit-local-vllm")),
    Ratio("decode-16bit-shared-ours_f32", ("decode-16bit-rpc-llama",)),
    Ratio("prefill-16bit-shared-ours_f32", ("prefill-16bit-rpc-llama",)),
)
# Rows whose share of the read speed has a target: the least and the goal.
SHARES = {
    "decode-16bit-shared-ours": (0.70, 0.85),
    "decode-q4_k-local-ours": (0.85, 0.9),
    "batch4-q4_k-local-ours": (0.85, 0.9),
    "batch16-q4_k-local-ours": (0.85, 0.9),
    "decode-q4_k-shared-ours": (0.85, 0.9),
    "decode-q4_k-tcp-ours": (0.8, 0.9),
}
# The process that measures decode has buffers for the read speed beside its weights.
MEMORY_ROW = "prefill-q4_k-local-ours"


def summarise(found: Sequence[Mapping[str, Any]], weight_bytes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Returns a line for each target whose rows were measured. `weight_bytes` are those of each
    format's model.
    """
    rows = {str(row["name"]): row for row in found}
    lines = [line for ratio in RATIOS if (line := ratio.line(rows)) is not None]
    for name, (least, goal) in SHARES.items():
        share = rows.get(name, {}).get("share_of_read")
        if share is not None:
            met = {"met": share >= least, "goal": goal, "goal_met": share >= goal}
            lines.append({"what": f"share_of_read of {name}", "value": share, "at_least": least, **met})
    lines += [
        _at_most(f"time of {name} by that of the plain loop", row["time_by_loop"], MOST_TIME_BY_LOOP)
        for name, row in rows.items()
        if "time_by_loop" in row
    ]
    if MEMORY_ROW in rows:
        row = rows[MEMORY_ROW]
        value = row["anonymous_bytes"] / weight_bytes[str(row["format"])]
        lines.append(_at_most(f"memory of {MEMORY_ROW} by bytes of weights", value, MOST_MEMORY))
    return lines


def _at_most(what: str, value: float, most: float) -> dict[str, Any]:
    return {"what": what, "value": value, "at_most": most, "met": value <= most}


def disturbed(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of rows that shared the machine with others in one of their rounds."""
    return [str(row["name"]) for row in found if row.get("others_busy_cores", 0.0) > QUIET_CORES]


def shown_line(line: Mapping[str, Any]) -> str:
    """Returns a line of the summary as a sentence for whoever runs the campaign."""
    value = float(line["ratio"] if "ratio" in line else line["value"])
    text = f"{line['what']}: {value:.3f}"
    if "against" in line:
        text += f" x {line['against']}"
        if line["share_of_read"] is not None:
            text += f", {line['share_of_read']:.2f} of the read speed"
    for key in ("at_least", "at_most"):
        if key in line:
            text += f"; {key.replace('_', ' ')} {line[key]:g}: {'met' if line['met'] else 'NOT MET'}"
    if "goal" in line:
        text += f"; goal {line['goal']:g}: {'met' if line['goal_met'] else 'not met'}"
    return text + (f"; not measured: {', '.join(line['not_measured'])}" if "not_measured" in line else "")
