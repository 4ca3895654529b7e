"""Options and output that commands share: flags made from the table of settings, model and
topology, tables and progress.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli import help_page
from dflash_moe.cli.config_file import read_config_file
from dflash_moe.cli.json_output import STDOUT as STDOUT
from dflash_moe.cli.json_output import json_option as json_option
from dflash_moe.cli.json_output import prepare_outputs as prepare_outputs
from dflash_moe.cli.json_output import write_json as write_json
from dflash_moe.cli.model_path import model_directory as model_directory
from dflash_moe.config import SETTINGS, Setting, resolve_settings
from dflash_moe.errors import ConfigError, DflashError, printable, shown

if TYPE_CHECKING:
    from dflash_moe.holders.threads import ThreadPlan
    from dflash_moe.topology import Topology

ModelOption = Annotated[
    str,
    typer.Option(
        "-m",
        "--model",
        metavar="PATH",
        help="A GGUF file, a folder of safetensors and config.json, or `demo`. Of a split GGUF file any part; `demo` is the "
        "shipped model.",
        show_default=False,
        rich_help_panel=help_page.MODEL,
    ),
]
TopologyOption = Annotated[
    Path | None,
    typer.Option(
        "--topology",
        metavar="FILE",
        help="YAML file of host and workers. `bench` and `llama` take one local CPU worker without one [default: fitted to "
        "this machine].",
        show_default=False,
        rich_help_panel=help_page.PLACEMENT,
    ),
]

ExplainOption = Annotated[
    bool,
    typer.Option(
        "--explain-auto",
        help="What mode auto measured, predicted and chose per worker: at the end, on stderr.",
        rich_help_panel=help_page.MORE,
    ),
]
VerboseOption = Annotated[
    bool,
    typer.Option(
        "-v",
        "--verbose",
        help="Say how workers are reached too: transports, bytes moved, who stands in for whom.",
        rich_help_panel=help_page.MORE,
    ),
]
# Settings whose flag has a letter, where the command's program does not use it for itself.
LETTERS = {"max_context": "-c", "threads": "-t"}
# The group of a setting in help follows from where a topology has it.
_GROUPS = {"ipc": help_page.NETWORK, "engine": help_page.MODEL}

# The generators of torch take no larger seed.
MAX_SEED = (1 << 63) - 1

_NUMBER = re.compile(r"[-+]?[0-9.,]*[%x]?", re.ASCII)
# These variables make every OpenMP runtime wait passively. They are read when torch loads.
PASSIVE_OPENMP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}


def with_settings(
    *, has_letters: bool = True, reads_config: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command that takes `**overrides` a flag for each setting. `overrides` then has the
    checked values of the flags that were given, and of the config file where the command
    `reads_config` and nobody else states them. In front of a program's own flags a command has no
    letters.

    It also checks environment and topology, and prepares OpenMP, before the command imports torch.
    """
    return lambda command: _with_settings(command, LETTERS if has_letters else {}, reads_config)


def _with_settings(command: Callable[..., Any], letters: Mapping[str, str], reads_config: bool) -> Callable[..., Any]:
    flagged = [setting for setting in SETTINGS if setting.flag]
    hints = typing.get_type_hints(command, include_extras=True)
    kept = [
        parameter.replace(annotation=hints.get(parameter.name, parameter.annotation), kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(command).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter(setting.name, keyword, default=None, annotation=setting_option(setting, letters.get(setting.name)))
        for setting in flagged
    ]
    explain = inspect.Parameter("explain_auto", keyword, default=False, annotation=ExplainOption)

    @functools.wraps(command)
    def wrapper(**given: Any) -> Any:
        if given.pop("explain_auto", False):
            show_log("auto")
        raw = {setting.name: given.pop(setting.name, None) for setting in flagged}
        overrides = check_flags(raw)
        topology = given_topology(given.get("topology"))
        if reads_config:
            stated = read_config_file().unstated(topology, overrides, os.environ)
            overrides |= {name: found.value for name, found in stated.items()}
        show_log("plan")
        show_log("notices")
        prepare_host(topology, overrides)
        return command(**given, **overrides)

    del wrapper.__wrapped__
    wrapper.__signature__ = inspect.Signature([*kept, *added, explain])  # type: ignore[attr-defined]
    wrapper.reads_config = reads_config  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in (*kept, *added, explain)}
    return wrapper


def setting_option(setting: Setting, letter: str | None = None) -> Any:
    """Returns the annotation of a command's parameter for one setting. Its help has the allowed
    values, the default and the variable.
    """
    variable = f"; environment {setting.environment}" if setting.environment else ""
    text = f"{setting.help}. Allowed: {setting.allowed} [default: {setting.default_text}{variable}]."
    names = [letter, setting.flag or ""] if letter else [setting.flag or ""]
    group = help_page.MORE if setting.name == "profile" else _GROUPS.get((setting.yaml or "").partition(".")[0])
    return Annotated[
        str | None,
        typer.Option(
            *names, metavar=setting.metavar, help=text, show_default=False, rich_help_panel=group or help_page.PLACEMENT
        ),
    ]


def check_flags(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parsed values of the settings that are given, which are those not None. Raises
    ConfigError that names the flag.
    """
    return {
        setting.name: setting.check(raw[setting.name], setting.flag or setting.name)
        for setting in SETTINGS
        if raw.get(setting.name) is not None
    }


def words(text: str) -> tuple[str, ...]:
    """Returns the distinct items of a comma-separated list in lower case, in their order."""
    return tuple(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))


def numbers(text: str, flag: str, most: int) -> tuple[int, ...]:
    """Returns the distinct numbers of a comma-separated list, in their order. Raises ConfigError
    that names the flag for anything else, and for numbers outside 1..most.
    """
    parts = words(text)
    if not parts or not all(part.isascii() and part.isdigit() and 1 <= int(part[:18]) <= most for part in parts):
        raise ConfigError(f"{flag} {shown(text)}: give one or more numbers of 1..{most}, separated by commas")
    return tuple(dict.fromkeys(int(part) for part in parts))


def load_topology(path: Path | None) -> Topology:
    """Reads the topology file. Without one it returns a local CPU worker with as many threads as
    there are cores for it.
    """
    from dflash_moe.topology import Topology

    return Topology.local(1, threads=None) if path is None else Topology.load(path)


def given_topology(path: Path | None) -> Topology:
    """Reads the topology file. Without one it returns what stands for a fit that is made once torch
    is loaded; only its threads count, and they never outnumber the cores where this one's do not.
    """
    from dflash_moe.topology import Topology
    from dflash_moe.topology.topology import FITTED

    if path is not None:
        return Topology.load(path)
    return dataclasses.replace(Topology.local(1, threads=None), source=FITTED)


def topology_for(path: Path | None, model: Path, overrides: Mapping[str, Any], *, front_bytes: int = 0) -> Topology:
    """Reads the topology file. Without one the model is fitted to this machine, and the plan is
    said in at most eight lines; it leaves `front_bytes` of memory to a server's front. Errors are
    those of `Topology.load` and `fit_here`.
    """
    if path is not None:
        return load_topology(path)
    from dflash_moe.forward.fitted import fit_here

    return fit_here(model, overrides, front_bytes=front_bytes).topology


def prepare_host(topology: Topology, overrides: Mapping[str, Any] | None = None) -> ThreadPlan:
    """Call before torch is imported: where threads outnumber cores, OpenMP must wait passively,
    because its default, an active wait, takes the workers' cores for milliseconds in every layer.
    `host.threads`, where the topology states it, is the number of torch's threads too.

    Variables that the user has set stay. Raises ConfigError for the settings and for what
    `check_paths` finds, before seconds of imports.
    """
    from dflash_moe.holders.threads import thread_plan
    from dflash_moe.holders.transports import check_paths

    settings = resolve_settings(topology.stated_settings, **(overrides or {}))
    topology = topology.with_settings(settings)
    check_paths(topology, settings)
    plan = thread_plan(topology, settings)
    if plan.is_oversubscribed:
        for name, value in PASSIVE_OPENMP.items():
            os.environ.setdefault(name, value)
    if topology.host.threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(topology.host.threads))
    return plan


class _Saying(logging.Handler):
    """Says records on what is stderr at that time: a prompt may stand there by then."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def show_log(name: str) -> None:
    """Lets through to stderr what a log says: `auto` why a mode was chosen, `plan` where experts go
    and in which classes, `notices` what workers come and go.
    """
    shown_log = logging.getLogger(f"dflash_moe.{name}")
    shown_log.handlers = [_Saying()]
    shown_log.setLevel(logging.INFO)
    shown_log.propagate = False


def say(line: str) -> None:
    """Prints one line of progress on stderr."""
    print(printable(line), file=sys.stderr, flush=True)  # noqa: T201


def refuse_faults(said: str, faults: Sequence[str]) -> None:
    """Ends a command that proves something: says all faults but the first, which stands behind
    `said` in a DflashError. Does nothing where there is none.
    """
    for fault in faults[1:]:
        say(fault)
    if faults:
        raise DflashError(f"{said}{faults[0]}")


class Table:
    """A table in plain text. Columns of numbers are aligned to the right."""

    def __init__(self, *columns: str) -> None:
        self._rows: list[tuple[str, ...]] = [columns]

    @property
    def row_count(self) -> int:
        """The number of rows without the header."""
        return len(self._rows) - 1

    def add_row(self, *cells: str) -> None:
        """Adds a row with as many cells as there are columns."""
        if len(cells) != len(self._rows[0]):
            raise ValueError(f"{len(cells)} cells for {len(self._rows[0])} columns")
        self._rows.append(cells)

    def lines(self) -> list[str]:
        """Returns the lines of header, rule and rows."""
        header, *rows = self._rows
        widths = [max(len(row[at]) for row in self._rows) for at in range(len(header))]
        is_number = [bool(rows) and all(_NUMBER.fullmatch(row[at]) for row in rows) for at in range(len(header))]

        def line(row: tuple[str, ...]) -> str:
            cells = zip(row, widths, is_number, strict=True)
            return "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells).rstrip()

        return [line(header), "  ".join("-" * width for width in widths), *(line(row) for row in rows)]


# A column of a table: its head, and what stands under it, as a format of a row's fields or as a
# function of the row.
Column = tuple[str, str | Callable[[Any], str]]


def show_rows(rows: Iterable[Any], *columns: Column) -> None:
    """Prints a table on stdout, with a line for each row and an empty line after it."""
    made = Table(*(head for head, _ in columns))
    for row in rows:
        made.add_row(*(cell.format_map(row) if isinstance(cell, str) else cell(row) for _, cell in columns))
    show(made)


def show(shown: Table) -> None:
    """Prints a table on stdout, with an empty line after it."""
    typer.echo("\n".join(shown.lines()) + "\n")
