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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.checks import documents

DOCUMENT = "docs/protocol.md"
NAMES = ("messages", "handover")


def find(root: Path) -> list[str]:
    """Returns a finding when the block of the document differs from what the schemas say."""
    path = root / DOCUMENT
    if not path.exists():
        return [f"{DOCUMENT} is missing; it is the protocol's normative text"]
    text = path.read_text(encoding="utf-8")
    return [finding for name in NAMES for finding in find_in_text(text, render(_schemas(name)), name)]


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


def _schemas(name: str) -> Mapping[int, Any]:
    from dflash_moe.protocol.handover import HANDOVER_CODEC
    from dflash_moe.protocol.messages import CODEC

    return {"messages": CODEC, "handover": HANDOVER_CODEC}[name].schemas


def render(schemas: Mapping[int, Any]) -> str:
    """Returns Markdown by ascending type number: a heading, the first paragraph of the docstring,
    and then the table of fields.
    """
    parts = []
    for number, schema in sorted(schemas.items()):
        paragraph = (schema.cls.__doc__ or "").strip().split("\n\n")[0]
        purpose = " ".join(line.strip() for line in paragraph.splitlines())
        parts.append(f"#### {number} {schema.cls.__name__}\n\n{purpose}\n")
        parts.append("\n".join(_field_rows(schema.fields)) + "\n" if schema.fields else "No fields.\n")
    return "\n" + "\n".join(parts) + "\n"


def _field_rows(fields: Iterable[Any]) -> Iterable[str]:
    yield "| key | field | kind | when missing |"
    yield "|---|---|---|---|"
    for item in sorted(fields, key=lambda field: field.key):
        missing = "refused" if item.default is dataclasses.MISSING else f"`{item.default!r}`"
        yield f"| {item.key} | `{item.name}` | {item.kind.describe()} | {missing} |"


def rewrite(root: Path) -> None:
    """Replaces the document's blocks."""
    path = root / DOCUMENT
    text = path.read_text(encoding="utf-8")
    for name in NAMES:
        block = documents.block(text, name)
        if block is None:
            raise SystemExit(f"{DOCUMENT}: no block is marked '{name}'")
        begin = text.index(f"<!-- begin {name} -->\n") + len(f"<!-- begin {name} -->\n")
        text = text[:begin] + render(_schemas(name)) + text[begin + len(block) :]
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(rewrite(Path(__file__).resolve().parents[2]))
