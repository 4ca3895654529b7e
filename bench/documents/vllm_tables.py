"""Writes the table of vLLM with our workers beside vLLM by itself.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from bench.documents.recorded import Recorded
from bench.documents.text import digits, markdown

RESULT = "vllm_workers"


def speeds(recorded: Recorded) -> str:
    """Writes the tokens/s of both sides, and the ratio."""
    lines = []
    rows = recorded.rows(RESULT)
    for ours in (row for row in rows if row["name"] == "workers"):
        plain = next(row for row in rows if row["case"] == ours["case"] and row["name"] == "plain")
        ratio = ours["tokens_per_s"] / plain["tokens_per_s"]
        lines.append((ours["case"], digits(plain["tokens_per_s"]), digits(ours["tokens_per_s"]), f"{ratio:.2f}"))
    return markdown(("prompts", "vLLM, tokens/s", "with our workers", "ratio"), lines)


def memory(recorded: Recorded) -> str:
    """Writes what each side's engine has in memory, how long it took to start, and what it sent."""
    lines = []
    for side in recorded.summary(RESULT):
        if "peak_bytes" not in side:
            continue
        sent = f"{1 / side['wire_efficiency']:.3f}" if side["wire_efficiency"] else "-"
        lines.append(
            (
                "vLLM" if side["name"] == "plain" else "with our workers", f"{side['expert_bytes'] / 1e6:.0f} MB",
                f"{side['peak_bytes'] / 1e6:.0f} MB", f"{side['start_s']:.1f} s", f"{side['calls']:,}", sent,
            )
        )  # fmt: skip
    memory_head = ("experts in vLLM's process", "most memory of that process")
    head = ("side", *memory_head, "start", "calls of experts", "bytes / floor")
    return markdown(head, lines)


TABLES = {"vllm-speeds": speeds, "vllm-memory": memory}
