"""`bench compare` and `bench plot`: what can be said of recorded results, and their pictures.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from dflash_moe.cli import options
from dflash_moe.cli.bench.tables import print_comparison
from dflash_moe.errors import ConfigError


def compare(
    files: Annotated[
        list[Path], typer.Argument(metavar="A.json [B.json]", help="Two results, or one with --rows.", show_default=False)
    ],
    rows: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--rows",
            metavar="X Y",
            help="Within one file: rows named Y against rows named X [default: two files are compared].",
            show_default=False,
        ),
    ] = None,
    min_effect: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Smallest difference that counts, as a fraction of the time.")
    ] = 0.02,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PARAM",
            help="A parameter that may differ between the files; repeatable [default: none may].",
            show_default=False,
        ),
    ] = None,
    fail_if_slower: Annotated[bool, typer.Option("--fail-if-slower", help="Exit with 1 when anything is slower.")] = False,
    json_out: Annotated[Path | None, options.json_option("The verdicts")] = None,
) -> None:
    """Faster, slower or cannot tell: B against A, or row Y against row X, with bootstrap intervals
    from all samples.
    """
    from dflash_moe.bench.compare import compare_files, compare_rows
    from dflash_moe.bench.results import read_result

    if len(files) != (1 if rows else 2):
        raise ConfigError(f"{len(files)} files given; pass two results, or one result and --rows X Y")
    found = [read_result(path) for path in files]
    if rows:
        comparison = compare_rows(found[0], str(files[0]), *rows, min_effect=min_effect)
    else:
        names = (str(files[0]), str(files[1]))
        comparison = compare_files(found[0], found[1], names=names, min_effect=min_effect, ignored=ignore or ())
    for warning in comparison.warnings:
        options.say(f"warning: {warning}")
    verdicts = [dataclasses.asdict(verdict) for verdict in comparison.verdicts]
    print_comparison(verdicts)
    options.write_json(json_out, {"verdicts": verdicts, "warnings": comparison.warnings})
    if fail_if_slower and comparison.has_slower:
        slower = sum(verdict["verdict"] == "slower" for verdict in verdicts)
        options.say(f"{slower} of {len(verdicts)} rows are slower (--fail-if-slower)")
        raise typer.Exit(1)


def plot(
    files: Annotated[list[Path], typer.Argument(metavar="A.json ...", help="Results of one case.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", metavar="PNG", help="PNG or SVG to draw into.", show_default=False)],
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Draw the recorded slices of one layer (bench prefill --timeline) instead.")
    ] = False,
) -> None:
    """Draw recorded results; several files of a case are drawn below each other."""
    from dflash_moe.bench.plots.plot import check_output, draw, draw_timeline
    from dflash_moe.bench.results import read_result

    options.prepare_outputs(out)
    check_output(out)
    found = [(path.stem, read_result(path)) for path in files]
    if timeline:
        if len(found) != 1:
            raise ConfigError(f"--timeline draws one result, {len(found)} were given")
        draw_timeline(found[0], out)
    else:
        draw(found, out)
    options.say(f"wrote {out}")
