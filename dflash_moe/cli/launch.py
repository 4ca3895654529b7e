"""`dflash-moe launch ray`: workers that a cluster of Ray's places, starts and starts anew, and that
register at their host.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from dflash_moe.cli import options
from dflash_moe.cli.command_line import Commands
from dflash_moe.errors import ConfigError, printable, shown

# A shell reports this for Ctrl-C; SIGTERM is the same wish here, as for a worker by hand.
EXIT_INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    """Adds `launch ray`."""
    launch = Commands(help="Workers on a cluster that is there.", no_args_is_help=True)
    launch.callback()(_keep_subcommand)
    launch.command(name="ray")(launch_ray)
    app.add_typer(launch, name="launch")


def _keep_subcommand() -> None:
    """Workers on a cluster that is there: `ray`. Slurm and Kubernetes need no command of ours."""


def launch_ray(
    topology: Annotated[
        Path,
        typer.Option("--topology", metavar="FILE", help="The host's topology; Ray starts what has `address: registered`."),
    ],
    model: Annotated[
        str, typer.Option("--model", metavar="DIR", help="Absolute path of the checkpoint on each node, or `demo`.")
    ],
    key_file: Annotated[
        str,
        typer.Option(
            "--key-file",
            metavar="FILE",
            help="Absolute path of the key on each node, mode 0600; with --share-key of the group's here.",
        ),
    ],
    address: Annotated[
        str,
        typer.Option("--address", metavar="ADDR", help="The cluster of Ray's, as `ray.init` takes it."),
    ] = "auto",
    head: Annotated[
        str | None,
        typer.Option(
            "--register", metavar="ADDR", help="Where the nodes dial the host, tcp://HOST:PORT [default: registration.listen]."
        ),
    ] = None,
    resource: Annotated[
        list[str] | None,
        typer.Option(
            "--resource",
            metavar="WORKER=NAME",
            help="Start a worker on a node with this named resource; may be repeated [default: any node].",
        ),
    ] = None,
    share_key: Annotated[
        bool,
        typer.Option(
            "--share-key", help="Hand each worker its own key through Ray, where everyone in the cluster can read it."
        ),
    ] = False,
) -> None:
    """Have Ray start the registered workers of a topology, spread over its nodes, and start them
    anew when they end; Ctrl-C ends them. They need dflash-moe, the checkpoint and the key there.
    """
    from dflash_moe.integrations.ray.orders import head_of, worker_orders
    from dflash_moe.integrations.ray.placed_workers import placed_workers
    from dflash_moe.protocol.keys import read_key_file
    from dflash_moe.telemetry.stop_signals import told_by_signals
    from dflash_moe.topology import Topology
    from dflash_moe.topology.addresses import parse_dialled

    plan = Topology.load(topology)
    to = head_of(plan) if head is None else parse_dialled(head, what="--register")
    if model != "demo":
        _refuse_relative("--model", model)
    if not share_key:
        _refuse_relative("--key-file", key_file)
    orders = worker_orders(
        plan, model=model, head=to, key_file=key_file, group_key=read_key_file(Path(key_file)) if share_key else None,
        named=_named(resource or []),
    )  # fmt: skip
    if share_key:
        options.say(
            "--share-key: the keys of the workers are arguments of Ray's actors: everyone in that cluster can read them"
        )
    with placed_workers(orders, address=address) as placed, told_by_signals(lambda: None) as stopped:
        for one in placed:
            typer.echo(printable(f"worker {one.name} runs on node {one.node_address} ({one.node_id}), process {one.pid}"))
        typer.echo(f"{len(placed)} workers register at {to}; Ctrl-C ends them")
        stopped.wait()
    raise typer.Exit(EXIT_INTERRUPTED)


def _refuse_relative(flag: str, path: str) -> None:
    if not PurePosixPath(path).is_absolute():
        raise ConfigError(f"{flag} {shown(path)} is relative, and Ray's nodes have folders of their own; give an absolute path")


def _named(given: list[str]) -> dict[str, str]:
    named = {}
    for one in given:
        worker, equals, resource = one.partition("=")
        if not worker or not equals or not resource or worker in named:
            raise ConfigError(f"--resource {shown(one)}: give WORKER=NAME, and each worker once")
        named[worker] = resource
    return named
