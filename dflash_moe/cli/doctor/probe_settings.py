"""Finds which settings and everyday options are not at their default, and where each of them comes
from, for `doctor`.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dflash_moe.cli.config_file import read_config_file
from dflash_moe.config import MemoryBudget, format_bytes, stated_settings
from dflash_moe.errors import ConfigError

if TYPE_CHECKING:
    from dflash_moe.topology import Topology


def probe_settings(topology: Topology, problems: list[str]) -> dict[str, dict[str, str]]:
    """Returns by name the value, as text, and its place: a variable, a key of the topology, or a
    line of the config file, which counts for the commands that read it. A file that is wrong is
    one more of `problems`.
    """
    found = {}
    for name, (value, origin) in stated_settings(topology.stated_settings).items():
        place = origin if origin in os.environ else f"{topology.source}: {origin}"
        found[name] = {"value": _text(value), "from": place}
    try:
        file = read_config_file()
    except ConfigError as error:
        problems.append(str(error))
        return found
    for name, one in {**file.options, **file.unstated(topology, {}, os.environ)}.items():
        found[name] = {"value": _text(one.value), "from": one.origin}
    return found


def settings_lines(found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Returns the lines of the report."""
    if not found:
        return ["settings   all have their defaults"]
    widths = [max(map(len, column)) for column in zip(*((name, one["value"]) for name, one in found.items()), strict=True)]
    lines = [f"{name.ljust(widths[0])}  {one['value'].ljust(widths[1])}  {one['from']}" for name, one in found.items()]
    lines.append("all others have their defaults")
    return [f"{'settings' if at == 0 else '':<11}{line}" for at, line in enumerate(lines)]


def _text(value: Any) -> str:
    if isinstance(value, MemoryBudget):
        return format_bytes(value.num_bytes) if value.fraction is None else f"{100 * value.fraction:g}%"
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
