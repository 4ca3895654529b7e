"""Writes the tables of one sequence and of many on our runtime, on llama.cpp and on vLLM.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bench.documents.recorded import Recorded
from bench.documents.text import digits, gigabytes_per_s, markdown, percent

# The campaign is recorded in three parts: one sequence, many, and the real shape.
RESULTS = ("engine_against_peers", "engine_batches", "engine_real_shape")
SIDES = {"llama": "llama.cpp", "vllm": "vLLM", "ours": "ours", "ours_f32": "ours, float32 activations"}
PHASES = {"decode": "decode", "prefill": "prefill", "batch4": "decode of 4 sequences", "batch16": "decode of 16 sequences",
          "engine1": "one request in the engine"}  # fmt: skip
PLACES = {"local": "one process, 2 threads", "rpc": "its RPC, 1 + 1 threads", "shared": "a worker, shared memory, 1 + 1",
          "unix": "a worker, Unix socket, 1 + 1", "tcp": "a worker, TCP, 1 + 1"}  # fmt: skip


def speeds(recorded: Recorded) -> str:
    """Writes every measured row: tokens a second, the share of the read speed, and what others took
    of the machine meanwhile.
    """
    lines = []
    for row in _rows(recorded, *PHASES):
        is_prefill = row["phase"] == "prefill"
        lines.append(
            (
                PHASES[row["phase"]],
                row["format"],
                SIDES[row["name"].rpartition("-")[2]],
                PLACES[row["place"]],
                digits(row["tokens_per_s"]),
                "-" if is_prefill else percent(row["share_of_read"]),
                f"{row['others_busy_cores']:.2f}",
            )
        )
    return markdown(("phase", "weights", "side", "where", "tokens/s", "of the read speed", "cores that others took"), lines)


def targets(recorded: Recorded) -> str:
    """Writes each ratio of medians with the mark that it was to reach."""
    return marks(line for result in RESULTS for line in recorded.summary(result))


def marks(summary: Iterable[Mapping[str, Any]]) -> str:
    """Writes lines of a summary, each with its mark."""
    lines = []
    for line in summary:
        mark = next((f"{word} {line[key]:g}" for key, word in (("at_least", ">="), ("at_most", "<=")) if key in line), "-")
        value = float(line["ratio"] if "ratio" in line else line["value"])
        met = "-" if "met" not in line else "yes" if line["met"] else "no"
        lines.append((line["what"], line.get("against", "-"), f"{value:.2f}", mark, met))
    return markdown(("row", "against", "value", "mark", "met"), lines)


def agreement(recorded: Recorded) -> str:
    """Writes how far each side's tokens are from what llama.cpp would have taken."""
    lines = []
    for result in RESULTS:
        for row in recorded.rows(result, lambda row: row["phase"] == "agreement"):
            counts = str(row["tokens"]), str(row["same_as_judge"]), f"{row['mean_gap_nats']:.5f}"
            lines.append((result, row["format"], row["side"], *counts))
    return markdown(("result", "weights", "side", "tokens", "llama.cpp's own best", "others below it, mean (nats)"), lines)


def reads(recorded: Recorded) -> str:
    """Writes the read speed that shares are of."""
    lines = [
        (result, str(row["threads"]), gigabytes_per_s(row["bytes_per_s"]))
        for result in RESULTS
        for row in recorded.rows(result, lambda row: row["phase"] == "read")
    ]
    return markdown(("result", "threads", "read speed"), lines)


def _rows(recorded: Recorded, *phases: str) -> list[Mapping[str, Any]]:
    """Returns the rows of these phases, of one recording after the other."""
    return [row for result in RESULTS for row in recorded.rows(result, lambda row: row["phase"] in phases)]


def attention(recorded: Recorded) -> str:
    """Writes one layer's attention over pages beside the peaks of the same threads."""
    lines = []
    for row in recorded.rows("attention", lambda row: row["name"] in ("decode", "prefill")):
        is_decode = row["name"] == "decode"
        share = percent(row["share_of_read" if is_decode else "share_of_peak"])
        of = "read speed" if is_decode else "peak"
        lines.append(
            (row["name"], row["kv_dtype"], f"{row['rows']}", f"{row['context']:,}", f"{row['threads']}", f"{row['us']:,.1f} us")
            + (f"{share} of the {of}",)
        )
    return markdown(("phase", "KV", "rows", "context", "threads", "time", "share"), lines)


def appends(recorded: Recorded) -> str:
    """Writes what storing the keys and values of a step's rows takes, in one call and in many."""
    rows = recorded.rows("attention", lambda row: row["name"].startswith("append"))
    return markdown(
        ("KV", "through", "tokens", "calls", "time"),
        (
            (
                row["kv_dtype"],
                row["through"],
                f"{row['tokens']}",
                f"{row['calls']}",
                f"{row['us']:,.1f} us",
            )
            for row in rows
        ),
    )


# Parts of a step that `limits` names one by one, under what a reader asks for.
_DENSE = ("query, key, value", "output", "router", "lm_head")


def limits(recorded: Recorded) -> str:
    """Writes where the time of a decoded token and of a prefill chunk goes."""
    lines = []
    for row in recorded.rows("limits"):
        spent = {part["part"]: part["seconds"] for part in row["parts"]}
        experts = sum(seconds for part, seconds in spent.items() if part.startswith("expert"))
        dense = sum(spent.get(part, 0.0) for part in _DENSE)
        attention_s = spent.get("attention", 0.0)
        small = row["step_s"] - experts - dense - attention_s - row["python_s"]
        times = (experts, dense, attention_s, small, row["python_s"], row["step_s"], row["first_s"])
        lines.append((row["name"], *(f"{1e3 * seconds:,.2f}" for seconds in times), percent(row["share"])))
    heads = ("experts", "dense products", "attention", "small operators", "Python and torch", "together", "first time")
    return markdown(("a step, in ms", *heads, "bounds"), lines)


def depth(recorded: Recorded) -> str:
    """Writes what a layer takes where there are few and where there are many."""
    lines = []
    for row in recorded.rows("depth"):
        spent = {part["part"]: part["seconds"] for part in row["parts"]}
        head_s = spent.get("lm_head", 0.0)
        layer_s = (row["step_s"] - head_s - row["python_s"]) / row["layers"]
        times = (row["step_s"], head_s, row["python_s"], layer_s)
        pages = row["huge_bytes"] and row["huge_bytes"] / row["anonymous_bytes"]
        shares = ("-" if share is None else percent(share) for share in (pages, row["share"]))
        lines.append((f"{row['layers']}", row["name"], *(f"{1e3 * seconds:,.2f}" for seconds in times), *shares))
    heads = ("layers", "a step, in ms", "together", "head", "Python and torch", "a layer", "on huge pages", "bounds")
    return markdown(heads, lines)


def dispatch(recorded: Recorded) -> str:
    """Writes what the interpreter and the dispatch of operators take of each layer."""
    rows = {
        (row["family"], row["layers_are"], row["sequences"], row["rows"], row["part"]): row["us_per_layer"]
        for row in recorded.rows("host_dispatch")
    }
    lines = []
    for (family, layers_are, sequences, num_rows, part), us in rows.items():
        if part == "all":
            interpreter = rows.get((family, layers_are, sequences, num_rows, "interpreter"))
            alone = "-" if interpreter is None else f"{interpreter:.1f} us"
            lines.append((family, layers_are, f"{sequences}", f"{num_rows}", f"{us:.1f} us", alone))
    return markdown(("family", "layers are ours", "sequences", "rows", "a layer takes", "without its operators"), lines)


TABLES: dict[str, Callable[[Recorded], str]] = {
    "attention": attention,
    "appends": appends,
    "limits": limits,
    "depth": depth,
    "dispatch": dispatch,
    "peer-speeds": speeds,
    "peer-targets": targets,
    "peer-agreement": agreement,
    "peer-reads": reads,
}
