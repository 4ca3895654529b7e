"""Where a command's JSON goes: into a file, or to stdout, which then has nothing else.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

import typer

from dflash_moe.cli.help_page import MORE
from dflash_moe.errors import ConfigError, DflashError

# What stands for stdout in the place of a file.
STDOUT = Path("-")
_stdout: ContextVar[TextIO | None] = ContextVar("stdout of JSON")


def json_option(what: str) -> Any:
    """Returns the option of a command's parameter `json_out`. `what` is a clause that says what is
    written.
    """
    text = f"{what} as JSON: into FILE; without one, or with -, on stdout, and all else on stderr [default: nowhere]."
    return typer.Option("--json", metavar="[FILE]", help=text, show_default=False, rich_help_panel=MORE)


@contextlib.contextmanager
def json_on_stdout() -> Iterator[None]:
    """Keeps stdout for `write_json`: what the block prints goes to stderr."""
    token = _stdout.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _stdout.reset(token)


def prepare_outputs(*paths: Path | None) -> None:
    """Makes the folders of output files and checks that the files can be written, before the work
    is done. Raises ConfigError that names the path.
    """
    for path in paths:
        if path is None or path == STDOUT:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{path}: its folder cannot be made ({error.strerror}); choose another place") from None
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{path}: cannot be written; choose the path of a file in a folder of yours")


def write_json(path: Path | None, value: Any) -> None:
    """Writes an output file, or `value` on stdout, where somebody asked for it. Raises DflashError
    that names the path where that fails after the work, because the disk is full or the folder
    went away.
    """
    if path is None:
        return
    text = json.dumps(value, indent=1) + "\n"
    if path == STDOUT:
        stream = _stdout.get(None) or sys.stdout
        stream.write(text)
        stream.flush()
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DflashError(f"{path}: cannot be written ({error.strerror}); the work is done, its result is lost") from None
