"""What all measuring commands share: where a result and its picture go, the progress, and the table
of what an interrupted run has.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli.bench.progress import reporting
from dflash_moe.cli.json_output import STDOUT, json_option, write_json

if TYPE_CHECKING:
    from dflash_moe.bench.harness import Recorder
    from dflash_moe.bench.results import BenchResult

JsonOption = Annotated[Path | None, json_option("The result (all samples, machine, commit)")]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw the result into this PNG or SVG, which needs matplotlib [default: nowhere].",
        show_default=False,
    ),
]


@contextmanager
def measuring(
    json_out: Path | None,
    show: Callable[[BenchResult], None],
    plot: Path | None = None,
) -> Iterator[Recorder]:
    """Gives the block the recorder of one bench. `show` prints the tables, also those of what an
    interrupted run has; a finished one is drawn into `plot`. A picture that cannot be drawn is
    refused before the work is done.
    """
    from dflash_moe.bench.harness import Recorder

    if plot is not None:
        from dflash_moe.bench.plots.plot import check_output

        check_output(plot)
    recorder: Recorder | None = None
    try:
        with reporting() as reporter:
            # A file has every round as soon as it is measured, stdout the whole at the end.
            recorder = Recorder(None if json_out == STDOUT else json_out, reporter)
            yield recorder
    finally:
        if recorder is not None and recorder.result is not None and recorder.result.rows:
            show(recorder.result)
            if json_out == STDOUT:
                write_json(STDOUT, recorder.result.as_json())
    if plot is not None and recorder.result is not None:
        _draw(recorder.result.as_json(), plot)


def _draw(found: dict[str, Any], plot: Path) -> None:
    """Draws a result, and beside it its timelines where it has some."""
    from dflash_moe.bench.plots.plot import draw, draw_timeline, timeline_path

    draw([("this run", found)], plot)
    if found.get("timelines"):
        draw_timeline(("this run", found), timeline_path(plot))
