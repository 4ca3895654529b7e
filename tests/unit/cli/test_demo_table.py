"""The demo's table: one definition of "quicker" beside the medians.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics

from dflash_moe.cli import demo


def row(mode, dtype, samples):
    return {
        "name": mode, "mode": mode, "dtype": dtype, "prompt_tokens": 2070, "samples_s": samples, "digests": ["d"],
        "median_s": statistics.median(samples), "tokens_per_s": 1.0, "calls": 8, "request_bytes": 1, "reply_bytes": 1,
    }  # fmt: skip


def test_quicker_is_the_median_of_the_rounds_ratios(capsys):
    """The ratio of the medians would be 1.00 for auto beside batched, and 2.00 beside stream."""
    rows = [row("stream", "f32", [4.0, 8.0, 4.0]), row("batched", "f32", [2.0, 4.0, 1.0]), row("auto", "f32", [1.0, 2.0, 2.0])]
    demo.print_places({demo.FAR: rows})
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if line.startswith("auto     f32")]
    assert line.split()[-1] == "4.00x"
    assert "Beside the better fixed mode, auto is as quick as this: 2.00x batched (f32)" in shown
    assert "2.000" in line, "the median of the times stands beside it"
