"""Checks docs/protocol.md against the headers in both directions: frame fields, limits,
enumerations.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

from tests.checks import documents, headers

DOCUMENT = "docs/protocol.md"
TYPE_BYTES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8}
ENUMS = {
    "Dtype": "csrc/base/dtype.h",
    "FrameKind": "csrc/wire/frame_layout.h",
    "ErrorCode": "csrc/base/error_code.h",
    "Activation": "csrc/compute/experts/ffn_spec.h",
    "GateKind": "csrc/compute/experts/ffn_spec.h",
}
LIMITS = ("csrc/wire/limits.h", "csrc/transport/channel.h")


def find(root: Path) -> list[str]:
    """Returns a finding for every difference between the marked tables and the headers."""
    path = root / DOCUMENT
    if not path.exists():
        return [f"{DOCUMENT} is missing; it is the protocol's normative text"]
    text = path.read_text(encoding="utf-8")
    findings = _frame_findings(text, root)
    findings += _limit_findings(text, root)
    for enum, header in ENUMS.items():
        findings += _enum_findings(text, root, enum, header)
    return findings


def _frame_findings(text: str, root: Path) -> list[str]:
    rows = documents.table(text, "frame")
    if rows is None:
        return [f"{DOCUMENT}: no table is marked 'frame'"]
    expected = headers.frame_fields(root / "csrc/wire/frame_layout.h")
    found = {row[2]: (documents.number(row[0]), row[1]) for row in rows}
    findings = _differences("frame field", expected, found, "csrc/wire/frame_layout.h")
    total = sum(TYPE_BYTES.get(kind, 0) for _, kind in expected.values())
    header_bytes = headers.constants(root / "csrc/wire/frame_layout.h").get("kFrameHeaderBytes")
    if total != header_bytes:
        findings.append(f"csrc/wire/frame_layout.h: the fields' comments cover {total} bytes of a header of {header_bytes}")
    return findings


def _limit_findings(text: str, root: Path) -> list[str]:
    rows = documents.table(text, "limits")
    if rows is None:
        return [f"{DOCUMENT}: no table is marked 'limits'"]
    expected: dict[str, int] = {}
    for header in LIMITS:
        expected.update(headers.constants(root / header, expected))
    found = {row[0]: documents.number(row[1]) for row in rows}
    return _differences("limit", expected, found, " or ".join(LIMITS))


def _enum_findings(text: str, root: Path, enum: str, header: str) -> list[str]:
    rows = documents.table(text, enum)
    if rows is None:
        return [f"{DOCUMENT}: no table is marked '{enum}'"]
    expected = headers.enumerators(root / header, enum)
    found = {row[1]: documents.number(row[0]) for row in rows}
    return _differences(enum, expected, found, header)


def _differences(what: str, expected: dict, found: dict, source: str) -> list[str]:
    findings = [f"{DOCUMENT}: {what} {name} of {source} is missing" for name in expected if name not in found]
    findings += [f"{DOCUMENT}: {what} {name} is not in {source}" for name in found if name not in expected]
    findings += [
        f"{DOCUMENT}: {what} {name} is {found[name]}, {source} says {expected[name]}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    return findings
