"""Progress of loading: lines off a terminal at a bounded rate, one bar for all holders on one.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import io

from rich.console import Console
from rich.progress import Progress

from dflash_moe.cli.loading import LINE_EVERY_S, Bars, Lines, LoadingBar


def test_lines_name_every_holder_and_come_every_two_seconds():
    now = [0.0]
    said: list[str] = []
    lines = Lines(said.append, lambda: now[0])
    lines.report("w0", 0, 64 << 20)
    lines.report("w1", 3 << 20, 32 << 20)
    assert said == []
    now[0] = LINE_EVERY_S
    lines.report("w0", 12 << 20, 64 << 20)
    lines.report("w0", 13 << 20, 64 << 20)
    assert said == ["loading experts: w0 12.0 MiB of 64.0 MiB, w1 3.0 MiB of 32.0 MiB"]


def test_bars_count_per_layer():
    with Progress(console=Console(file=io.StringIO())) as progress:
        bars = Bars(progress, "comparing")
        for holder, count in (("layer 0", 0), ("layer 1", 0), ("layer 0", 5), ("layer 1", 8)):
            bars.report(holder, count, 8)
        assert [(task.description, task.completed, task.total) for task in progress.tasks] == [
            ("comparing layer 0", 5, 8),
            ("comparing layer 1", 8, 8),
        ]


def test_loading_is_one_bar_in_bytes_that_says_what_follows():
    with Progress(console=Console(file=io.StringIO())) as progress:
        bar = LoadingBar(progress)
        (task,) = progress.tasks
        seen = []
        for holder, count, total in (("w0", 0, 64), ("w1", 0, 32), ("w0", 64, 64), ("w1", 32, 32)):
            bar.report(holder, count, total)
            seen.append((task.description, task.completed, task.total))
        assert seen == [
            ("loading experts", 0, 64),
            ("loading experts", 0, 96),
            ("loading experts", 64, 96),
            ("preparing the model around the experts", 96, 96),
        ]
        assert len(progress.tasks) == 1
