"""`dflash-moe key make FILE`: a new shared key for workers that are already running somewhere.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dflash_moe.cli.command_line import Commands
from dflash_moe.errors import printable
from dflash_moe.protocol.keys import write_key_file


def register(app: typer.Typer) -> None:
    """Adds `key make`."""
    key = Commands(help="Keys that host and workers share.", no_args_is_help=True)
    key.callback()(_keep_subcommand)
    key.command(name="make")(make)
    app.add_typer(key, name="key")


FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Where to write; must not exist yet.", show_default=False)]


def make(file: FileArgument) -> None:
    """Write a new random key (32 bytes in hexadecimal, mode 0600); copy it to the other machine
    over a channel you trust.
    """
    write_key_file(file)
    typer.echo(printable(f"wrote a new key to {file} (mode 0600)"))


def _keep_subcommand() -> None:
    """Keys that host and workers share."""
