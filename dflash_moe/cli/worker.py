"""`dflash-moe worker`: one worker by hand, on this or another machine. Hosts start their own
workers in another way (workers/start.py).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_moe.errors import ConfigError

if TYPE_CHECKING:
    from dflash_moe.topology import Address, Topology, WorkerSpec


def worker(
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The worker's name in the topology.")],
    model: Annotated[
        Path, typer.Option("--model", metavar="DIR", help="Checkpoint on this machine, or `demo`; the host never sends paths.")
    ],
    topology: Annotated[
        Path | None,
        typer.Option("--topology", metavar="FILE", help="Topology file that lists the worker; must be given [default: none]."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen", metavar="ADDR", help="tcp://HOST:PORT (0: any free port) or unix:///PATH [default: the topology's]."
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option("--key-file", metavar="FILE", help="Key shared with the host, mode 0600; needed for TCP [default: none]."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", metavar="N", help="Number of compute threads [default: the topology's, else all cores]."),
    ] = None,
    encryption: Annotated[
        str | None,
        typer.Option(
            "--encryption", metavar="auto|on|off", help="Encrypts TCP, as at the host [default: the topology's, else auto]."
        ),
    ] = None,
    keep_s: Annotated[
        float | None,
        typer.Option(
            "--keep-s",
            metavar="SECONDS",
            help="Keep the weights so many seconds without a host, so that it need not load them again; 0: free them "
            "at once [default: 300; with --once 0].",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Leave when the first host is done.")] = False,
) -> None:
    """Run one worker by hand. It serves one host at a time and waits for the next one; Ctrl-C ends
    it.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in workers/start.py, for the same reason
    from dflash_moe.cli.model_path import DEMO, demo_model
    from dflash_moe.workers.process import run_hand_started_worker
    from dflash_moe.workers.resident import KEEP_S

    if topology is None:
        raise ConfigError("--topology is missing: it says how the worker is reached and what it may use")
    from dflash_moe.config import resolve_settings
    from dflash_moe.protocol.keys import read_key_file
    from dflash_moe.topology import Topology

    if str(model) == DEMO:
        model = demo_model()
    plan = Topology.load(topology)
    settings = resolve_settings(plan.stated_settings, threads=threads, key_file=key_file, encryption=encryption)
    spec = plan.worker(name)
    code = run_hand_started_worker(
        name=name,
        model=model,
        address=_listen_address(plan, spec, listen),
        key=read_key_file(settings.key_file) if settings.key_file else None,
        threads=settings.threads or spec.threads,
        memory_limit=spec.memory or 0,
        isa=settings.cpu_isa or "",
        is_once=once,
        buffer_bytes=settings.socket_buffer_bytes or 0,
        encryption=settings.encryption,
        keep_s=KEEP_S if keep_s is None else keep_s,
        on_ready=lambda address: _announce(name, address),
    )
    raise typer.Exit(code)


def _listen_address(plan: Topology, spec: WorkerSpec, listen: str | None) -> Address:
    from dflash_moe.topology import parse_address

    address = parse_address(listen) if listen is not None else spec.parsed_address
    if address.is_started_by_host:
        asked = f"--listen {listen}" if listen is not None else f"{plan.source}:{spec.line}: worker {spec.name}"
        raise ConfigError(
            f"{asked} is no address to listen on; give --listen or an `address` of the form tcp://HOST:PORT or unix:///PATH"
        )
    return address


def _announce(name: str, address: Address) -> None:
    sys.stdout.write(f"worker {name} listens on {address}\n")
    sys.stdout.flush()
