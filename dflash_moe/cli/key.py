"""`dflash-moe key make FILE`: a new shared key for workers that are already running somewhere, or
the key of one worker of such a group.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dflash_moe.cli.command_line import Commands
from dflash_moe.errors import ConfigError, printable
from dflash_moe.protocol.keys import write_key_file, write_worker_key_file


def register(app: typer.Typer) -> None:
    """Adds `key make`."""
    key = Commands(help="Keys that host and workers share.", no_args_is_help=True)
    key.callback()(_keep_subcommand)
    key.command(name="make")(make)
    app.add_typer(key, name="key")


FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Where to write; must not exist yet.", show_default=False)]


WorkerOption = Annotated[
    str | None,
    typer.Option("--worker", metavar="NAME", help="Make the key of this worker alone, to register with [default: none]."),
]
FromOption = Annotated[
    Path | None,
    typer.Option("--from", metavar="FILE", help="The group's key file, from which a worker's comes [default: none]."),
]


def make(file: FileArgument, worker: WorkerOption = None, group: FromOption = None) -> None:
    """Write a new random key (32 bytes in hexadecimal, mode 0600), or with --worker the key of one
    worker of a group; copy it to the other machine over a channel you trust.
    """
    if (worker is None) != (group is None):
        given, missing = ("--worker", "--from GROUP") if group is None else ("--from", "--worker NAME")
        raise ConfigError(f"{given} needs {missing}: a worker's own key comes from its name and the group's key file")
    if worker is None or group is None:
        write_key_file(file)
        typer.echo(printable(f"wrote a new key to {file} (mode 0600)"))
        return
    write_worker_key_file(file, worker=worker, group=group)
    typer.echo(printable(f"wrote the key of worker {worker} to {file} (mode 0600)"))


def _keep_subcommand() -> None:
    """Keys that host and workers share."""
