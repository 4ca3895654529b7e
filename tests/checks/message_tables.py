"""Checks docs/protocol.md against the schemas of the control messages and of the hand-over's.
`python -m tests.checks.message_tables` rewrites the blocks.

The tables between `<!-- begin messages -->` and `<!-- end messages -->` are generated, and so are
those of `handover`. They have type numbers, fields with integer keys, kinds with limits, and
defaults. A stale block is a finding.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.checks import documents

DOCUMENT = "docs/protocol.md"
NAMES = ("messages", "handover")
# Number, name, text and fields of a message; a field is key, name, kind, and what becomes of a
# message without it.
Table = tuple[int, str, str, Sequence[tuple[int, str, str, str]]]


def find(root: Path) -> list[str]:
    """Returns a finding when the block of the document differs from what the schemas say."""
    path = root / DOCUMENT
    if not path.exists():
        return [f"{DOCUMENT} is missing; it is the protocol's normative text"]
    text = path.read_text(encoding="utf-8")
    return [finding for name in NAMES for finding in find_in_text(text, rendered(name), name)]


def find_in_text(text: str, expected: str, name: str = NAMES[0]) -> list[str]:
    """Compares the document's block `name` with the rendered tables, naming the first line that
    differs.
    """
    block = documents.block(text, name)
    if block is None:
        return [f"{DOCUMENT}: no block is marked '{name}'"]
    for found_line, expected_line in zip(_padded(block, expected), _padded(expected, block), strict=True):
        if found_line != expected_line:
            return [
                f"{DOCUMENT}: control messages are stale: found '{found_line}', the schema says '{expected_line}'; "
                "run python -m tests.checks.message_tables"
            ]
    return []


def _padded(text: str, other: str) -> list[str]:
    lines, others = text.strip().splitlines(), other.strip().splitlines()
    return lines + [""] * (len(others) - len(lines))


def rendered(name: str) -> str:
    """Returns what stands in the block of this name."""
    if name == "messages":
        from dflash_moe.protocol.messages import CODEC

        return render(_of_schemas(CODEC.schemas))
    from dflash_moe import _core

    longer = {"PathTerms": "PathTermsMessage", "Ready": "HandoverReady"}
    return render(
        (number, name, getattr(_core, longer.get(name, name)).__doc__ or "", [(*field, "refused") for field in fields])
        for number, (name, fields) in enumerate(_core.handover_tables(), start=1)
    )


def _of_schemas(schemas: Mapping[int, Any]) -> Iterable[Table]:
    for number, schema in sorted(schemas.items()):
        fields = []
        for item in sorted(schema.fields, key=lambda field: field.key):
            missing = "refused" if item.default is dataclasses.MISSING else f"`{item.default!r}`"
            fields.append((item.key, item.name, item.kind.describe(), missing))
        yield number, schema.cls.__name__, schema.cls.__doc__ or "", fields


def render(tables: Iterable[Table]) -> str:
    """Returns Markdown by ascending type number: a heading, the first paragraph of the docstring,
    and then the table of fields.
    """
    parts = []
    for number, name, doc, fields in tables:
        purpose = " ".join(line.strip() for line in doc.strip().split("\n\n")[0].splitlines())
        parts.append(f"#### {number} {name}\n\n{purpose}\n")
        rows = [f"| {key} | `{field}` | {kind} | {missing} |" for key, field, kind, missing in fields]
        parts.append(
            "\n".join(["| key | field | kind | when missing |", "|---|---|---|---|", *rows]) + "\n" if rows else "No fields.\n"
        )
    return "\n" + "\n".join(parts) + "\n"


def rewrite(root: Path) -> None:
    """Replaces the document's blocks."""
    path = root / DOCUMENT
    text = path.read_text(encoding="utf-8")
    for name in NAMES:
        text = documents.with_block(text, name, rendered(name))
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(rewrite(Path(__file__).resolve().parents[2]))
