"""`dflash-moe bench remote`: options and table; the measuring is dflash_moe/bench/remote.py.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli import options
from dflash_moe.cli.bench.run import JsonOption, measuring
from dflash_moe.cli.bench.tables import print_comparison
from dflash_moe.errors import ConfigError, shown

if TYPE_CHECKING:
    from dflash_moe.bench.results import BenchResult


def _variables(whose: str) -> Any:
    text = f"A variable of {whose}: NAME=VALUE, may be repeated [default: none]."
    return typer.Option(metavar="NAME=VALUE", help=text, show_default=False)


def remote(
    model: options.ModelOption,
    topology: Annotated[
        Path,
        typer.Option(metavar="FILE", help="YAML file whose workers were started by hand, or elsewhere.", show_default=False),
    ],
    env: Annotated[list[str] | None, _variables("both sides' hosts")] = None,
    base_env: Annotated[list[str] | None, _variables("the base's host alone")] = None,
    patch_env: Annotated[list[str] | None, _variables("the patch's host alone")] = None,
    case: Annotated[str, typer.Option(metavar="CASE", help="What is measured: decode or prefill.")] = "decode",
    mode: Annotated[str, typer.Option(metavar="MODE", help="stream, batched or auto.")] = "auto",
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Random tokens of the prompt [default: the case's own].", show_default=False),
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens decoded [default: the case's own].", show_default=False)
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Rounds, with a process of each side in each.")] = 6,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be measured, and start nothing.")] = False,
    redact: Annotated[
        bool, typer.Option("--redact", help="Replace hosts, users, paths and keys in plan, tables and JSON.")
    ] = False,
    json_out: JsonOption = None,
) -> None:
    """A/B: the same prompt over the same workers from two host processes, which differ in their
    environment alone.

    Workers keep theirs: they must run already, since one that a host starts would inherit it. Every
    sample is a new process, after one of each side that does not count, and the sides take turns
    in changing order. The rows `base` and `patch` of the JSON have the environment of their own
    side.
    """
    from dflash_moe.bench.compare import compare_rows
    from dflash_moe.bench.remote import BASE, CASES, PATCH, RemoteParams, make_sides, read_variables, run_remote

    for flag, value, allowed in (("--case", case, CASES), ("--mode", mode, ("stream", "batched", "auto"))):
        if value not in allowed:
            raise ConfigError(f"{flag} {shown(value)} is not allowed; allowed: {', '.join(allowed)}")
    params = RemoteParams(options.model_directory(model), topology, case, mode, prompt_tokens, new_tokens, repeat)
    pairs = (("--env", env), ("--base-env", base_env), ("--patch-env", patch_env))
    both, base, patch = (read_variables(given or (), flag) for flag, given in pairs)
    sides = make_sides(params, both, base, patch, is_redacted=redact)
    if dry_run:
        from dflash_moe.bench.harness import Recorder

        found = run_remote(params, sides, recorder=Recorder(), is_dry=True)
        _show_plan(found)
        options.write_json(json_out, found.as_json())
        return
    with measuring(json_out, _show) as recorder:
        found = run_remote(params, sides, recorder=recorder)
    verdicts = compare_rows(found.as_json(), "this run", BASE, PATCH, min_effect=0.02).verdicts
    print_comparison([dataclasses.asdict(verdict) for verdict in verdicts])


def _show_plan(found: BenchResult) -> None:
    typer.echo(f"each of {found.params['repeat']} rounds, and one before that does not count, runs on both sides:")
    typer.echo(f"  dflash-moe {shlex.join(found.params['command'])}\n")
    _show_environments(found.rows)


def _show_environments(rows: list[dict[str, Any]]) -> None:
    names = sorted({name for row in rows for name in row["environment"]})
    cells = [(name, *(row["environment"].get(name, "-") for row in rows)) for name in names]
    sides = [(row["name"], lambda cell, at=at: cell[at]) for at, row in enumerate(rows, 1)]
    options.show_rows(cells, ("variable", lambda cell: cell[0]), *sides)


def _show(found: BenchResult) -> None:
    _show_environments(found.rows)
    options.show_rows(
        found.rows,
        ("side", "{name}"),
        ("processes", lambda row: str(len(row["samples_s"]))),
        ("median ms", lambda row: f"{row['median_s'] * 1e3:.2f}"),
        ("p95 ms", lambda row: f"{row['p95_s'] * 1e3:.2f}"),
        ("calls", lambda row: str(row.get("calls", "-"))),
    )
