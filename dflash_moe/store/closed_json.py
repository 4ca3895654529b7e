"""JSON of one form only, for what the store reads back from disk: every key is known and there,
every value has its type and bounds, and the bytes are those that writing it again would give.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from dflash_moe.errors import shown

# Says whether a value may stand under its key.
Check = Callable[[Any], bool]


def encode(value: Any) -> bytes:
    """Returns the JSON of a value: ASCII, sorted keys, no spaces. Raises ValueError for numbers
    that JSON lacks.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")


def decode(text: bytes) -> Any:
    """Returns the value of JSON that `encode` wrote. Raises ValueError for all other bytes, which
    the caller has bounded in number.
    """
    try:
        value = json.loads(text.decode("ascii"))
        if encode(value) != text:
            raise ValueError("its JSON has another form than the store writes")
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None
    return value


def fields(value: Any, schema: Mapping[str, Check], what: str) -> dict[str, Any]:
    """Returns a map whose keys are those of the schema and whose values pass its checks. Raises
    ValueError that names the key. `what` is what the map describes.
    """
    if type(value) is not dict or value.keys() != schema.keys():
        found = sorted(value) if type(value) is dict else value
        raise ValueError(f"{what} must have the keys {', '.join(sorted(schema))}, and has {shown(found)}")
    for key, is_allowed in schema.items():
        if not is_allowed(value[key]):
            raise ValueError(f"{what}: {key} is {shown(value[key])}, which it cannot be")
    return value


def whole(low: int, high: int) -> Check:
    """Allows whole numbers from `low` to `high`; true and false are none."""
    return lambda value: type(value) is int and low <= value <= high


def one_of(*allowed: str) -> Check:
    """Allows these words."""
    return lambda value: type(value) is str and value in allowed


def matching(pattern: str) -> Check:
    """Allows texts that match all of a pattern, in which only ASCII has classes."""
    compiled = re.compile(pattern, re.ASCII)
    return lambda value: type(value) is str and compiled.fullmatch(value) is not None


def list_of(check: Check, low: int, high: int) -> Check:
    """Allows lists of `low` to `high` values that pass a check."""
    return lambda value: type(value) is list and low <= len(value) <= high and all(map(check, value))


def row_of(*checks: Check) -> Check:
    """Allows lists with one value for each check."""
    return lambda value: type(value) is list and len(value) == len(checks) and all(map(_passes, checks, value))


def _passes(check: Check, value: Any) -> bool:
    return check(value)
