"""Reads constants, enumerations and tables of fields from the C++ headers, for comparison with the
documents.

It understands only the forms that the headers use. A header that changes its form makes the reader
return less, and the checks that compare both ways then fail.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

_CONSTANT = re.compile(r"^inline constexpr [\w:]+ (k\w+) = ([^;]+);", re.MULTILINE)
_ENUM = re.compile(r"enum class (\w+) : \w+ \{(.*?)\};", re.DOTALL)
_ENUMERATOR = re.compile(r"(k\w+)\s*=\s*(\d+)")
_FRAME_OFFSETS = re.compile(r"^namespace frame_offset \{(.*?)^\}", re.DOTALL | re.MULTILINE)
_FRAME_FIELD = re.compile(r"^inline constexpr uint32_t k(\w+) = (\d+);\s*// (u\d+)$", re.MULTILINE)


def constants(path: Path, known: Mapping[str, int] | None = None) -> dict[str, int]:
    """Returns the `inline constexpr` integers by name. Their expressions may use +, -, *, <<, and
    names that were read before or are given in `known`.
    """
    values: dict[str, int] = {}
    for name, expression in _CONSTANT.findall(path.read_text(encoding="utf-8")):
        cleaned = re.sub(r"(?<=[0-9a-fA-F])(?:ull|ul|u|ll)\b", "", expression.replace("'", ""))
        values[name] = _evaluate(ast.parse(cleaned, mode="eval").body, {**(known or {}), **values})
    return values


def _evaluate(node: ast.expr, known: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return known[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left, known), _evaluate(node.right, known)
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.LShift):
            return left << right
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
    raise ValueError(f"cannot read the constant {ast.unparse(node)}")


def enumerators(path: Path, enum: str) -> dict[str, int]:
    """Returns the values by name of an `enum class` whose enumerators all have explicit values."""
    for name, body in _ENUM.findall(path.read_text(encoding="utf-8")):
        if name == enum:
            code = "\n".join(line.split("//")[0] for line in body.splitlines())
            return {key: int(value) for key, value in _ENUMERATOR.findall(code)}
    raise ValueError(f"{path}: no enum class {enum}")


def frame_fields(path: Path) -> dict[str, tuple[int, str]]:
    """Field of the frame header -> (byte offset, type), from the constants of `frame_offset` and
    the comments beside them; the name is the constant's, in the document's spelling.
    """
    offsets = _FRAME_OFFSETS.search(path.read_text(encoding="utf-8"))
    if offsets is None:
        return {}
    return {
        re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower(): (int(offset), kind)
        for name, offset, kind in _FRAME_FIELD.findall(offsets[1])
    }
