"""`dflash-moe`: this runs a command line, and turns errors into one sentence and an exit code.

Exit codes: 0, 2 for bad input or configuration, 1 for a failed check, 3 for a lost worker, 130 on
Ctrl-C. The last stderr line of a failure is one sentence; what an error quotes (a worker's log)
comes before it. A traceback appears only with --debug.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import difflib
import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import typer

from dflash_moe.cli.command_line import MAX_COMPARED
from dflash_moe.cli.help_page import FORMER_NAMES
from dflash_moe.cli.model_path import DEMO
from dflash_moe.cli.root import DEBUG, PROGRAM, build_app
from dflash_moe.errors import DflashError, printable, shown

# The command whose users write flags of another program.
RUNS_PROGRAMS = "llama"
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
MODEL_PARAMETER = "model"
# These packages are absent where only workers run.
HOST_PACKAGES = {"torch", "transformers", "prompt_toolkit"}
HOST_EXTRA = "dflash-moe[host]"
# So many new objects, collections of the young and of the middle generation lead to a collection of
# the next older one (gc.set_threshold). The imports of torch and transformers leave 400,000 objects
# that live for ever, and by the defaults the collector walks them all six times, which is a sixth
# of the time of the imports. By these values it walks the new ones fourteen times and never all,
# while an engine that runs for days still collects what it leaves in cycles.
GC_THRESHOLDS = (100_000, 50, 50)


def main() -> int:
    """Runs a whole process: its command line, and its end without a last walk through all objects,
    which takes most of a second once torch was imported. The system frees them.
    """
    gc.set_threshold(*GC_THRESHOLDS)
    code = run()
    gc.freeze()
    return code


def run(
    arguments: Sequence[str] | None = None, *, build: Callable[[], typer.Typer] | None = None, program: str = PROGRAM
) -> int:
    """Runs the command line and returns the exit code. `arguments` are without the name of the
    program; None takes those of sys.argv. `build` makes another application than that of all
    commands, which is called `program`.
    """
    given, is_debug = _normalised(sys.argv[1:] if arguments is None else arguments)
    try:
        code = (build or build_app)()(given, prog_name=program, standalone_mode=False)
        sys.stdout.flush()
        if code == EXIT_INTERRUPTED:
            # Some versions of the parser hand over a Ctrl-C in this way.
            _say_interrupted()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        _say_interrupted()
        return EXIT_INTERRUPTED
    except typer.Exit as stop:
        return int(stop.exit_code)
    except BrokenPipeError:
        # The reader of stdout left. The flush at exit must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as error:  # noqa: BLE001 - the one place where errors become text
        return report(error, is_debug=is_debug)


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
    if hasattr(error, "possibilities"):
        message = _no_such_option(error.option_name, error.possibilities or (), context)
    elif getattr(getattr(error, "param", None), "name", "") == MODEL_PARAMETER and message.startswith("Missing"):
        message = f"{message.rstrip('.')}: a GGUF file, a folder of safetensors, or `{DEMO}` for the shipped model"
    elif message.startswith("Got unexpected extra argument"):
        message = _not_expected(message.rpartition(" (")[2].removesuffix(")"), context)
    _say_last(message)
    return EXIT_USAGE


def _not_expected(words: str, context: Any) -> str:
    """Says that words stand where none are expected, and how a model is given where one is."""
    hint = f"`{context.command_path} --help` says what it takes"
    if any(parameter.name == MODEL_PARAMETER for parameter in context.command.params):
        hint = f"a model is given with -m, as in `-m {DEMO}`"
    return f"{shown(words)}: not expected here; {hint}"


def _no_such_option(name: str, known: Sequence[str], context: Any) -> str:
    """Says what may have been meant by an option that there is not."""
    near = difflib.get_close_matches(name[:MAX_COMPARED], [one for one in known if one not in FORMER_NAMES], n=1)
    if near:
        return f"No such option {shown(name)}; did you mean `{near[0]}`?"
    if getattr(context, "info_name", "") == RUNS_PROGRAMS:
        return f"No such option {shown(name)}; the program and its own flags follow behind `--`"
    return f"No such option {shown(name)}; `{context.command_path} --help` lists all"


def _normalised(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Takes --debug from wherever it stands. What follows a bare -- is another program's."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given = [argument for argument in arguments[:end] if argument != DEBUG]
    return [*given, *arguments[end:]], len(given) < end


def _say_interrupted() -> None:
    """Says that somebody ended the program, which is no error."""
    sys.stdout.flush()
    print("interrupted", file=sys.stderr, flush=True)  # noqa: T201 - this is the command line


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
