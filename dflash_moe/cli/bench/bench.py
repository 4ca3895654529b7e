"""`dflash-moe bench ...`: thin commands over dflash_moe.bench; tables on stdout, progress on
stderr, everything in the JSON.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from dflash_moe.cli import options
from dflash_moe.cli.bench.experts import experts
from dflash_moe.cli.bench.fault import fault
from dflash_moe.cli.bench.files import compare, plot
from dflash_moe.cli.bench.limits import limits
from dflash_moe.cli.bench.remote import remote
from dflash_moe.cli.bench.run import JsonOption, PlotOption, measuring
from dflash_moe.cli.bench.scheduler import scheduler
from dflash_moe.cli.bench.streaming import streaming
from dflash_moe.cli.bench.tables import print_decode, print_ipc, print_prefill, print_processes, print_summary
from dflash_moe.cli.command_line import Commands, Group
from dflash_moe.errors import ConfigError

if TYPE_CHECKING:
    from dflash_moe.bench.results import BenchResult

ModesOption = Annotated[str, typer.Option(help="Comma-separated list of modes.")]
DtypesOption = Annotated[
    str, typer.Option(help="Comma-separated list of wire dtypes [default: the model's own].", show_default=False)
]
RepeatOption = Annotated[int, typer.Option(min=1, help="Measured rounds; the modes are interleaved in each.")]
LocalOption = Annotated[bool, typer.Option("--local/--no-local", help="Also measure all experts in the host process.")]
ALL_MODES = "stream,batched,auto"
# A slot holds no more bytes, so that no payload of a ping-pong can be larger.
MAX_PAYLOAD_BYTES = 64 << 20
# No model of today has a context window as long: more is a typing error.
MAX_PROMPT_TOKENS = 1 << 20


# These measure parts for those who change them, and come with the sources.
IN_THE_LAB = {"attention": "attention", "doorbell": "doorbell", "step": "step", "campaign": "prefill-cards"}


class Bench(Group):
    """The group `bench`."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        name: f"in a checkout of the sources it is `python -m bench.lab {there}`" for name, there in IN_THE_LAB.items()
    }


def register(app: typer.Typer) -> None:
    """Adds the group `bench`."""
    bench = Commands(cls=Bench, help="Measure this machine, compare results, draw them.", no_args_is_help=True)
    for command in (ipc, prefill, decode, limits, compare, plot, experts, scheduler, streaming, remote, fault):
        bench.command(name=command.__name__)(command)
    app.add_typer(bench, name="bench")


def ipc(
    full: Annotated[bool, typer.Option("--full", help="More payload sizes and rounds (about 20 minutes).")] = False,
    payloads: Annotated[
        str,
        typer.Option(
            metavar="BYTES[,BYTES...]",
            help="Comma-separated payload sizes each way, in bytes [default: 64 to 4,194,304; with --full to 16,777,216].",
            show_default=False,
        ),
    ] = "",
    batches: Annotated[
        int | None,
        typer.Option(min=1, help="Alternations of transport and floor [default: 5; with --full 15].", show_default=False),
    ] = None,
    json_out: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Round trips of every transport beside their raw floors, and what an expert call adds (5
    minutes at most).
    """
    from dflash_moe.bench.ipc import PAYLOADS_FULL, IpcParams, run_ipc

    params = IpcParams(payloads=PAYLOADS_FULL, batches=15) if full else IpcParams()
    if payloads:
        params = dataclasses.replace(params, payloads=options.numbers(payloads, "--payloads", MAX_PAYLOAD_BYTES))
    if batches is not None:
        params = dataclasses.replace(params, batches=batches)
    with measuring(json_out, lambda result: print_ipc(result.rows), plot) as recorder:
        run_ipc(params, recorder=recorder)


@options.with_settings()
def prefill(
    model: options.ModelOption,
    topology: options.TopologyOption = None,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Comma-separated lengths of the random prompt, in tokens.")
    ] = "2048",
    new_tokens: Annotated[int, typer.Option(min=0, help="Tokens decoded after the prefill.")] = 32,
    modes: ModesOption = ALL_MODES,
    dtypes: DtypesOption = "",
    repeat: RepeatOption = 3,
    stream_repeat: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rounds of mode stream over prompts above 1,024 tokens, where one may take a minute [default: as --repeat].",
            show_default=False,
        ),
    ] = None,
    with_local: LocalOption = True,
    with_timeline: Annotated[
        bool,
        typer.Option("--timeline", help="Record one layer's slices per mode into the JSON; --plot draws them beside the PNG."),
    ] = False,
    json_out: JsonOption = None,
    plot: PlotOption = None,
    **overrides: Any,
) -> None:
    """Prefill and decode in every mode and wire dtype: time, calls, bytes both ways against the
    floor.
    """
    from dflash_moe.bench.prefill import PrefillParams, run_prefill

    _refuse_lists(overrides, "prefill")
    params = PrefillParams(
        model=options.model_directory(model),
        prompt_tokens=options.numbers(prompt_tokens, "--prompt-tokens", MAX_PROMPT_TOKENS),
        new_tokens=new_tokens,
        modes=_allowed(modes, "--modes", ("stream", "batched", "auto")),
        dtypes=_allowed(dtypes, "--dtypes", ("f32", "f16", "bf16")) if dtypes else (),
        repeat=repeat,
        stream_repeat=stream_repeat,
        with_local=with_local,
        with_timeline=with_timeline or bool(overrides.get("profile")),
    )
    with measuring(json_out, _show_prefill, plot) as recorder:
        run_prefill(params, options.load_topology(topology), recorder=recorder, overrides=overrides)


def _show_prefill(result: BenchResult) -> None:
    print_processes(result.params.get("processes", ()))
    print_prefill(result.rows)
    print_summary(result.summary)


@options.with_settings()
def decode(
    model: options.ModelOption,
    topology: options.TopologyOption = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the random prompt, in tokens; not timed.")] = 32,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded and timed in every round.")] = 32,
    modes: ModesOption = ALL_MODES,
    dtypes: DtypesOption = "",
    repeat: RepeatOption = 5,
    with_local: LocalOption = True,
    json_out: JsonOption = None,
    plot: PlotOption = None,
    **overrides: Any,
) -> None:
    """Latency of every decoded token in every mode and wire dtype; calls and bytes per token
    against the floor.
    """
    from dflash_moe.bench.decode import DecodeParams, run_decode

    _refuse_lists(overrides, "decode")
    params = DecodeParams(
        model=options.model_directory(model),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        modes=_allowed(modes, "--modes", ("stream", "batched", "auto")),
        dtypes=_allowed(dtypes, "--dtypes", ("f32", "f16", "bf16")) if dtypes else (),
        repeat=repeat,
        with_local=with_local,
    )
    with measuring(json_out, lambda result: print_decode(result.rows), plot) as recorder:
        run_decode(params, options.load_topology(topology), recorder=recorder, overrides=overrides)


def _refuse_lists(overrides: Mapping[str, Any], command: str) -> None:
    for taken in ("mode", "dtype", "reply_dtype"):
        if overrides.get(taken) is not None:
            raise ConfigError(f"--{taken.replace('_', '-')}: bench {command} measures lists; use --modes and --dtypes")


def _allowed(text: str, flag: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    chosen = options.words(text)
    for one in chosen:
        if one not in allowed:
            raise ConfigError(f"{flag} {text!r}: {one!r} is not allowed; choose from {', '.join(allowed)}")
    if not chosen:
        raise ConfigError(f"{flag} {text!r}: the list is empty; choose from {', '.join(allowed)}")
    return chosen
