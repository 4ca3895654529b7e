"""`dflash-moe store`: what is kept on disk so that models start without packing.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli import options
from dflash_moe.cli.command_line import Commands
from dflash_moe.cli.loading import doing_shown, packing_shown
from dflash_moe.config import resolve_settings
from dflash_moe.config.values import format_bytes, parse_bytes
from dflash_moe.errors import ConfigError, DflashError, printable

if TYPE_CHECKING:
    from dflash_moe.config import Settings
    from dflash_moe.model.checkpoint import Checkpoint
    from dflash_moe.placement.held_shards import HeldShard
    from dflash_moe.store.panel_store import PanelStore
    from dflash_moe.store.upkeep import Removed, StoreEntry
    from dflash_moe.store.warming import Warming

# Another process holds the lock while it writes one file, which takes seconds on a slow disk.
LOCK_S = 60.0
# So many digits of a fingerprint are shown, and so many at least name a model.
SHOWN_DIGITS = 12

PathOption = Annotated[
    Path | None,
    typer.Option(
        "--path",
        metavar="DIR",
        help="The folder [default: that of DFLASH_MOE_CACHE_PATH, else dflash-moe in $XDG_CACHE_HOME, which is ~/.cache].",
        show_default=False,
    ),
]
MaxBytesOption = Annotated[
    str | None,
    typer.Option(
        "--max-bytes",
        metavar="SIZE",
        help="Remove what was used least recently until so many bytes are left, such as 20GiB [default: what "
        "DFLASH_MOE_CACHE_MAX_BYTES says, else half of what is kept and what is free].",
        show_default=False,
    ),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="The model's path, or its fingerprint as `ls` shows it.", show_default=False),
]
AllOption = Annotated[bool, typer.Option("--all", help="Of all models.")]
YesOption = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")]


def register(app: typer.Typer) -> None:
    """Adds `store` with its commands."""
    store = Commands(no_args_is_help=True)
    store.callback()(_in_folder)
    store.command(name="warm")(warm)
    store.command(name="ls")(list_models)
    store.command(name="verify")(verify)
    store.command(name="gc")(collect)
    store.command(name="rm")(remove)
    app.add_typer(store, name="store")


def _in_folder(context: typer.Context, path: PathOption = None) -> None:
    """What is kept on disk so that models start without packing: `warm` writes it before a start,
    `ls` lists it, `verify` reads all of it, `gc` and `rm` make room.

    A file that a running worker uses is never removed.
    """
    context.obj = path


@options.with_settings(has_letters=False, reads_config=True)
def warm(context: typer.Context, model: options.ModelOption, topology: options.TopologyOption = None, **overrides: Any) -> None:
    """Write all packed experts of a model before its first start, as this machine's workers would
    use them: those of the topology, or else those that `plan` shows. `--threads` says how many
    experts are packed at a time.

    It needs memory for one file of 64 MiB, not for the model. What is there stays.
    """
    directory = options.model_directory(model)
    path: Path | None = context.obj
    settings = _settings_of(topology, path, overrides)
    with doing_shown(f"reading {directory.name}"):
        from dflash_moe.model.checkpoint import Checkpoint

        checkpoint = Checkpoint.open(directory)
        shards = _wanted_shards(checkpoint, topology, settings, overrides)
    with _opened_for(settings, has_stored=_asks_for_stored(topology)) as store:
        with doing_shown(f"looking into {store.folder.path}"):
            warming = _warming(store, checkpoint, shards, settings)
        if not warming.num_left:
            typer.echo(f"{store.folder.path}: all {warming.num_files} files are there, {format_bytes(warming.num_bytes)}")
            return
        warming.require_room()
        _write(store, warming, settings)


def _write(store: PanelStore, warming: Warming, settings: Settings) -> None:
    from dflash_moe.telemetry.machine import usable_cores

    num_files, num_bytes, begun = warming.num_left, warming.left_bytes, time.monotonic()
    with packing_shown() as report:
        warming.write(threads=settings.threads or usable_cores(), report=report)
    seconds = time.monotonic() - begun
    typer.echo(
        f"{store.folder.path}: wrote {num_files} files, {format_bytes(num_bytes)} in {seconds:.1f} s "
        f"({num_bytes / seconds / 1e9:.2f} GB/s)"
    )


def _settings_of(topology: Path | None, path: Path | None, overrides: dict[str, Any]) -> Settings:
    """Returns the settings of a start, with the folder that the command line names. Raises
    ConfigError where no start would use what is written.
    """
    stated = options.load_topology(topology).stated_settings if topology is not None else None
    if path is not None:
        overrides["cache_path"] = path.absolute()
    settings = resolve_settings(stated, **overrides)
    if not settings.cache.has_panels:
        key = "cache.path is none" if settings.cache.is_off else "cache.panels is off"
        raise ConfigError(f"{key}, so that no start would use what is written: set it otherwise, or leave it out")
    return settings


def _asks_for_stored(topology: Path | None) -> bool:
    return topology is not None and any(worker.weights_layout == "stored" for worker in options.load_topology(topology).workers)


def _wanted_shards(
    checkpoint: Checkpoint, topology: Path | None, settings: Settings, overrides: dict[str, Any]
) -> list[HeldShard]:
    """Returns the shards that this machine would map. Raises ConfigError where there are none."""
    from dflash_moe.forward.fitted import fit_checkpoint
    from dflash_moe.holders.panel_shards import panel_shards
    from dflash_moe.store.kept_spec import kept_model_spec
    from dflash_moe.topology import Topology

    if topology is not None:
        placed = Topology.load(topology)
    else:
        placed = fit_checkpoint(checkpoint, checkpoint.path, overrides).found.topology
    shards = panel_shards(kept_model_spec(checkpoint.path, cache=settings.cache), placed, settings)
    if not shards:
        raise ConfigError(
            "no worker on this machine would map packed experts of this model: all of them are on cards, elsewhere, computed "
            "from the mapped file, or packed by each worker for itself (`weights_layout: stored` asks for files)"
        )
    return shards


def _warming(store: PanelStore, checkpoint: Checkpoint, shards: list[HeldShard], settings: Settings) -> Warming:
    from dflash_moe import _core
    from dflash_moe.holders.panel_shards import by_layer
    from dflash_moe.store.warming import WantedExperts, Warming

    wanted = [WantedExperts(one.layer.ffn, experts, one.weight_dtype, one.numerics) for one, experts in by_layer(shards)]
    return Warming(store, checkpoint, wanted, isa=_core.parse_isa(settings.cpu_isa or _core.best_isa()))


def list_models(context: typer.Context, json_out: Annotated[Path | None, options.json_option("The list")] = None) -> None:
    """Show what is kept of each model: files, bytes, layouts, when it was used last, and whether
    the model is still as it was.
    """
    with _opened(context) as store:
        found, folder = store.entries(), store.folder
        total, budget, free = store.num_bytes(), store.budget(), folder.free_bytes()
    rows = [asdict(entry) for entry in found]
    written = {"path": str(folder.path), "num_bytes": total, "max_bytes": budget, "free_bytes": free, "models": rows}
    options.write_json(json_out, written)
    if json_out == options.STDOUT:
        return
    typer.echo(printable(f"{folder.path}: {format_bytes(total)} of {format_bytes(budget)}, {format_bytes(free)} are free"))
    if found:
        options.show_rows(
            found,
            ("model", lambda entry: entry.model[:SHOWN_DIGITS]),
            ("files", lambda entry: str(entry.num_files)),
            ("size", lambda entry: format_bytes(entry.num_bytes)),
            ("layouts", lambda entry: str(len(entry.layouts))),
            ("last used", lambda entry: time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_at))),
            ("state", _state),
            ("path", lambda entry: printable(entry.path)),
        )


def verify(context: typer.Context, json_out: Annotated[Path | None, options.json_option("What was found")] = None) -> None:
    """Read all that is kept and sum it up. What is damaged is set aside, and the next start writes
    it anew; exit status 1 says that there was some.
    """
    from dflash_moe import _core

    faults, num_files, num_bytes = [], 0, 0
    with _opened(context) as store, doing_shown(f"reading {store.folder.path}"):
        outcome = "damaged and set aside" if store.folder.is_writable else "damaged"
        for one in store.verify(_core.checksum):
            num_files += 1
            num_bytes += one.num_bytes
            if one.fault:
                faults.append(one.fault)
    options.write_json(json_out, {"num_files": num_files, "num_bytes": num_bytes, "faults": faults})
    options.refuse_faults(f"{outcome}: ", faults)
    options.say(f"{num_files} files, {format_bytes(num_bytes)}: all as they were written")


def collect(context: typer.Context, max_bytes: MaxBytesOption = None) -> None:
    """Remove what is damaged, what no model uses any more or no kernel here reads, and what was
    used least recently.
    """
    from dflash_moe.store.machine_panels import known_layouts

    try:
        limit = None if max_bytes is None else parse_bytes(max_bytes)
    except ValueError as error:
        raise ConfigError(f"--max-bytes {max_bytes!r}: {error}") from None
    with _opened(context) as store:
        _say_removed(store, store.collect(limit, known=known_layouts(), is_over=_deadline()))


def remove(context: typer.Context, model: ModelArgument = None, is_all: AllOption = False, yes: YesOption = False) -> None:
    """Remove what is kept of a model, or of all."""
    if (model is None) != is_all:
        raise ConfigError("name one model by its path or fingerprint, or pass --all")
    with _opened(context) as store:
        which, found = (None, store.entries()) if model is None else _named(store, model)
        size = format_bytes(store.num_bytes() if which is None else sum(one.num_bytes for one in found))
        if not yes:
            if not sys.stdin.isatty():
                raise ConfigError(f"{size} would be removed from {store.folder.path}: pass --yes where nobody can be asked")
            typer.confirm(f"remove {size} from {store.folder.path}?", abort=True)
        _say_removed(store, store.remove(which, is_over=_deadline()))


def _named(store: PanelStore, model: str) -> tuple[str, list[StoreEntry]]:
    """Returns what names a model in the store, and its entries."""
    found = store.entries()
    path = os.path.abspath(os.path.expanduser(model))
    if of_path := [one for one in found if one.path == path]:
        return path, of_path
    names = {one.model for one in found if one.model == model or (len(model) >= SHOWN_DIGITS and one.model.startswith(model))}
    if len(names) != 1:
        raise ConfigError(
            f"{store.folder.path} keeps {len(names)} models by the name {model!r}; `dflash-moe store ls` lists all"
        )
    name = names.pop()
    return name, [one for one in found if one.model == name]


def _state(entry: StoreEntry) -> str:
    if not entry.path:
        return "no model"
    return "as it was" if entry.is_current else "changed or gone"


def _say_removed(store: PanelStore, removed: Removed) -> None:
    used = f"; {removed.num_in_use} more are in use and stay" if removed.num_in_use else ""
    left = format_bytes(store.num_bytes())
    typer.echo(f"removed {removed.num_files} files, {format_bytes(removed.num_bytes)}; {left} are left{used}")


def _deadline() -> Callable[[], bool]:
    until = time.monotonic() + LOCK_S
    return lambda: time.monotonic() > until


@contextlib.contextmanager
def _opened(context: typer.Context) -> Iterator[PanelStore]:
    """Opens the store of the command: the folder of --path, else that of the environment. A file
    system of another machine is let pass: who names a folder here only looks after it.
    """
    from dflash_moe.config import resolve_settings
    from dflash_moe.store.folder import default_path
    from dflash_moe.store.panel_store import PanelStore

    cache = resolve_settings(None).cache
    if context.obj is None and cache.is_off:
        raise ConfigError("nothing is kept on this machine: DFLASH_MOE_CACHE_PATH is none; --path names a folder")
    path = context.obj or cache.path or default_path()
    if not os.path.isdir(path):
        raise ConfigError(f"{path}: nothing is kept there; --path names another folder")
    store = PanelStore.open(path, max_bytes=cache.max_bytes, allow_network=True)
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def _opened_for(settings: Settings, *, has_stored: bool) -> Iterator[PanelStore]:
    """Opens the store as workers would, and makes its folder. Raises ConfigError where they would
    not use it, and DflashError where this user may only read it.
    """
    from dflash_moe.store.folder import default_path
    from dflash_moe.store.panel_store import PanelStore

    cache = settings.cache
    allow_network = has_stored or cache.panels == "on"
    store = PanelStore.open(cache.path or default_path(), max_bytes=cache.max_bytes, allow_network=allow_network)
    try:
        if not store.folder.is_writable:
            raise DflashError(f"cache folder {store.folder.path} belongs to root, who alone may change it: run this with sudo")
        yield store
    finally:
        store.close()
