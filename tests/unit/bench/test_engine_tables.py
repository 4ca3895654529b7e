"""The tables of the engine: every row of its results stands in one, and a mark that is missed says
so.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.campaigns.micro_batches import MARK_ROW, MOST_SHARE, shown_row, summarise
from bench.documents.engine_tables import TABLES
from bench.documents.recorded import Recorded

TIMES = {"p50": 0.02, "mean": 0.03}


def scheduler_row(name: str, batch: int, **more: Any) -> dict[str, Any]:
    row = {"name": name, "batch": batch, "decode_tokens_per_s": 100.0 * batch, "prefill_tokens_per_s": 900.0}
    return row | {"ttft_s": TIMES, "tpot_s": TIMES} | more


def scheduler_result(*, share: float = 0.015, by_loop: float = 1.02, is_same: bool = True) -> dict[str, Any]:
    parts = {"forward_s": 0.05, "plan_s": 1e-4, "sample_s": 2e-4, "commit_s": 5e-5, "deliver_s": 4e-5}
    engine = {"steps": 65, "batch_sizes": {"1": 2, "16": 63}, "per_step_s": parts}
    rows = [
        scheduler_row("loop", 1),
        scheduler_row("batch-1", 1, engine_share=0.03, **engine),
        scheduler_row("batch-16", 16, engine_share=share, **engine),
    ]
    ratios = {"loop": by_loop, "batch-1": 1.0, "batch-16": 16.0}
    summary = [{"name": name, "throughput_ratio": value, "same_tokens": is_same} for name, value in ratios.items()]
    return {"rows": rows, "summary": summary}


def micro_row(name: str, asked: str, **more: Any) -> dict[str, Any]:
    row = {"name": name, "asked": asked, "steps": 9, "split_steps": 0, "median_s": 0.2, "p95_s": 0.3}
    return row | {"others_busy_cores": 0.01} | more


def micro_result(share: float = 0.8) -> dict[str, Any]:
    rows = [
        micro_row("prefill 2 x 256, one batch", "1"),
        micro_row(MARK_ROW, "2", share=share, split_steps=9, overlap_share=0.9),
        micro_row("prefill 2 x 256, auto", "auto", share=0.85, split_steps=7, overlap_share=0.8),
    ]
    return {"rows": rows, "summary": summarise(rows)}


def requests_result() -> dict[str, Any]:
    run = {"name": "requests", "requests": 10000, "finished": 9999, "forked": 7, "choices": {"length": 8}, "tokens": 340000,
           "seconds": 200.0, "wanted_blocks": 570, "num_blocks": 57, "preemptions": 3, "cached_tokens": 32}  # fmt: skip
    rows: list[dict[str, Any]] = [
        run,
        {"name": "memory", "anonymous_bytes": [1 << 20, 3 << 20], "grown_bytes": 0},
        {"name": "blocks", "num_blocks": 57, "num_free": 57, "error": ""},
        {"name": "alone in the plain loop", "choices": 4},
        {"name": "alone in an engine", "choices": 6},
    ]
    summary = [
        {"what": "requests that did not end as they should", "value": 1, "at_most": 0, "met": False},
        {"what": "preemptions", "value": 3, "at_least": 1, "met": True},
    ]
    return {"rows": rows, "summary": summary}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The three results."""
    write(tmp_path, "engine_scheduler", scheduler_result())
    write(tmp_path, "micro_batches", micro_result())
    write(tmp_path, "engine_requests", requests_result())
    return tmp_path


def write(folder: Path, name: str, result: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"schema": 2, "case": name} | result))


def lines_of(folder: Path, table: str) -> list[str]:
    return TABLES[table](Recorded(folder)).splitlines()[2:]


def test_every_row_of_the_three_results_stands_in_a_table(folder: Path) -> None:
    recorded = Recorded(folder)
    for table in TABLES.values():
        table(recorded)
    assert recorded.unshown() == []


def test_requests_stand_beside_the_plain_loop(folder: Path) -> None:
    loop, one, sixteen = lines_of(folder, "scheduler")
    assert loop.startswith("| 1, plain loop | 100 | 1.02 |")
    assert one.startswith("| 1 | 100 | 1.00 |")
    assert sixteen == "| 16 | 1,600 | 16.0 | 900 | 20.0 ms | 30.0 ms | 20.0 ms | 30.0 ms | yes |"


def test_other_tokens_than_alone_are_told(folder: Path) -> None:
    write(folder, "engine_scheduler", scheduler_result(is_same=False))
    assert all(line.endswith("| NO |") for line in lines_of(folder, "scheduler"))


def test_a_step_is_shown_in_its_parts_where_an_engine_ran(folder: Path) -> None:
    one, sixteen = lines_of(folder, "scheduler-steps")
    assert one.startswith("| 1 | 65 |")
    assert sixteen == "| 16 | 65 | 1 x 2, 16 x 63 | 50.0 ms | 100 us | 200 us | 50.0 us | 40.0 us | 1.50% |"


@pytest.mark.parametrize(
    ("share", "by_loop", "met"),
    [(0.02, 1.03, ["yes", "yes"]), (0.0201, 1.03, ["NO", "yes"]), (0.02, 1.0301, ["yes", "NO"])],
)
def test_the_engine_has_two_hundredths_of_a_step_and_costs_one_request_three(
    folder: Path, share: float, by_loop: float, met: list[str]
) -> None:
    write(folder, "engine_scheduler", scheduler_result(share=share, by_loop=by_loop))
    assert [line.split(" | ")[-1].strip("| ") for line in lines_of(folder, "scheduler-marks")] == met


def test_steps_say_what_was_cut_and_what_auto_chose(folder: Path) -> None:
    one, two, auto = lines_of(folder, "micro-batches")
    assert one == "| prefill 2 x 256 | one batch | 200 ms | 300 ms | - | 0 of 9 | - | 0.01 |"
    assert two == "| prefill 2 x 256 | two micro-batches | 200 ms | 300 ms | 0.800 | 9 of 9 | 90% | 0.01 |"
    assert auto == "| prefill 2 x 256 | auto | 200 ms | 300 ms | 0.850 | 7 of 9 | 80% | 0.01 |"


@pytest.mark.parametrize(("share", "met"), [(MOST_SHARE, "yes"), (MOST_SHARE + 0.001, "NO")])
def test_two_micro_batches_must_save_their_share(folder: Path, share: float, met: str) -> None:
    write(folder, "micro_batches", micro_result(share))
    (line,) = lines_of(folder, "micro-batches-mark")
    assert line == f"| time of {MARK_ROW}, by one batch's | {share:.4f} | <= 0.85 | {met} |"


def test_whoever_measures_sees_what_auto_cut() -> None:
    _, two, auto = micro_result()["rows"]
    assert shown_row(two).endswith("200.0 ms, 0.800 of one batch, 90% of waiting hidden; others took 0.01 cores")
    assert shown_row(auto).endswith(", cut 7 of 9 steps; others took 0.01 cores")


def test_requests_are_counted_and_judged(folder: Path) -> None:
    counts = lines_of(folder, "engine-requests")
    assert "| requests | 10,000 |" in counts
    assert "| tokens found in the cache of prefixes | 32 |" in counts
    assert "| choices compared with the same one alone in an engine | 6 |" in counts
    assert "| anonymous MiB at the last look | 3.0 |" in counts
    assert lines_of(folder, "engine-requests-marks") == [
        "| requests that did not end as they should | 1 | <= 0 | NO |",
        "| preemptions | 3 | >= 1 | yes |",
    ]
