"""The file of everyday options: what holds for `chat`, `generate`, `plan`, `verify` and `diff`
where neither command line, environment nor topology say otherwise. Nothing else reads it: a
measurement or a program in Python does not depend on whose home it runs in.

Its keys are those options of the commands and settings that have a flag, by their names in Python.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_moe.config import SETTINGS, SETTINGS_BY_NAME
from dflash_moe.config.settings import CONFIG_VARIABLE
from dflash_moe.errors import ConfigError, shown
from dflash_moe.named_files import read_named

if TYPE_CHECKING:
    from dflash_moe.topology import Topology
    from dflash_moe.topology.yaml_nodes import Value

# The value of the variable that stands for no file.
NO_FILE = "none"
PLACE = Path("dflash-moe") / "config.yaml"
MAX_FILE_BYTES = 1 << 20
TEXTS = ("model", "topology", "system")
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
KEYS = (*TEXTS, *SAMPLING, *(setting.name for setting in SETTINGS if setting.flag))


@dataclass(frozen=True, slots=True)
class Stated:
    """A value of the file, and where it stands: FILE:LINE."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What the file states: options of commands, and parsed settings, by name."""

    path: Path | None = None
    options: Mapping[str, Stated] = field(default_factory=dict)
    settings: Mapping[str, Stated] = field(default_factory=dict)

    def unstated(self, topology: Topology, given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Stated]:
        """Returns the settings of the file that nobody else states: neither `given` (flags), nor
        `environ`, nor the topology. Without a fit there are no layers to put on cards.
        """
        from dflash_moe.topology.topology import FITTED

        stated = {key for key, value in topology.stated_settings.items() if value is not None}
        if any(worker.threads for worker in topology.workers):
            stated.add(str(SETTINGS_BY_NAME["threads"].yaml))
        elsewhere = () if topology.source == FITTED else ("experts_on_card",)
        return {
            name: found
            for name, found in self.settings.items()
            if given.get(name) is None
            and SETTINGS_BY_NAME[name].environment not in environ
            and SETTINGS_BY_NAME[name].yaml not in stated
            and name not in elsewhere
        }


def read_config_file(environ: Mapping[str, str] = os.environ) -> ConfigFile:
    """Reads the file that DFLASH_MOE_CONFIG names, or else the usual one where it is there. Raises
    ConfigError that begins with `file:line:` and names the key.
    """
    named = environ.get(CONFIG_VARIABLE)
    if named == NO_FILE:
        return ConfigFile()
    path = _usual_path(environ) if named is None else Path(os.path.expanduser(named))
    if path is None or (named is None and not path.is_file()):
        return ConfigFile()
    text = _read(path, "" if named is None else f"{CONFIG_VARIABLE}={named}: ")
    stated = parse_options(text, str(path))
    options = {name: one for name, one in stated.items() if name not in SETTINGS_BY_NAME}
    return ConfigFile(path, options, {name: one for name, one in stated.items() if name in SETTINGS_BY_NAME})


def parse_options(text: str, source: str) -> dict[str, Stated]:
    """Returns what the text of a file states, checked. `source` is what errors call the file."""
    fields = _fields(text, source)
    return {name: Stated(_parsed(name, value), f"{source}:{value.line}") for name, value in fields.items()}


def _usual_path(environ: Mapping[str, str]) -> Path | None:
    home = environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home) / PLACE if os.path.isabs(home) else None


def _read(path: Path, named_by: str) -> str:
    try:
        content = read_named(path, MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(
            f"{named_by}{shown(str(path))} cannot be read: {error.strerror}; name a file of options, or "
            f"{CONFIG_VARIABLE}={NO_FILE}"
        ) from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}:1: the file is larger than {MAX_FILE_BYTES} bytes; it holds a few options")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: the file is not UTF-8 text") from None


def _fields(text: str, source: str) -> dict[str, Value]:
    from dflash_moe.topology.yaml_nodes import compose

    if not any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines()):
        return {}
    root = compose(text, source)
    if not root.is_map():
        raise root.error("the file must be a map of options, such as `max_context: 16384`")
    return root.fields(KEYS)


def _parsed(name: str, value: Value) -> Any:
    if name in TEXTS:
        text = value.text()
        return os.path.expanduser(text) if name != "system" else text
    try:
        if name in SETTINGS_BY_NAME:
            return SETTINGS_BY_NAME[name].check(value.scalar(), name)
        from dflash_moe.engine.sampling.sampling_params import SamplingParams

        return getattr(SamplingParams(**{name: value.scalar()}), name)  # type: ignore[arg-type]
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(value.source) else f"{value.source}:{value.line}: {text}") from None
