"""Resolves the settings of one runtime from all the places where they can be given.

A Python argument or flag wins over the environment, that over the topology, and that over the
default; commands put their config file between the last two (cli/config_file.py). A value that is
not allowed is a `ConfigError` that names where it came from, the value and what is allowed; nothing
falls back silently.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from dflash_moe.config.setting import Setting
from dflash_moe.config.settings import CONFIG_VARIABLE, PREFIX, SETTINGS, SETTINGS_BY_NAME, Settings
from dflash_moe.config.values import MAX_COMPARED, did_you_mean
from dflash_moe.errors import ConfigError, shown


def resolve_settings(
    stated: Mapping[str, Any] | None = None, *, environ: Mapping[str, str] = os.environ, **overrides: Any
) -> Settings:
    """Resolves the settings: `overrides` win over `environ`, that wins over `stated` (what a
    topology says, by dotted keys such as "ipc.mode": `Topology.stated_settings`), and that over the
    defaults. An override of None counts as not given.

    Raises ConfigError for a value that is not allowed, an unknown argument or key, or an unknown
    DFLASH_MOE_ variable.
    """
    stated = stated or {}
    check_environment(environ)
    for name in overrides:
        if name not in SETTINGS_BY_NAME:
            raise ConfigError(f"unknown setting {shown(name)}{did_you_mean(name, SETTINGS_BY_NAME)}")
    known = [setting.yaml for setting in SETTINGS if setting.yaml and setting.is_stated]
    for key in stated:
        if key not in known:
            raise ConfigError(f"unknown key {shown(key)}{did_you_mean(str(key), known)}")
    given = {setting.name: _find(setting, overrides, environ, stated) for setting in SETTINGS}
    values = {name: SETTINGS_BY_NAME[name].check(*found) for name, found in given.items() if found is not None}
    return _bounded(values, {name: found[1] for name, found in given.items() if found is not None})


def stated_settings(
    stated: Mapping[str, Any] | None = None, *, environ: Mapping[str, str] = os.environ
) -> dict[str, tuple[Any, str]]:
    """Returns each setting that is not left to its default, as it is written, with where it is: the
    variable, or the dotted key of `stated`.
    """
    given = {setting.name: _find(setting, {}, environ, stated or {}) for setting in SETTINGS}
    return {name: found for name, found in given.items() if found is not None}


def check_environment(environ: Mapping[str, str]) -> None:
    """Raises ConfigError for a DFLASH_MOE_ variable that is no setting, because a misspelt one
    would otherwise silently do nothing.
    """
    known = [CONFIG_VARIABLE, *(setting.environment for setting in SETTINGS if setting.environment)]
    for variable in environ:
        if variable.startswith(PREFIX) and variable not in known:
            # The common prefix would make all variables close to each other.
            suffixes = {name.removeprefix(PREFIX): name for name in known}
            close = difflib.get_close_matches(variable.removeprefix(PREFIX)[:MAX_COMPARED], suffixes, n=1)
            hint = f"; did you mean {suffixes[close[0]]!r}?" if close else "; unset it"
            raise ConfigError(f"environment variable {variable} is not a setting{hint}")


def _find(
    setting: Setting, overrides: Mapping[str, Any], environ: Mapping[str, str], stated: Mapping[str, Any]
) -> tuple[Any, str] | None:
    """Returns raw value and origin of the source that wins, None when only the default is left."""
    if overrides.get(setting.name) is not None:
        return overrides[setting.name], f"{setting.name}=" if setting.flag is None else f"{setting.name} ({setting.flag})"
    if setting.environment and setting.environment in environ:
        return environ[setting.environment], setting.environment
    if setting.yaml and stated.get(setting.yaml) is not None:
        return stated[setting.yaml], setting.yaml
    return None


def _bounded(values: dict[str, Any], origins: Mapping[str, str]) -> Settings:
    """Applies the one bound between two settings: a stream's slice is at most its maximum. A
    default follows a lowered maximum, and a stated value beyond it raises ConfigError.
    """
    stated = Settings(**values)
    if stated.stream_tokens <= stated.stream_tokens_max:
        return stated
    if "stream_tokens" not in values:
        return Settings(**values | {"stream_tokens": stated.stream_tokens_max})
    bound = SETTINGS_BY_NAME["stream_tokens_max"]
    raise ConfigError(
        f"{origins['stream_tokens']}: {stated.stream_tokens} is not allowed; allowed: 1..{stated.stream_tokens_max} tokens "
        f"({bound.environment}, {bound.yaml})"
    )
