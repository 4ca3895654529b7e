"""The commands of `dflash-moe`, their help on one screen, and what is said to somebody who asks for
another one.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

from dflash_moe.cli.command_line import CONTEXT_SETTINGS, WHOLE_HELP, Commands, Group
from dflash_moe.version import __version__

PROGRAM = "dflash-moe"
SUMMARY = "Mixture-of-experts models, their experts in other processes."
# These are the commands by group, in the order of --help. Each is in the module of its name, which
# is imported when somebody asks for the command: a function of that name, or what the module
# registers where it has several. Commands that need several files have a folder.
COMMANDS = {
    "Run a model": {
        "demo": "two workers and a small model: a first look, 2 minutes",
        "chat": "talk with a model",
        "generate": "complete a prompt, or a file of prompts",
        "serve": "a model for clients of OpenAI's and Anthropic's APIs",
        "llama": "llama-server and its like, their experts computed here",
    },
    "Models, machines": {
        "plan": "what goes where on this machine, and whether it fits",
        "model": "make a checkpoint, inspect one, write a stub",
        "doctor": "what this machine can do, which settings hold and why",
        "worker": "run one worker by hand, here or on another machine",
        "workers": "list, add, drain, restart workers of a running host",
        "top": "watch the workers of a running host",
        "store": "what is kept on disk so that models start at once",
        "key": "make the key that host and workers share",
    },
    "Prove, measure": {
        "verify": "compare with the model's own code, layer by layer",
        "diff": "where two runs part: layer, token, expert",
        "replay": "prove a receipt of `generate --receipt` again",
        "bench": "measure this machine, compare results, draw them",
        "profile": "a timeline of host, links and workers, for Perfetto",
        "simulate": "failures in virtual time: wrong numbers, hangs",
    },
}
FOLDERS = {"bench", "chat", "doctor", "generate", "llama", "top"}
# These have no line on the screen, whose lines are all taken: its end names them.
UNLISTED = ("launch",)
NAMES = tuple(name for commands in COMMANDS.values() for name in commands)
# What other programs call a command, and what this one says to it.
ELSEWHERE = {
    "run": "`chat` talks with a model, `generate` completes a prompt",
    "complete": "`generate` completes a prompt",
    "server": "it is `serve`; `llama -- llama-server` runs llama.cpp's with our workers",
    "inspect": "it is `model inspect`",
    "show": "it is `model inspect`",
    "info": "it is `doctor` for this machine, and `model inspect` for a model",
    "list": "it is `workers list`",
    "ps": "it is `workers list`",
    "benchmark": "it is `bench`",
    "test": "it is `doctor --selftest` for this machine, and `verify` for a model",
    "completion": "it is the option --install-completion",
}
DEBUG = "--debug"


class Root(Group):
    """All commands. Each is imported when it is asked for."""

    elsewhere = ELSEWHERE

    def list_commands(self, ctx: Any) -> list[str]:
        return [*NAMES, *UNLISTED]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in (*NAMES, *UNLISTED) and cmd_name not in self.commands:
            app = Commands()
            module = f"{cmd_name}.{cmd_name}" if cmd_name in FOLDERS else cmd_name
            found = importlib.import_module(f"dflash_moe.cli.{module}")
            if hasattr(found, "register"):
                found.register(app)
            else:
                app.command(name=cmd_name)(getattr(found, cmd_name))
            self.commands.update(typer.main.get_group(app).commands)
        return self.commands.get(cmd_name)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        # Without empty lines around it and before the end, and with the heading of the first group
        # in its line, all of it fits a screen of 24 lines.
        formatter.write_text(f"{SUMMARY} {next(iter(COMMANDS))}:")

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for number, (group, commands) in enumerate(COMMANDS.items()):
            if number > 0:
                formatter.write_heading(group)
            formatter.indent()
            formatter.write_dl([(name.ljust(max(map(len, NAMES))), text) for name, text in commands.items()])
            formatter.dedent()

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        also = ", ".join((*UNLISTED, "version", "-v", "--install-completion", "--debug"))
        formatter.write_text(f"More: `help COMMAND`. Also: {also}")


def build_app() -> typer.Typer:
    """Builds the application."""
    app = Commands(cls=Root, name=PROGRAM, help=SUMMARY, no_args_is_help=True, add_completion=True)
    app.callback()(_global_options)
    app.command(name="help", hidden=True)(show_help)
    app.command(name="version", hidden=True)(_version)
    return app


def show_help(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="COMMAND", help="The command [default: all].")] = None,
) -> None:
    """Show all there is to say of a command."""
    page: Any = context.find_root()
    page.meta[WHOLE_HELP] = True
    for word in words or ():
        if not isinstance(page.command, Group):
            page.fail(f"`{page.command_path}` has no commands of its own")
        _, command, _ = page.command.resolve_command(page, [word])
        page = type(page)(command, info_name=word, parent=page, **CONTEXT_SETTINGS)
    typer.echo(page.get_help())


def _version() -> None:
    """Print the version."""
    typer.echo(f"{PROGRAM} {__version__}")


def _global_options(
    _debug: Annotated[bool, typer.Option(DEBUG, help="Print a traceback with an error; also accepted at the end.")] = False,
    _asked: Annotated[
        bool,
        typer.Option("-v", "--version", callback=lambda asked: _print_version(asked), is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


def _print_version(is_asked: bool) -> None:
    if is_asked:
        _version()
        raise typer.Exit
