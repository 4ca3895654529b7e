"""Sections of a topology that hold nothing but settings of the table: their keys, which may stand
one level deeper, and their values.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dflash_moe.config import SETTINGS, Setting
from dflash_moe.errors import ConfigError, TopologyError

if TYPE_CHECKING:
    from dflash_moe.topology.yaml_nodes import Value

# No list among the settings has more elements.
MAX_ELEMENTS = 8


def parse_section(root: Mapping[str, Value], name: str) -> Mapping[str, Any]:
    """Returns the parsed settings of a section by their keys below it, dotted where they stand one
    level deeper. Raises TopologyError.
    """
    if name not in root:
        return MappingProxyType({})
    settings = {setting.key: setting for setting in SETTINGS if setting.section == name and setting.key}
    return MappingProxyType(_parse(root[name], settings, ""))


def _parse(value: Value, settings: Mapping[str, Setting], above: str) -> dict[str, Any]:
    """Returns the settings whose keys begin with `above`, as far as `value` has them."""
    below = [key.removeprefix(above) for key in settings if key.startswith(above)]
    groups = {key.partition(".")[0] for key in below if "." in key}
    parsed: dict[str, Any] = {}
    for key, field in value.fields(dict.fromkeys(key.partition(".")[0] for key in below)).items():
        # A group may be switched as a whole, such as `restart: off`.
        if key in groups and (field.is_map() or above + key not in settings):
            parsed |= _parse(field, settings, f"{above}{key}.")
        else:
            parsed[above + key] = _check(field, settings[above + key])
    return parsed


def _check(field: Value, setting: Setting) -> Any:
    try:
        is_list = isinstance(setting.default, tuple) and field.is_list()
        return setting.check([item.scalar() for item in field.items(MAX_ELEMENTS)] if is_list else field.scalar(), field.path)
    except TopologyError:
        raise
    except ConfigError as error:
        raise field.error(str(error)) from None


def nested(section: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a section as a file writes it, with dotted keys one level deeper."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        group, dot, rest = key.partition(".")
        if dot:
            found.setdefault(group, {})[rest] = value
        else:
            found[key] = value
    return found
