"""`dflash-moe`: this puts the commands together, and turns errors into one sentence and an exit
code.

Exit codes: 0, 2 for bad input or configuration, 1 for a failed check, 3 for a lost worker, 130 on
Ctrl-C. The last stderr line of a failure is one sentence; what an error quotes (a worker's log)
comes before it. A traceback appears only with --debug.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from dflash_moe.errors import DflashError, printable
from dflash_moe.version import __version__

PROGRAM = "dflash-moe"
# These are the commands in the order of --help. One whose module is not there (yet) is left out; a
# module that is there and broken raises.
COMMANDS = (
    "demo", "doctor", "model", "worker", "key", "generate", "chat", "replay", "llama", "verify", "diff", "serve", "plan",
    "workers", "bench", "simulate",
)  # fmt: skip
# The command whose users write flags of another program.
RUNS_PROGRAMS = "llama"
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
DEBUG = "--debug"
# These packages are absent where only workers run.
HOST_PACKAGES = {"torch", "transformers"}
HOST_EXTRA = "dflash-moe[host]"


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code. `arguments` are without the name of the
    program; None takes those of sys.argv.
    """
    given, is_debug = _normalised(sys.argv[1:] if arguments is None else arguments)
    try:
        code = build_app(_asked_for(given))(given, prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
        if code == EXIT_INTERRUPTED:
            # Some versions of the parser hand over a Ctrl-C in this way.
            _say_last("interrupted")
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        _say_last("interrupted")
        return EXIT_INTERRUPTED
    except typer.Exit as stop:
        return int(stop.exit_code)
    except BrokenPipeError:
        # The reader of stdout left. The flush at exit must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as error:  # noqa: BLE001 - the one place where errors become text
        return report(error, is_debug=is_debug)


def build_app(names: Sequence[str] | None = None) -> typer.Typer:
    """Builds the application with these commands, or with all where `names` is None, as far as
    their modules exist.
    """
    app = typer.Typer(
        name=PROGRAM,
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    for name in COMMANDS if names is None else names:
        module_name = f"dflash_moe.cli.{name}"
        if importlib.util.find_spec(module_name) is not None:
            importlib.import_module(module_name).register(app)
    return app


def report(error: Exception, *, is_debug: bool) -> int:
    """Prints an error and returns its exit code."""
    if is_debug:
        traceback.print_exception(error)
    if callable(getattr(error, "format_message", None)):
        return _report_usage(error)
    if isinstance(error, DflashError):
        _say_last(str(error))
        return error.exit_code
    if isinstance(error, OSError) and error.filename is not None:
        _say_last(f"{error.filename}: {error.strerror}")
        return EXIT_USAGE
    if isinstance(error, ModuleNotFoundError) and error.name in HOST_PACKAGES:
        _say_last(f"{error.name} is not installed; this command loads a model and needs it: pip install '{HOST_EXTRA}'")
        return EXIT_USAGE
    hint = "" if is_debug else f"; run it again with {DEBUG} for the traceback"
    _say_last(f"unexpected {type(error).__name__}: {error}{hint}")
    return 1


def _report_usage(error: Any) -> int:
    """Prints a usage error of the parser and returns its exit code. Without any argument the error
    carries the whole help.
    """
    message = str(error.format_message())
    context = getattr(error, "ctx", None)
    if "\n" in message:
        print(message, file=sys.stderr)  # noqa: T201 - this is the command line
        message = "a command is missing; choose one of those above"
    elif context is not None:
        print(context.get_usage(), file=sys.stderr)  # noqa: T201
    is_programs = message.startswith("No such option") and "Did you mean" not in message
    if is_programs and getattr(context, "info_name", "") == RUNS_PROGRAMS:
        message = f"{message.rstrip('.')}; the program and its own flags follow behind `--`"
    _say_last(message)
    return EXIT_USAGE


def _asked_for(arguments: Sequence[str]) -> Sequence[str]:
    """Returns the commands whose modules this command line needs: one where it begins with a
    command, and else all. A worker starts in half the time without those of the host.
    """
    return arguments[:1] if arguments and arguments[0] in COMMANDS else COMMANDS


def _global_options(
    _debug: Annotated[bool, typer.Option(DEBUG, help="Print a traceback with an error; also accepted at the end.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=lambda asked: _print_version(asked), is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Distributed mixture-of-experts offload: attention on the host, routed experts in other
    processes, bit-exact.
    """


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


def _normalised(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Takes --debug from wherever it stands and gives a bare --profile its value 1. What follows a
    bare -- is another program's.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    arguments, others = arguments[:end], arguments[end:]
    given: list[str] = []
    is_debug = False
    for at, argument in enumerate(arguments):
        if argument == DEBUG:
            is_debug = True
        elif argument == "--profile" and (at + 1 == len(arguments) or arguments[at + 1].startswith("-")):
            given.append("--profile=1")
        else:
            given.append(argument)
    return [*given, *others], is_debug


def _say_last(text: str) -> None:
    """Prints details first and the sentence last: the first line of `text` becomes the last line of
    stderr.
    """
    text = printable(text)
    sentence, *details = [line.rstrip() for line in text.splitlines() if line.strip()] or ["failed without a message"]
    # The lines stand above the sentence here.
    sentence = sentence.removesuffix("; last lines of its log:")
    sys.stdout.flush()
    is_terminal = sys.stderr.isatty()
    for line in details:
        print(f"  {line}", file=sys.stderr)  # noqa: T201
    print(f"\033[1;31merror:\033[0m {sentence}" if is_terminal else sentence, file=sys.stderr, flush=True)  # noqa: T201
