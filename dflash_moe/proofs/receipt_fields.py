"""Reads the fields of a receipt, which anybody may have written: types, ranges and sizes are
checked before a value is used.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_moe.errors import ConfigError, shown
from dflash_moe.named_files import read_named

# A larger file is no receipt: that of a model of 1,000 layers, with its 16 positions, has 2 MB.
MAX_BYTES = 64 << 20


class Fields:
    """A map of a receipt. Errors are ConfigError, naming file and field."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: found {shown(value)}, expected a map; it is no receipt of `generate --receipt`")
        self._values: Mapping[str, Any] = value
        self.where = where
        self._read: set[str] = set()

    @classmethod
    def load(cls, path: Path) -> Fields:
        """Reads a file."""
        try:
            data = read_named(path, MAX_BYTES)
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read ({error.strerror}); give the file that `generate --receipt` wrote"
            ) from None
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path}: has more than {MAX_BYTES >> 20} MiB; it is no receipt of `generate --receipt`")
        try:
            return cls(json.loads(data.decode()), str(path))
        except (ValueError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path}: is no JSON ({shown(str(error))}); it is no receipt of `generate --receipt`") from None

    def whole(self, key: str, lowest: int, highest: int) -> int:
        """Returns a whole number within these bounds."""
        value = self._value(key)
        if type(value) is not int or not lowest <= value <= highest:
            raise self._refusal(key, value, f"a whole number {lowest}..{highest}")
        return value

    def text(self, key: str, pattern: str = r"[^\x00\ud800-\udfff]{0,4096}") -> str:
        """Returns a text that is all of `pattern`."""
        return self._text(key, self._value(key), pattern)

    def texts(self, key: str, most: int, pattern: str = r"[^\x00\ud800-\udfff]{0,4096}") -> tuple[str, ...]:
        """Returns a list of at most `most` texts."""
        return tuple(self._text(f"{key}[{place}]", value, pattern) for place, value in enumerate(self._list(key, most)))

    def lists(self, key: str, num_lists: int, count: int, pattern: str) -> tuple[tuple[str, ...], ...]:
        """Returns `num_lists` lists of `count` texts each."""
        found = self._list(key, num_lists)
        if len(found) != num_lists or not all(isinstance(one, list) and len(one) == count for one in found):
            raise self._refusal(key, found, f"{num_lists} lists of {count}")
        return tuple(tuple(self._text(key, value, pattern) for value in one) for one in found)

    def numbers(self, key: str, highest: int, most: int) -> tuple[int, ...]:
        """Returns a list of at most `most` whole numbers 0..highest."""
        found = self._list(key, most)
        for place, value in enumerate(found):
            if type(value) is not int or not 0 <= value <= highest:
                raise self._refusal(f"{key}[{place}]", value, f"a whole number 0..{highest}")
        return tuple(found)

    def part(self, key: str) -> Fields:
        """Returns a map within this one."""
        return Fields(self._value(key), f"{self.where}: {key}")

    def parts(self, key: str, most: int) -> tuple[Fields, ...]:
        """Returns a list of at most `most` maps."""
        return tuple(Fields(value, f"{self.where}: {key}[{place}]") for place, value in enumerate(self._list(key, most)))

    def all(self) -> dict[str, Any]:
        """Returns the values as they are, for somebody else to check."""
        self._read |= self._values.keys()
        return dict(self._values)

    def end(self) -> None:
        """Refuses fields that nobody has read."""
        for key in self._values.keys() - self._read:
            raise ConfigError(f"{self.where}: {shown(key)} is no field of a receipt; it is damaged, or of another version")

    def refuse(self, key: str, expected: str) -> ConfigError:
        """Returns the error that names a field and what was expected of it."""
        return self._refusal(key, self._values.get(key), expected)

    def _value(self, key: str) -> Any:
        if key not in self._values:
            raise ConfigError(f"{self.where}: {key} is missing; it is no whole receipt of `generate --receipt`")
        self._read.add(key)
        return self._values[key]

    def _list(self, key: str, most: int) -> list[Any]:
        value = self._value(key)
        if not isinstance(value, list) or len(value) > most:
            raise self._refusal(key, value, f"a list of at most {most}")
        return value

    def _text(self, key: str, value: object, pattern: str) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII | re.DOTALL):
            raise self._refusal(key, value, "a text of another form")
        return value

    def _refusal(self, key: str, value: object, expected: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key}: found {shown(value)}, expected {expected}")
