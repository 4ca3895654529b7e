"""What all commands are made of: their parser, whose options may lack their value, and their help.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from dflash_moe.cli import help_page
from dflash_moe.cli.json_output import STDOUT, json_on_stdout, prepare_outputs
from dflash_moe.cli.model_path import names_model
from dflash_moe.errors import shown

CONTEXT_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": help_page.ANY_WIDTH}
# So many letters of a misspelt word are compared: the work grows with their number squared.
MAX_COMPARED = 100
# Under this key a context says that all help is to be shown.
WHOLE_HELP = "dflash_moe.whole_help"
# These options may stand without a value, and then have this one.
VALUES_LEFT_OUT = {"--json": str(STDOUT), "--profile": "1"}


class Command(TyperCommand):
    """A command. Its outputs `json_out` and `plot` are tried before it runs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_asked_for_help = ctx.resilient_parsing or not {"-h", "--help"}.isdisjoint(args)
        if getattr(self.callback, "reads_config", False) and not is_asked_for_help:
            ctx.default_map = _config_defaults(self.params)
        return super().parse_args(ctx, with_values(args, self.params))

    def invoke(self, ctx: Any) -> Any:
        # Some versions of the parser have texts here.
        outputs = [None if ctx.params.get(name) is None else Path(ctx.params[name]) for name in ("json_out", "plot")]
        prepare_outputs(*outputs)
        with json_on_stdout() if outputs[0] == STDOUT else contextlib.nullcontext():
            return super().invoke(ctx)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        if ctx.meta.get(WHOLE_HELP):
            super().format_help_text(ctx, formatter)
            return
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(help_page.first_paragraph(self.help or ""))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        is_whole = bool(ctx.meta.get(WHOLE_HELP))
        help_page.write_options(self.get_params(ctx), ctx, formatter, is_whole=is_whole)
        if not is_whole:
            formatter.write_paragraph()
            # The root's own path has no word of arguments in it.
            program = ctx.find_root().info_name
            words = ctx.command_path.removeprefix(program).strip()
            formatter.write_text(f"`{program} help {words}` says all of each: values, variables, reasons.")


class Group(TyperGroup):
    """A command of commands. `elsewhere` says of names that it does not have where they are."""

    elsewhere: ClassVar[Mapping[str, str]] = {}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            ctx.fail(f"No such command {shown(args[0])}{self.meant(ctx, args[0])}")
        return super().resolve_command(ctx, args)

    def meant(self, ctx: Any, name: str) -> str:
        """Returns what somebody may have meant by a command that there is not."""
        if name in self.elsewhere:
            return f": {self.elsewhere[name]}"
        near = difflib.get_close_matches(name[:MAX_COMPARED], self.list_commands(ctx), n=2)
        if near:
            return f"; did you mean {' or '.join(f'`{one}`' for one in near)}?"
        return f"; `{ctx.command_path} --help` lists all"

    def format_options(self, ctx: Any, formatter: Any) -> None:
        help_page.write_options(self.get_params(ctx), ctx, formatter, is_whole=bool(ctx.meta.get(WHOLE_HELP)))
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                rows.append((name, help_page.brief(help_page.first_paragraph(command.help or ""))))
        help_page.write_groups([("Commands", rows)], formatter)


class Commands(typer.Typer):
    """An application, or a group of one, whose commands are as above."""

    def __init__(self, *, cls: type[TyperGroup] = Group, **options: Any) -> None:
        super().__init__(
            cls=cls,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            context_settings=CONTEXT_SETTINGS,
            **{"add_completion": False, **options},
        )

    def command(self, name: str | None = None, **options: Any) -> Any:  # type: ignore[override]
        return super().command(name, **{"cls": Command, "context_settings": CONTEXT_SETTINGS, **options})


def _config_defaults(parameters: Sequence[Any]) -> dict[str, Any]:
    """Returns what the config file states of a command's everyday options, which are those that
    help shows in a group. Settings are no parameters with a default; `with_settings` takes them.
    """
    from dflash_moe.cli.config_file import read_config_file

    stated = read_config_file().options
    names = [one.name for one in parameters if getattr(one, "rich_help_panel", None)]
    return {name: stated[name].value for name in names if name in stated}


def with_values(arguments: Sequence[str], parameters: Sequence[Any]) -> list[str]:
    """Gives options their values where these are left out. What follows a bare -- is another
    program's.
    """
    valued = {name for parameter in parameters if not getattr(parameter, "is_flag", True) for name in parameter.opts}
    given: list[str] = []
    is_value = False
    for at, argument in enumerate(arguments):
        if is_value:
            given.append(argument)
            is_value = False
        elif argument == "--":
            return [*given, *arguments[at:]]
        elif argument not in valued:
            given.append(argument)
        elif argument in VALUES_LEFT_OUT and not _has_value(argument, arguments[at + 1 : at + 2]):
            given.append(f"{argument}={VALUES_LEFT_OUT[argument]}")
        else:
            given.append(argument)
            is_value = True
    return given


def _has_value(option: str, following: Sequence[str]) -> bool:
    """Says whether the word behind an option is its value. A model is never overwritten with JSON,
    so that a word which names one is none.
    """
    if not following or (following[0].startswith("-") and following[0] != str(STDOUT)):
        return False
    return option != "--json" or not names_model(following[0])
