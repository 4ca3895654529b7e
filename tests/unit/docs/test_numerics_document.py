"""docs/numerics.md against the table of numerics classes: every class, in its order, and every
fact of its row.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from pathlib import Path

from dflash_moe import _core
from tests.checks import documents

ROOT = Path(__file__).resolve().parents[3]
TABLE = (ROOT / "csrc/compute/numerics.cc").read_text(encoding="utf-8")
TEXT = (ROOT / "docs/numerics.md").read_text(encoding="utf-8")

_OFFERS = r'kEverybody|\{"([^"]*)", "([^"]*)", "([^"]*)", "([^"]*)"\}'
_ROW = re.compile(
    r'\{NumericsClass::k\w+, "([^"]+)", "([^"]+)", InputRounding::k(\w+), (\w+), WeightRounding::k(\w+),\s*'
    rf"FormatsTaken::k(\w+), Bits::k(\w+),\s*({_OFFERS})\}}"
)
ROUNDINGS = {"None": "themselves", "Bf16": "bf16", "Int8": "int8", "F16": "f16"}
FORMATS = {"All": "every format", "Bf16": "bf16", "IntegerCodes": "integer codes"}
BITS = {"Reference": "the reference's", "Architecture": "an architecture's"}
SCALED = ", a scale for 32"  # of inputs, and of weights that are rounded to f16


def _row(match: re.Match[str]) -> list[str]:
    name, activations, inputs, group, weights, formats, bits, offers = match.groups()[:8]
    shares_scales = SCALED if group == "kGroup" else ""
    columns = ["all"] * 4 if offers == "kEverybody" else [offer or "-" for offer in match.groups()[8:]]
    rounded = ROUNDINGS[weights] + (SCALED if weights == "F16" else "")
    return [name, activations, ROUNDINGS[inputs] + shares_scales, rounded, FORMATS[formats], BITS[bits], *columns]


def test_the_table_of_the_document_is_that_of_the_code() -> None:
    expected = [_row(match) for match in _ROW.finditer(TABLE)]
    assert [row[0] for row in expected] == [facts.name for facts in _core.numerics_table()]
    assert documents.table(TEXT, "classes") == expected


def test_every_class_is_defined() -> None:
    headings = " ".join(re.findall(r"^### Class.*$", TEXT, re.MULTILINE))
    assert set(re.findall(r"`([^`]+)`", headings)) == {facts.name for facts in _core.numerics_table()}
