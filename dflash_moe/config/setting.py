"""One row of the table of settings: where it can be given, what it may be, and how a value is
checked.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_moe.config.values import Parser
from dflash_moe.errors import ConfigError, shown

# The sections of a topology whose keys are settings of the table.
SECTIONS = ("ipc", "host", "engine", "failure", "audit", "cache")
# Keys of the topology itself that are settings of the table.
ROOT_SETTINGS = ("preset",)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. `flag`, `environment` and `yaml` are None where the setting cannot be
    given that way.
    """

    name: str
    flag: str | None
    environment: str | None
    # The key is dotted. Keys outside of SECTIONS are read by the topology alone.
    yaml: str | None
    parse: Parser
    allowed: str
    default: Any
    default_text: str
    help: str
    metavar: str = "TEXT"

    @property
    def section(self) -> str | None:
        """The one of SECTIONS that has the setting's key, None where none has."""
        section = self.yaml.partition(".")[0] if self.yaml else ""
        return section if section in SECTIONS else None

    @property
    def key(self) -> str | None:
        """The key below `section`, which may be dotted again, None where there is none."""
        return self.yaml.partition(".")[2] if self.yaml and self.section else None

    @property
    def is_stated(self) -> bool:
        """Whether `Topology.stated_settings` can have its key."""
        return self.section is not None or self.yaml in ROOT_SETTINGS

    def check(self, value: object, origin: str) -> Any:
        """Returns the parsed value. Raises ConfigError that names `origin` (flag, variable, key or
        argument), the value and what is allowed.
        """
        try:
            return self.parse(value)
        except ValueError:
            found = shown(value) if isinstance(value, str | int | float | bool | list | None) else repr(type(value).__name__)
            raise ConfigError(f"{origin}: {found} is not allowed; allowed: {self.allowed}") from None
