"""Progress of loading: lines off a terminal at a bounded rate, a bar per holder on one.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import io

from rich.console import Console
from rich.progress import Progress

from dflash_moe.cli.loading import LINE_EVERY_S, Bars, Lines


def test_lines_name_every_holder_and_come_every_two_seconds():
    now = [0.0]
    said: list[str] = []
    lines = Lines(said.append, lambda: now[0])
    lines.report("w0", 0, 64)
    lines.report("w1", 3, 32)
    assert said == []
    now[0] = LINE_EVERY_S
    lines.report("w0", 12, 64)
    lines.report("w0", 13, 64)
    assert said == ["loading experts: w0 12 of 64, w1 3 of 32"]


def test_bars_count_per_holder():
    with Progress(console=Console(file=io.StringIO())) as progress:
        bars = Bars(progress)
        for holder, count in (("w0", 0), ("w1", 0), ("w0", 5), ("w1", 8)):
            bars.report(holder, count, 8)
        assert [(task.description, task.completed, task.total) for task in progress.tasks] == [
            ("loading w0", 5, 8),
            ("loading w1", 8, 8),
        ]
