"""`dflash-moe workers`: who the workers of a running host are, and changes of them while it runs.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_moe.cli import options
from dflash_moe.cli.command_line import Commands
from dflash_moe.config import format_bytes
from dflash_moe.errors import printable
from dflash_moe.protocol import control

# The host bounds each order; these are for a host that stands still. Adding loads weights.
LIST_S = 30.0
LONGEST_S = 86_400.0

PidOption = Annotated[
    int | None,
    typer.Option(
        "--pid",
        min=1,
        metavar="PID",
        help="The number of the host's process [default: the only host that runs].",
        show_default=False,
    ),
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The worker's name.", show_default=False)]
DrainOption = Annotated[
    float, typer.Option("--drain-s", min=0.0, max=86_400.0, help="Seconds in which it may finish what it has.")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Also where it is the last ready holder of a shard: calls may then fail.")
]


def register(app: typer.Typer) -> None:
    """Adds `workers` with its orders."""
    workers = Commands(invoke_without_command=True)
    workers.callback()(_of_host)
    for order in (list_workers, drain, add, restart, release):
        workers.command(name=order.__name__.partition("_")[0])(order)
    app.add_typer(workers, name="workers")


def _of_host(context: typer.Context, pid: PidOption = None) -> None:
    """The workers of a running host: `list` them, which is also done without an order, or `drain`,
    `add`, `restart` or `release` one while calls go on.

    A host is a process of this user with an ExpertRuntime: generate, chat, a bench, or a program in
    Python. Programs that `dflash-moe llama` runs have another supervisor, and take no orders.
    """
    context.obj = pid
    if context.invoked_subcommand is None:
        list_workers(context)


def list_workers(context: typer.Context, json_out: Annotated[Path | None, options.json_option("The answer")] = None) -> None:
    """Show how each worker stands: its state and why, deaths, shards, weights in memory, and where
    it is.
    """
    found = control.ask(context.obj, {"order": "list"}, timeout_s=LIST_S)
    options.write_json(json_out, found)
    if json_out == options.STDOUT:
        return
    typer.echo(printable(f"host {found['pid']}: {found['model']}"))
    options.show_rows(
        found["workers"],
        ("worker", "{name}"),
        ("state", "{state}"),
        ("since", "{since_s:.0f} s"),
        ("deaths", "{deaths}"),
        ("shards", "{shards}"),
        ("weights", lambda row: format_bytes(row["weight_bytes"])),
        ("numerics", "{numerics}"),
        ("reached over", "{way}"),
        ("pid", "{pid}"),
    )
    for row in found["workers"]:
        if row["reason"]:
            typer.echo(printable(f"{row['name']}: {row['reason']}"))


def drain(context: typer.Context, name: NameArgument, drain_s: DrainOption = 30.0, force: ForceOption = False) -> None:
    """Remove a worker: it gets no new rows that another holder can have, finishes what it has, and
    leaves. The last ready holder of a shard is removed only with --force.
    """
    _order(context, {"order": "drain", "name": name, "drain_s": drain_s, "force": force})
    typer.echo(printable(f"worker {name} is removed"))


def add(
    context: typer.Context,
    spec: Annotated[
        str,
        typer.Argument(
            metavar="SPEC",
            help="As in the list `workers` of a topology, for example '{name: w2, threads: 2, memory: 8GiB}'.",
            show_default=False,
        ),
    ],
) -> None:
    """Add a worker, which the host starts, or dials at its `address`. It becomes a further holder
    of as many shards as fit, the most loaded first, or of those whose `experts` it lists.
    """
    _order(context, {"order": "add", "spec": spec})
    typer.echo("the worker is added")


def restart(context: typer.Context, name: NameArgument, drain_s: DrainOption = 30.0, force: ForceOption = False) -> None:
    """End a worker that the host started as `drain` does, and start it anew with what is installed
    now. One worker after the other, that upgrades all of them.
    """
    _order(context, {"order": "restart", "name": name, "drain_s": drain_s, "force": force})
    typer.echo(printable(f"worker {name} is started anew"))


def release(context: typer.Context, name: NameArgument) -> None:
    """Start or dial a worker again that was left alone because it died too often or would not
    do.
    """
    _order(context, {"order": "release", "name": name})
    typer.echo(printable(f"worker {name} is started again"))


def _order(context: typer.Context, request: dict[str, Any]) -> None:
    control.ask(context.obj, request, timeout_s=LONGEST_S)
