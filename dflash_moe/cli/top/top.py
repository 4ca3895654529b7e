"""`dflash-moe top`: what the workers of a running host do, as it goes on.

The host answers with counters, of which this process makes rates: its own thread for orders does no
more than to read them.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dflash_moe.cli import options
from dflash_moe.cli.top.host_rates import HostRates, Snapshot, WorkerRates, rates, read_snapshot
from dflash_moe.cli.workers import PidOption
from dflash_moe.config import format_bytes
from dflash_moe.errors import ConfigError, DflashError
from dflash_moe.protocol import control

# A host answers from what it knows, so that one that takes longer stands still.
ANSWER_S = 5.0
# Rates are those of so many intervals: of a single one of 250 ms they would jump.
KEPT = 5


def top(
    pid: PidOption = None,
    once: Annotated[bool, typer.Option("--once", help="Show one interval and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.05, max=3600.0, metavar="S", help="Seconds between two looks.")] = 0.25,
    json_out: Annotated[Path | None, options.json_option("The rates, with --once,")] = None,
) -> None:
    """Watch the workers of a running host: rows and bytes per second, waits, load, memory. Ctrl-C
    ends it.

    A host is what `workers` takes one for. Its steps go on meanwhile, and no worker is asked. Rates
    are those of the last second. `waits` is the time in which a thread of the host waited for the
    worker, `busy` the time in which it computed, and both may exceed 100% where several do so at a
    time. `queue` is the mean number of slices that waited at the worker, `model off` how far the
    predictions of mode auto were from what came.
    """
    if json_out is not None and not once:
        raise ConfigError("--json: a live view has no end; give --once with it")
    found, address = control.find_host(pid)
    seen = _watch(found, address, interval)
    if once:
        shown = next(seen)
        options.write_json(json_out, asdict(shown))
        if json_out != options.STDOUT:
            typer.echo("\n".join(_lines(shown)))
        return
    _show_live(seen)


def _watch(pid: int, address: str, interval: float) -> Iterator[HostRates]:
    """Yields rates once an interval, without end. Raises DflashError once the host does not answer
    any more.
    """
    kept = deque([_look(pid, address)], maxlen=KEPT)
    while True:
        time.sleep(interval)
        kept.append(_look(pid, address))
        yield rates(kept[0], kept[-1])


def _look(pid: int, address: str) -> Snapshot:
    try:
        return read_snapshot(control.ask_at(address, {"order": "stats"}, timeout_s=ANSWER_S))
    except DflashError as error:
        raise error.reworded(f"host {pid}: {error}") from None


def _show_live(seen: Iterator[HostRates]) -> None:
    from rich.live import Live
    from rich.text import Text

    if sys.stdout.isatty():
        with Live(auto_refresh=False) as live:
            for shown in seen:
                live.update(Text("\n".join(_lines(shown)), no_wrap=True, overflow="crop"), refresh=True)
    for shown in seen:
        typer.echo("\n".join(_lines(shown)) + "\n")


def _lines(shown: HostRates) -> list[str]:
    """Returns host, engine, the table of workers, and why some are not ready."""
    table = options.Table(
        "worker", "state", "way", "rows/s", "MB/s out", "MB/s in", "waits", "busy", "queue", "memory", "model off"
    )
    for worker in shown.workers:
        table.add_row(*_cells(worker))
    lines = [f"host {shown.pid}: {shown.model}, mode {shown.mode}, {format_bytes(shown.memory_bytes)} resident"]
    engine = shown.engine
    if engine is not None:
        lines.append(
            f"engine: {engine.running} running, {engine.waiting} waiting; {engine.generated_per_s:.1f} tokens/s, prompts "
            f"{engine.prompt_per_s:.1f} tokens/s, {engine.steps_per_s:.1f} steps/s; {engine.used_blocks} of "
            f"{engine.total_blocks} KV blocks in use"
        )
    reasons = [f"{worker.name}: {worker.reason}" for worker in shown.workers if worker.reason]
    return [*lines, *table.lines(), *reasons]


def _cells(worker: WorkerRates) -> tuple[str, ...]:
    return (
        worker.name,
        worker.state,
        worker.transport,
        f"{worker.rows_per_s:.0f}",
        f"{worker.request_bytes_per_s / 1e6:.1f}",
        f"{worker.reply_bytes_per_s / 1e6:.1f}",
        f"{worker.wait_share:.0%}",
        f"{worker.busy_share:.0%}",
        f"{worker.queued:.2f}",
        "-" if worker.memory_bytes is None else format_bytes(worker.memory_bytes),
        "-" if worker.model_error is None else f"{worker.model_error:.0%}",
    )
