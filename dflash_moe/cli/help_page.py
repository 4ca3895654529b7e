"""Writes help: options in groups, each in one line where the terminal is wide enough for it, and
all that there is to say of them for `dflash-moe help COMMAND`.

An option's help begins with a short sentence or clause, behind which more may stand; the short form
has that and the default.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

# These are the groups, and the order in which they are shown. A command's own options come first.
OWN, MODEL, SAMPLING, PLACEMENT, NETWORK, MORE = GROUPS = ("Options", "Model", "Sampling", "Placement", "Network", "More")
ARGUMENTS = "Arguments"
# Names that still work and are not shown.
FORMER_NAMES = ("--max-new-tokens",)
# Lines end where the terminal does, however wide it is.
ANY_WIDTH = 1 << 16
# Names of options take at most so many columns, and else a line of their own.
NAME_COLUMNS = 30

# Brackets of a help text have the default, the allowed range, or that the option is required.
_FACTS = re.compile(r"\s*\[((?:default: |required|-?[\d.]+<|x[<>]).*?)\](?=[.\s]|$)\.?", re.DOTALL)
# What ends a clause does not within parentheses.
_CLAUSE = re.compile(r"(?:\([^)]*\)|[^.:;(]|[.:;](?!\s|$))*")
_DEFAULT = "default: "
# Defaults that say nothing which the absence of a value does not.
_NO_DEFAULT = ("default: none", "default: nowhere")


def write_options(parameters: Sequence[Any], context: Any, formatter: Any, *, is_whole: bool) -> None:
    """Writes arguments and options of a command by group; with `is_whole` all of their help."""
    groups: dict[str, list[tuple[str, str]]] = {}
    own = MORE if any(_group_of(parameter) for parameter in parameters) else OWN
    for parameter in parameters:
        record = parameter.get_help_record(context)
        if record is None:
            continue
        usual = ARGUMENTS if parameter.param_type_name == "argument" else own if "--help" in parameter.opts else OWN
        text = record[1] if is_whole else brief(record[1])
        groups.setdefault(_group_of(parameter) or usual, []).append((_shown_names(parameter, record[0]), text))
    write_groups([(name, groups[name]) for name in (ARGUMENTS, *GROUPS) if name in groups], formatter)


def write_groups(groups: Iterable[tuple[str, Sequence[tuple[str, str]]]], formatter: Any) -> None:
    """Writes groups of rows, with the second column of all of them in the same place."""
    groups = list(groups)
    width = max((len(name) for _, rows in groups for name, _ in rows if len(name) <= NAME_COLUMNS), default=0)
    for heading, rows in groups:
        with formatter.section(heading):
            formatter.write_dl([(name.ljust(width), text) for name, text in rows], col_max=NAME_COLUMNS)


def brief(text: str) -> str:
    """Returns the first clause of an option's help, and its default where there is one."""
    facts = [fact.strip() for found in _FACTS.findall(text) for fact in found.split("; ")]
    clause = _CLAUSE.match(" ".join(_FACTS.sub("", text).split()))
    said = [fact for fact in facts if fact == "required" or (fact.startswith(_DEFAULT) and fact not in _NO_DEFAULT)]
    return " ".join([clause[0] if clause else "", *(f"[{fact}]" for fact in said)])


def first_paragraph(text: str) -> str:
    """Returns the first paragraph of a command's help, in one line."""
    return " ".join(text.partition("\n\n")[0].split())


def _group_of(parameter: Any) -> str | None:
    return getattr(parameter, "rich_help_panel", None)


def _shown_names(parameter: Any, names: str) -> str:
    """Returns the names and the value of an option, with those that have no short name in the
    column of the long ones.
    """
    for former in FORMER_NAMES:
        names = names.replace(f", {former}", "")
    is_long = parameter.param_type_name == "option" and names.startswith("--")
    return f"    {names}" if is_long else names
