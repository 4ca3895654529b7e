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
    from collections.abc import Callable

    from dflash_moe.protocol.keys import FileKey
    from dflash_moe.topology import Address, Topology, WorkerSpec


def worker(
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The worker's name in the topology.")],
    model: Annotated[
        Path, typer.Option("--model", metavar="DIR", help="Checkpoint on this machine, or `demo`; the host never sends paths.")
    ],
    topology: Annotated[
        Path | None,
        typer.Option(
            "--topology",
            metavar="FILE",
            help="Topology file that lists the worker; must be given without --register [default: none].",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen", metavar="ADDR", help="tcp://HOST:PORT (0: any free port) or unix:///PATH [default: the topology's]."
        ),
    ] = None,
    key_file: Annotated[
        list[Path] | None,
        typer.Option(
            "--key-file",
            metavar="FILE",
            help="Key shared with the host, mode 0600; needed for TCP. With several --register, one for all or one for "
            "each, in their order [default: none].",
        ),
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
    max_sessions: Annotated[
        int | None,
        typer.Option(
            "--max-sessions",
            metavar="N",
            help="Number of hosts at once, up to 64 [default: the topology's; 8 with --register, 1 with --once].",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Serve one host, and leave when it is done.")] = False,
    register: Annotated[
        list[str] | None,
        typer.Option(
            "--register",
            metavar="ADDR",
            help="Dial the host at tcp://HOST:PORT and do not listen; once for each host [default: none].",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="BYTES", help="Bound of the weights, such as 8GiB; with --register [default: none]."),
    ] = None,
) -> None:
    """Run one worker by hand. It listens and serves several hosts at once, or dials its hosts with
    --register; Ctrl-C ends it.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in workers/start.py, for the same reason
    from dflash_moe.cli.model_path import DEMO, demo_model
    from dflash_moe.topology.spec import DEFAULT_SESSIONS, MAX_SESSIONS
    from dflash_moe.workers.process import run_hand_started_worker
    from dflash_moe.workers.resident import KEEP_S

    if str(model) == DEMO:
        model = demo_model()
    if max_sessions is not None and not 1 <= max_sessions <= MAX_SESSIONS:
        raise ConfigError(f"--max-sessions {max_sessions}: allowed are 1..{MAX_SESSIONS}")
    if register:
        if topology is not None or listen is not None:
            raise ConfigError(
                "--register stands without --topology and --listen: the hosts' topologies say what the worker holds"
            )
        most = max_sessions or DEFAULT_SESSIONS
        if len(register) > most:
            raise ConfigError(
                f"--register is there {len(register)} times, and --max-sessions is {most}: each host is a session"
            )
        code = _register(name, model, register, memory, key_file or [], threads, encryption, keep_s, is_once=once)
        raise typer.Exit(code)
    if key_file and len(key_file) > 1:
        raise ConfigError("--key-file is there several times: a worker that listens has one key for all its hosts")
    if memory is not None:
        raise ConfigError("--memory belongs to --register; write `memory` into the topology")
    if topology is None:
        raise ConfigError("--topology is missing: it says how the worker is reached and what it may use")
    from dflash_moe.config import resolve_settings
    from dflash_moe.protocol.keys import read_key_file
    from dflash_moe.topology import Topology

    plan = Topology.load(topology)
    settings = resolve_settings(
        plan.stated_settings, threads=threads, key_file=key_file[0] if key_file else None, encryption=encryption
    )
    spec = plan.worker(name)
    code = run_hand_started_worker(
        name=name,
        model=model,
        address=_listen_address(plan, spec, listen),
        key=read_key_file(settings.key_file) if settings.key_file else None,
        threads=settings.threads or spec.threads,
        memory_limit=spec.memory or 0,
        max_sessions=max_sessions or spec.max_sessions,
        isa=settings.cpu_isa or "",
        is_once=once,
        buffer_bytes=settings.socket_buffer_bytes or 0,
        encryption=settings.encryption,
        keep_s=KEEP_S if keep_s is None else keep_s,
        cache=settings.cache,
        on_ready=lambda address: _announce(name, address),
    )
    raise typer.Exit(code)


def _register(
    name: str, model: Path, heads: list[str], memory: str | None, key_files: list[Path], threads: int | None,
    encryption: str | None, keep_s: float | None, *, is_once: bool,
) -> int:  # fmt: skip
    """Runs a worker that dials its hosts, and returns the exit code."""
    from dflash_moe.config import resolve_settings
    from dflash_moe.config.values import parse_bytes
    from dflash_moe.topology.addresses import parse_dialled
    from dflash_moe.topology.spec import NAME_FORM, is_worker_name
    from dflash_moe.workers.process import run_registered_worker
    from dflash_moe.workers.resident import KEEP_S

    if not is_worker_name(name):
        raise ConfigError(f"--name {name!r} is no name of a worker; allowed: {NAME_FORM}")
    addresses = [parse_dialled(head, what="--register") for head in heads]
    twice = next((one for one in addresses if addresses.count(one) > 1), None)
    if twice is not None:
        raise ConfigError(f"--register {twice} is there twice: a host takes a name once")
    key_file = key_files[0] if key_files else None
    settings = resolve_settings({}, threads=threads, key_file=key_file, encryption=encryption)
    if settings.encryption == "off":
        raise ConfigError("ipc.encryption is off, and connections of a worker that registers are always encrypted")
    if not settings.key_file:
        raise ConfigError(
            f"--register {heads[0]}: the host wants a key; give --key-file FILE with the group's, or this worker's own"
        )
    files = key_files or [settings.key_file]
    if len(files) not in (1, len(heads)):
        raise ConfigError(
            f"--key-file is there {len(files)} times and --register {len(heads)} times: give one, or one for each"
        )
    keys = [_read_key_of(name, file) for file in files] * (len(heads) // len(files))
    try:
        limit = parse_bytes(memory) if memory is not None else 0
    except ValueError:
        raise ConfigError(f"--memory {memory} is no amount of memory; write for example 8GiB") from None
    return run_registered_worker(
        name=name, model=model, heads=list(zip(addresses, keys, strict=True)), threads=settings.threads,
        memory_limit=limit, isa=settings.cpu_isa or "", is_once=is_once, keep_s=KEEP_S if keep_s is None else keep_s,
        cache=settings.cache, encryption=settings.encryption, on_ready=_announce_registering(name),
    )  # fmt: skip


def _read_key_of(name: str, file: Path) -> FileKey:
    from dflash_moe.protocol.keys import read_any_key_file

    key = read_any_key_file(file)
    if key.worker not in ("", name):
        raise ConfigError(
            f"key file {file} is worker {key.worker}'s own, and this is worker {name}; make its key with "
            f"`dflash-moe key make FILE --worker {name} --from GROUP`"
        )
    return key


def _announce_registering(name: str) -> Callable[[Address], None]:
    def announce(address: Address) -> None:
        sys.stdout.write(f"worker {name} registers at {address}\n")
        sys.stdout.flush()

    return announce


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
