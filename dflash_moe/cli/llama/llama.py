"""`dflash-moe llama`: a program that is not ours, llama.cpp's above all, with the routed experts
computed by the topology's workers.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli import options
from dflash_moe.cli.json_output import STDOUT
from dflash_moe.cli.loading import loading_shown
from dflash_moe.config import format_bytes
from dflash_moe.errors import ConfigError

if TYPE_CHECKING:
    from dflash_moe.cli.llama.flags import ProgramFlags
    from dflash_moe.handover.handover_plan import HandoverModel
    from dflash_moe.holders.placed_experts import PlacedExperts
    from dflash_moe.protocol.handover import Counted, PlannedTensor
    from dflash_moe.topology import Topology

PACKAGE = Path(__file__).resolve().parents[2]
PLUGIN = "libggml-dflash-moe.so"
PLUGIN_VARIABLE = "GGML_BACKEND_PATH"
NO_PLUGIN = "none"
# What --explain-auto shows.
log_auto = logging.getLogger("dflash_moe.auto")


@options.with_settings(has_letters=False)
def llama(
    program: Annotated[
        list[str],
        typer.Argument(metavar="-- PROGRAM", help="The program and its own arguments, behind --."),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="FILE",
            help="GGUF file that the workers load [default: the program's -m].",
            show_default=False,
        ),
    ] = None,
    topology: options.TopologyOption = None,
    plugin: Annotated[
        str | None,
        typer.Option(
            "--plugin",
            metavar="FILE|none",
            help="Plug-in for llama.cpp; none for a program that calls the C interface itself "
            "[default: the one that `make ggml` has built].",
            show_default=False,
        ),
    ] = None,
    allow_local: Annotated[
        bool,
        typer.Option(
            "--allow-local",
            help="Let the program compute the layers that workers cannot stand in for, instead of ending it.",
        ),
    ] = False,
    json_out: Annotated[Path | None, options.json_option("The counters of the line at the end")] = None,
    **overrides: Any,
) -> None:
    """Run llama-server, or another program of llama.cpp, with its routed experts computed by
    workers. Without a topology: one local CPU worker. The exit code is the program's.
    """
    from dflash_moe.cli.llama.flags import read_flags
    from dflash_moe.cli.llama.program import Program, find_program

    if json_out == STDOUT:
        raise ConfigError("--json: stdout is the program's; name a file for the counters, such as --json counters.json")
    command = [find_program(program[0]), *program[1:]]
    flags = read_flags(command[0], command[1:], os.environ)
    if flags.is_telling:
        told = Program(command, os.environ)
        with told.signals_passed_on():
            raise typer.Exit(told.watch(lambda: ""))
    plan = options.load_topology(topology)
    raise typer.Exit(_run(command, flags, model, plan, plugin, allow_local, json_out, overrides))


def _run(
    command: list[str], flags: ProgramFlags, model: str | None, topology: Topology,
    plugin: str | None, allow_local: bool, json_out: Path | None, overrides: dict[str, Any],
) -> int:  # fmt: skip
    from dflash_moe.cli.llama.flags import (
        add_ours,
        excluded,
        find_model,
        override_for,
        refuse_router,
        require_whole_layers,
    )
    from dflash_moe.cli.llama.program import ENDING
    from dflash_moe.cli.llama.proof import LocalityProof, OpenFiles
    from dflash_moe.cli.llama.run import SupervisedRun, not_asked
    from dflash_moe.config import resolve_settings
    from dflash_moe.handover.handover_plan import check_topology
    from dflash_moe.holders.placed_experts import PlacedExperts
    from dflash_moe.telemetry.stop_signals import exit_by_signals

    if overrides.get("profile"):
        options.say("--profile: only hosts in Python record timelines; --json has a program's counters")
    if overrides.get("host_operators") or overrides.get("host_activations"):
        options.say("--host-operators, --host-activations: they concern hosts in Python; the program computes its part itself")
    refuse_router(command[0], command[1:], flags)
    library = _find_plugin(plugin, command[0])
    path = find_model(model, flags)
    check_topology(topology)
    if flags.threads:
        topology = dataclasses.replace(topology, host=dataclasses.replace(topology.host, threads=flags.threads))
    known, names = _describe(path, has_own_workers=bool(topology.local_workers()))
    left = excluded(known.tensors, flags)
    if len(left) == len(known.tensors):
        raise ConfigError("the program's flags (-ot) send all routed experts elsewhere; leave some to the workers")
    require_whole_layers(known.tensors, left)
    proof = LocalityProof([tensor.name for tensor in known.tensors], left, may_be_local=allow_local)
    settings = resolve_settings(topology.stated_settings, **overrides)
    # Nobody can release a worker here.
    placed = PlacedExperts(known.spec, topology, settings, retries_unfit=True)
    files = OpenFiles(_files_of(path, flags))
    override = override_for(known.tensors, names, may_be_local=allow_local) if library else ""
    if json_out is not None and json_out.is_file():
        # A run that fails before it counts must not leave the counters of a former one.
        json_out.unlink()
    with exit_by_signals(ENDING), ExitStack() as closing:
        closing.callback(placed.fleet.close)
        with loading_shown(then="") as on_loading:
            placed.start(on_loading)
        arguments, environ = add_ours(
            command[1:],
            _environment(placed, library),
            flags,
            override=override,
            threads=program_threads(placed),
        )
        run = SupervisedRun(known, placed, proof, files)
        code = run.to_end([command[0], *arguments], environ, closing)
        _report(run.counted, json_out)
        run.raise_failure(code)
    if not run.was_asked:
        options.say(not_asked(code, is_ours_loaded=bool(library)))
    return code


def _find_plugin(given: str | None, program: str) -> str:
    """Returns the path of the plug-in, empty where none shall be loaded. Raises ConfigError."""
    from dflash_moe.cli.llama.flags import is_llama_program

    if given == NO_PLUGIN:
        return ""
    if given is not None:
        if not Path(given).expanduser().is_file():
            raise ConfigError(f"--plugin {given}: no such file; build it with `make ggml LLAMA_CPP=DIR`, or pass none")
        return str(Path(given).expanduser().resolve())
    built = PACKAGE / PLUGIN
    if built.is_file():
        return str(built)
    if is_llama_program(program):
        raise ConfigError(
            f"{built}: the plug-in is not built; build it for the llama.cpp of {program}: "
            "`make ggml LLAMA_CPP=DIR`, DIR being its sources"
        )
    return ""


def _describe(path: Path, *, has_own_workers: bool) -> tuple[HandoverModel, list[str]]:
    """Reads from the GGUF file what the workers stand in for, and the names of all its tensors. A
    stub has no samples of contents, and is nothing for workers that this command starts.
    """
    from dflash_moe.cli.left_out import grouped
    from dflash_moe.handover.handover_plan import HandoverModel
    from dflash_moe.model.gguf_architectures.gguf_experts import gguf_experts
    from dflash_moe.model.tensor_sample import tensor_sample
    from dflash_moe.protocol.handover import PlannedTensor

    found = gguf_experts(path)
    is_stub = found.checkpoint.stub() is not None
    if is_stub and has_own_workers:
        raise ConfigError(f"{path}: a stub has no experts; name the full file, for the workers, with --model FILE")
    for left in grouped(found.left_out):
        stays = "stays" if left.is_one else "stay"
        options.say(f"{left.names} {stays} with the program: {left.reason}")
    tensors: list[PlannedTensor] = [
        PlannedTensor(
            layer=tensor.layer, name=tensor.name, ggml_type=tensor.ggml_type, extents=tensor.extents,
            num_bytes=tensor.num_bytes, file_offset=tensor.file_offset, has_sample=not is_stub,
            sample=0 if is_stub else tensor_sample(found.checkpoint, tensor.name),
        )
        for tensor in found.tensors
    ]  # fmt: skip
    return HandoverModel(found.spec, found.architecture, tuple(tensors)), list(found.checkpoint.stored)


def _files_of(path: Path, flags: ProgramFlags) -> list[Path]:
    """Returns the files by which a load of the model is noticed: all parts of the workers' one, and
    the one that the program names, which may be its stub.
    """
    from dflash_moe.model.checkpoint_files import find_gguf

    files = {file.resolve() for file in find_gguf(path) or (path,)}
    own = Path(flags.model).expanduser() if flags.model else path
    if own.is_file():
        files |= {file.resolve() for file in find_gguf(own) or (own,)}
    return sorted(files)


def _environment(placed: PlacedExperts, library: str) -> dict[str, str]:
    environ = dict(os.environ)
    if library:
        environ[PLUGIN_VARIABLE] = library
    if placed.threads.is_oversubscribed:
        # Threads that wait actively would take the workers' cores for milliseconds in every layer.
        environ = options.PASSIVE_OPENMP | environ
    return environ


def program_threads(placed: PlacedExperts) -> int:
    """Returns the number of threads for the program's own part: what the topology says, else the
    cores that the workers leave.
    """
    from dflash_moe.telemetry.machine import physical_cores, usable_cores

    stated = placed.topology.host.threads
    return stated or max(1, min(physical_cores(), usable_cores()) - sum(placed.threads.workers.values()))


def _report(counted: Counted | None, json_out: Path | None) -> None:
    from dflash_moe.protocol.handover import counted_fields

    log_auto.info("mode auto: the program's library measures and chooses, and does not tell its figures")
    if counted is not None:
        options.say(summary(counted))
    if json_out is not None:
        # A program that has called nobody has counters too, so that no former run's are left.
        options.write_json(json_out, counted_fields(counted))


def summary(counted: Counted) -> str:
    """Returns the line at the end: calls, bytes against the floor, and time in experts."""
    moved = counted.request_bytes + counted.reply_bytes
    against = f", {moved / counted.floor_bytes:.3f} of the floor" if counted.floor_bytes else ""
    failed = f" ({counted.failed_calls} failed)" if counted.failed_calls else ""
    return (
        f"dflash-moe: {counted.calls} calls{failed}, {format_bytes(moved)} moved{against}, "
        f"{counted.call_ns * 1e-9:.2f} s in experts, {counted.compute_ns * 1e-9:.2f} s of it computed by workers"
    )
