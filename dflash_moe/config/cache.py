"""What a process may keep on the disk of its machine: where, how much, and whether packed experts
are among it. A host hands these settings over to the workers that it starts.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# The word in place of a path with which nothing is kept and nothing is read.
NO_PATH = "none"
PATH_OPTION, MAX_BYTES_OPTION, PANELS_OPTION = "--cache-path", "--cache-max-bytes", "--cache-panels"


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The settings `cache.*` of one process. `path` and `max_bytes` None are derived by who keeps
    the files. With `is_off` nothing is kept and nothing is read, whatever else is said.

    `panels` is auto, on or off: whether packed experts are kept.
    """

    path: Path | None = None
    is_off: bool = False
    max_bytes: int | None = None
    panels: str = "auto"

    @property
    def has_panels(self) -> bool:
        """Whether packed experts may be mapped from files, and written there."""
        return not self.is_off and self.panels != "off"

    def to_options(self) -> list[str]:
        """Returns the words with which a host tells a worker that it starts; what is derived is
        empty.
        """
        path = NO_PATH if self.is_off else str(self.path or "")
        max_bytes = "" if self.max_bytes is None else str(self.max_bytes)
        return [PATH_OPTION, path, MAX_BYTES_OPTION, max_bytes, PANELS_OPTION, self.panels]

    @staticmethod
    def from_options(told: Mapping[str, str]) -> CacheSettings:
        """Returns what `to_options` wrote, by option."""
        path, max_bytes = told[PATH_OPTION], told[MAX_BYTES_OPTION]
        is_off = path == NO_PATH
        kept_in = Path(path) if path and not is_off else None
        return CacheSettings(kept_in, is_off, int(max_bytes) if max_bytes else None, told[PANELS_OPTION])


# Who is told nothing keeps nothing.
NO_CACHE = CacheSettings(is_off=True)
