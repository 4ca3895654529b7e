"""Writes the one table of the front page: ours beside the best peer of each measured case, also
where the peer is quicker.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.documents.recorded import Recorded
from bench.documents.text import digits, markdown

MODELS = ("engine_against_peers", "engine_batches", "engine_real_shape")
KERNELS = "experts_against_peers"
PHASES = {
    "decode": "decode, 1 sequence",
    "batch4": "decode, 4 sequences",
    "batch16": "decode, 16 sequences",
    "prefill": "prefill",
}
# A split over processes, or over machines, is compared with the peer's own way to split.
PLACES = {"local": "one process", "shared": "experts in a worker"}
PEERS = {"llama": "llama.cpp", "vllm": "vLLM", "rpc": "llama.cpp's RPC", "torch": "torch", "kt": "kt-kernel"}
# Of the kernels: both ends of their range, with the threads of a whole small machine.
KERNEL_TOKENS, KERNEL_THREADS = (1, 2048), 2


def overview(recorded: Recorded) -> str:
    """Writes tokens a second of ours and of the quickest peer in the same run."""
    lines = [line for result in MODELS for line in _models(recorded, result)] + _kernels(recorded)
    return markdown(("what", "weights", "ours, tokens/s", "the best peer", "its tokens/s", "ours / peer"), lines)


def _models(recorded: Recorded, result: str) -> list[tuple[str, ...]]:
    rows = [row for row in recorded.result(result)["rows"] if row.get("phase") in PHASES]
    lines = []
    for ours in (row for row in rows if row["name"].endswith("-ours") and row["place"] in PLACES):
        like = ("phase", "format")
        place = "rpc" if ours["place"] == "shared" else ours["place"]
        against = [
            row
            for row in rows
            if all(row[key] == ours[key] for key in like) and row["place"] == place and row["side"] != "ours"
        ]
        if against:
            best = max(against, key=lambda row: float(row["tokens_per_s"]))
            peer = "rpc" if place == "rpc" else best["side"]
            what = f"{PHASES[ours['phase']]}, {PLACES[ours['place']]}"
            lines.append(_line(what, ours["format"], ours["tokens_per_s"], peer, best["tokens_per_s"]))
    return lines


def _kernels(recorded: Recorded) -> list[tuple[str, ...]]:
    """Writes the experts of one layer: our exact class, and the peers' best."""
    rows = [row for row in recorded.result(KERNELS)["rows"] if row["threads"] == KERNEL_THREADS]
    lines = []
    for ours in (row for row in rows if row["name"].endswith(" f32-canonical") and row["tokens"] in KERNEL_TOKENS):
        like = [row for row in rows if all(row[key] == ours[key] for key in ("format", "tokens"))]
        best = min((row for row in like if row["name"].startswith(("torch", "kt_"))), key=lambda row: float(row["median_s"]))
        speeds = [ours["tokens"] / row["median_s"] for row in (ours, best)]
        tokens = "1 token" if ours["tokens"] == 1 else f"{ours['tokens']:,} tokens"
        lines.append(
            _line(f"experts of one layer, {tokens}", ours["format"], speeds[0], best["name"].partition("_")[0], speeds[1])
        )
    return lines


def _line(what: str, weights: str, ours: float, peer: str, theirs: float) -> tuple[str, ...]:
    return what, weights, digits(ours), PEERS[peer], digits(theirs), f"{ours / theirs:.2f}"


TABLES: Mapping[str, Callable[[Recorded], Any]] = {"overview": overview}
