"""`dflash-moe profile`: the timeline of a prompt and some tokens, on both sides of every expert
call, as a file for Perfetto and as a picture.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli import help_page, options, sampling_options
from dflash_moe.cli.bench.bench import MAX_PROMPT_TOKENS
from dflash_moe.cli.loading import doing_shown, loading_shown
from dflash_moe.config import format_bytes
from dflash_moe.errors import ConfigError, printable

if TYPE_CHECKING:
    from dflash_moe.bench.recording import Recording
    from dflash_moe.engine.llm import LLM


@options.with_settings()
def profile(
    model: options.ModelOption,
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Write the trace here; such names end in .pftrace.", show_default=False),
    ],
    topology: options.TopologyOption = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "-p", "--prompt", metavar="TEXT", help="Text to complete [default: random tokens].", show_default=False,
            rich_help_panel=help_page.MODEL,
        ),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=MAX_PROMPT_TOKENS, metavar="N", help="Random tokens where no text is given.")
    ] = 256,
    max_tokens: Annotated[int, sampling_options.max_tokens("prompt")] = 16,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw one layer's slices of the prefill into this PNG or SVG, which needs matplotlib [default: nowhere].",
            show_default=False,
        ),
    ] = None,
    **overrides: Any,
) -> None:  # fmt: skip
    """Record a timeline: request, steps and calls of the host, and the links, queue and computation
    of every worker.

    Open the file at ui.perfetto.dev, which reads it in the browser and uploads nothing. The clock
    of a worker that was dialled is aligned by its quickest round trip, and each of its slices says
    how far that may be off.
    """
    from dflash_moe.bench.pftrace import check_perfetto, write_trace

    if out == options.STDOUT:
        raise ConfigError("--out -: a trace is no text; give the path of a file")
    options.prepare_outputs(out)
    check_perfetto()
    if plot is not None:
        from dflash_moe.bench.plots.plot import check_output

        check_output(plot)
    directory = options.model_directory(model)
    placed = options.topology_for(topology, directory, overrides)
    with doing_shown(f"reading {directory.name}"):
        from dflash_moe.bench.recording import record
        from dflash_moe.engine.llm import LLM
        from dflash_moe.forward.host_model import check_length

    check_length(directory, max_tokens + (prompt_tokens if prompt is None else 1))
    with loading_shown() as on_loading:
        llm = LLM(directory, placed, on_loading=on_loading, **{**overrides, "profile": True})
    with llm:
        found = record(llm, placed, _token_ids(llm, prompt, prompt_tokens), max_tokens)
    num_bytes = write_trace(found, out)
    if plot is not None:
        _draw(found, model, plot)
    _show(found, out, num_bytes)


def _token_ids(llm: LLM, prompt: str | None, prompt_tokens: int) -> list[int]:
    from dflash_moe.bench.forward import random_prompt

    if prompt is None:
        found: list[int] = random_prompt(llm.host, prompt_tokens, 0)[0].tolist()
        return found
    found = llm.token_ids(prompt)
    if not found:
        raise ConfigError("--prompt: the text has no tokens; give at least one character")
    return found


def _draw(found: Recording, model: str, plot: Path) -> None:
    from dflash_moe.bench.plots.plot import draw_timeline
    from dflash_moe.bench.results import BenchResult

    made = BenchResult("profile", {"model": Path(model).name}, complete=True, timelines=[found.prefill_timeline()])
    draw_timeline(("this run", made.as_json()), plot)


def _show(found: Recording, out: Path, num_bytes: int) -> None:
    """Prints where the time of the slices went, and where the file is."""
    rows = []
    for place, worker in enumerate(found.workers):
        own = [one for one in found.slices if one["worker"] == place]
        if own:
            rows.append((worker, own))
    options.show_rows(
        rows,
        ("worker", lambda row: row[0].name),
        ("transport", lambda row: row[0].transport),
        ("slices", lambda row: str(len(row[1]))),
        ("link out ms", lambda row: _ms(row[1], "published_ns", "worker_received_ns")),
        ("queue ms", lambda row: _ms(row[1], "worker_received_ns", "worker_started_ns")),
        ("compute ms", lambda row: _ms(row[1], "worker_started_ns", "worker_finished_ns")),
        ("link back ms", lambda row: _ms(row[1], "worker_finished_ns", "arrived_ns")),
        ("clock +- us", lambda row: f"{row[0].uncertainty_ns / 1e3:.0f}"),
    )
    if found.is_cut:
        options.say("more slices came than are kept: the end is missing; record fewer tokens")
    typer.echo(printable(f"wrote {out} ({format_bytes(num_bytes)}); open it at https://ui.perfetto.dev"))


def _ms(own: list[Any], begin: str, end: str) -> str:
    return f"{sum(one[end] - one[begin] for one in own) / 1e6:.2f}"
