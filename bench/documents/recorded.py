"""Reads the recorded results for the tables. Each row that is read counts as shown.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash_moe.bench.results import read_result

Row = Mapping[str, Any]


class Recorded:
    """The results in the folder bench/results. A missing file is an error that says how it is
    made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: dict[str, dict[str, Any]] = {}
        self._shown: dict[str, set[int]] = {}

    def names(self) -> list[str]:
        """Returns the names of all results without their suffix."""
        return sorted(path.stem for path in self._folder.glob("*.json"))

    def result(self, name: str) -> dict[str, Any]:
        """Returns a whole result."""
        if name not in self._loaded:
            path = self._folder / f"{name}.json"
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path.name} is not recorded; `make results ONLY=STEP` measures it, "
                    "and `python -m bench.record --list` names its step"
                )
            self._loaded[name] = read_result(path)
        return self._loaded[name]

    def rows(self, name: str, wanted: Callable[[Row], bool] = lambda _row: True) -> list[Row]:
        """Returns the rows of a result for a table that shows each of them."""
        shown = self._shown.setdefault(name, set())
        found = []
        for place, row in enumerate(self.result(name)["rows"]):
            if wanted(row):
                shown.add(place)
                found.append(row)
        return found

    def row(self, name: str, /, **fields: Any) -> Row:
        """Returns the one row with these fields, for a figure in a sentence."""
        found = [row for row in self.result(name)["rows"] if all(row.get(key) == value for key, value in fields.items())]
        if len(found) != 1:
            raise KeyError(f"{name}.json has {len(found)} rows with {fields}")
        return found[0]

    def summary(self, name: str) -> list[Row]:
        """Returns what the measuring program made of the rows."""
        return list(self.result(name)["summary"])

    def unshown(self) -> list[str]:
        """Returns the results that no table reads, and the rows that tables leave out, because a
        table must not pass over what it does not like.
        """
        found = []
        for name in self.names():
            if name not in self._shown:
                found.append(f"bench/results/{name}.json: no table shows it")
                continue
            for place, row in enumerate(self.result(name)["rows"]):
                if place not in self._shown[name]:
                    found.append(f"bench/results/{name}.json: row {row.get('name')!r} ({place}) stands in no table")
        return found
