"""Says which tensors of experts workers cannot compute: one line for each reason, and not one for
each tensor.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# Reasons that name a tensor of their own layer are the same reason in every layer.
_BLOCK = re.compile(r"\bblk\.[0-9]+\.", re.ASCII)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Tensors with one reason. `names` is a text that says how many there are."""

    names: str
    is_one: bool
    reason: str


def grouped(left_out: Mapping[str, str]) -> list[LeftOut]:
    """Groups the tensors of `GgufExperts.left_out` by reason, in the order of the file."""
    groups: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        groups.setdefault(_BLOCK.sub("blk.N.", reason), []).append(name)
    return [_group(names, general, left_out[names[0]]) for general, names in groups.items()]


def _group(names: list[str], general: str, first_reason: str) -> LeftOut:
    if len(names) == 1:
        return LeftOut(names[0], True, first_reason.removeprefix(f"{names[0]} "))
    is_one_reason = len({match[0] for name in names for match in [_BLOCK.match(name)] if match}) == 1
    reason = first_reason if is_one_reason else general
    return LeftOut(f"{names[0]} and {len(names) - 1} more", False, reason)
