"""Writes the tables of GGUF files against llama.cpp: what its converter writes and we find there,
and the logits of both.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable

from bench.documents.recorded import Recorded
from bench.documents.text import markdown

ARCHITECTURES, LOGITS = "gguf_architectures", "gguf_against_llama"


def architectures(recorded: Recorded) -> str:
    """Writes what our reader makes of a conversion of each architecture."""
    head = ("file", "converted from", "read as", "parameters equal", "within 1 ulp", "all as it must be")
    return markdown(
        head,
        (
            (
                row["name"],
                row["source_class"],
                row["read_class"],
                str(row["equal_parameters"]),
                str(row["near_parameters"]),
                "NO" if row["excesses"] else "yes",
            )
            for row in recorded.rows(ARCHITECTURES)
        ),
    )


def logits(recorded: Recorded) -> str:
    """Writes how far our logits and llama.cpp's are from the eager model's, and from each other."""
    head = ("file", "deviation of logits", "ours from eager", "llama.cpp from eager", "ours from llama.cpp", "as it must be")
    lines = []
    for row in recorded.rows(LOGITS):
        keys = ("ours_from_eager", "llama_from_eager", "ours_from_llama")
        apart = ("it cannot run it" if row[key] is None else f"{row[key]:.1e}" for key in keys)
        name = f"{row['name']} (llama.cpp {row['llama_differs']})" if "llama_differs" in row else row["name"]
        lines.append((name, f"{row['deviation']:.1f}", *apart, "yes" if row["met"] else "NO"))
    return markdown(head, lines)


TABLES: dict[str, Callable[[Recorded], str]] = {"gguf-architectures": architectures, "gguf-logits": logits}
