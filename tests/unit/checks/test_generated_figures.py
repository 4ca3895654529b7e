"""The figures in the documents: a falsified one is found, one by hand too, and no row is left out.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bench.documents.markup import DOCUMENTS, written
from bench.documents.recorded import Recorded
from bench.documents.text import digits, payload, percent, seconds
from dflash_moe.bench.results import read_result
from tests.checks import generated_figures

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The documents and the results they show."""
    for name in DOCUMENTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/results").symlink_to(ROOT / "bench/results")
    return tmp_path


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_the_documents_are_what_the_results_give(copy: Path) -> None:
    assert generated_figures.find(copy) == []


def test_a_falsified_table_is_found_with_both_lines(copy: Path) -> None:
    benchmarks = copy / "docs/benchmarks.md"
    line = next(line for line in benchmarks.read_text().splitlines() if line.startswith("| shared | 8 KiB |"))
    false = line.replace(line.split("|")[3], " 0.03 us ")
    change(benchmarks, line, false)
    (found,) = generated_figures.find(copy)
    assert "measured/transports" in found
    assert false in found
    assert line in found


def test_a_falsified_figure_in_a_sentence_is_found(copy: Path) -> None:
    change(copy / "README.md", "<!-- figure: prefill-of-floor -->", "<!-- figure: prefill-of-floor -->0.")
    assert ["prefill-of-floor" in found for found in generated_figures.find(copy)] == [True]


def test_a_line_that_was_taken_out_is_found(copy: Path) -> None:
    benchmarks = copy / "docs/benchmarks.md"
    line = next(line for line in benchmarks.read_text().splitlines() if line.startswith("| stream | bf16 |"))
    change(benchmarks, line + "\n", "")
    assert ["measured/prefill" in found for found in generated_figures.find(copy)] == [True]


@pytest.mark.parametrize(
    "words", ["It takes 7.3 us now.", "That is 1.9 times as fast.", "47.5 GB/s were reached.", "of which 86 %"]
)
def test_a_figure_by_hand_is_found(copy: Path, words: str) -> None:
    change(copy / "docs/benchmarks.md", "## Transports\n", f"## Transports\n\n{words}\n")
    (found,) = generated_figures.find(copy)
    assert "is written by hand" in found


def test_an_unknown_mark_and_one_that_stands_nowhere_are_found(copy: Path) -> None:
    change(copy / "docs/benchmarks.md", "figure: overlap-share", "figure: overlap-shares")
    found = generated_figures.find(copy)
    assert any("nothing defines 'overlap-shares'" in line for line in found)
    assert any("'overlap-share' is defined and stands in no document" in line for line in found)


def test_results_that_no_table_shows_are_missing_or_have_rows_that_collide_are_found(copy: Path) -> None:
    results = copy / "bench/results"
    results.unlink()
    shutil.copytree(ROOT / "bench/results", results)
    shutil.copy(results / "ipc.json", results / "ours_alone.json")
    (results / "prefill_4248.json").unlink()
    experts = read_result(results / "experts.json")
    experts["rows"].append(experts["rows"][0])
    (results / "experts.json").write_text(json.dumps(experts))
    found = generated_figures.find(copy)
    assert any("ours_alone.json: no table shows it" in line for line in found)
    assert any("measured/prefill cannot be made of the results: prefill_4248.json is not recorded" in line for line in found)
    assert any("measured/experts-one-thread cannot be made" in line and "two rows are" in line for line in found)


def test_a_row_that_is_left_out_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"schema": 2, "case": "a", "rows": [{"name": "quick"}, {"name": "slow"}]}))
    recorded = Recorded(tmp_path)
    assert len(recorded.rows("a", lambda row: row["name"] == "quick")) == 1
    assert recorded.unshown() == ["bench/results/a.json: row 'slow' (1) stands in no table"]


def test_numbers_are_written_with_three_digits_in_the_unit_that_fits() -> None:
    values = (2.11e-7, 9.97e-6, 0.0964, 0.99951, 12.79, 143.2)
    assert [seconds(value) for value in values] == ["0.21 us", "9.97 us", "96.4 ms", "1.00 s", "12.8 s", "143 s"]
    assert [digits(value) for value in (0.005, 1, 99.94, 100, 12345)] == ["0.01", "1.00", "99.9", "100", "12,345"]
    assert [payload(size) for size in (64, 8192, 3 << 20)] == ["64 B", "8 KiB", "3 MiB"]
    assert percent(0.8649) == "86%"


def test_what_is_of_a_result_that_is_not_there_stays_and_is_told(copy: Path) -> None:
    results = copy / "bench/results"
    results.unlink()
    shutil.copytree(ROOT / "bench/results", results)
    (results / "slice_overlap.json").unlink()
    text = (copy / "docs/benchmarks.md").read_text()
    with pytest.raises(FileNotFoundError, match="slice_overlap.json is not recorded"):
        written(text, results)
    # A figure of another result is written all the same.
    false = text.replace("<!-- figure: held-out-windows -->", "<!-- figure: held-out-windows -->0")
    not_recorded: list[str] = []
    assert written(false, results, not_recorded) == text
    # The table of where results come from has a line less.
    page = (copy / "docs/benchmarks/results.md").read_text()
    lost = next(line for line in page.splitlines(keepends=True) if line.startswith("| [slice_overlap]"))
    assert written(page, results) == page.replace(lost, "")
    assert {line.split(":")[0] for line in not_recorded} == {"measured/overlap", "overlap-share", "overlap-forecast"}


def test_writing_twice_changes_nothing(copy: Path) -> None:
    for name in DOCUMENTS:
        text = (copy / name).read_text()
        assert written(written(text, ROOT / "bench/results"), ROOT / "bench/results") == text
