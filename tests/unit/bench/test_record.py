"""`make results`: what it measures again, what it leaves out, what a failure does, and that nothing
is published of a changed tree.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.record import __main__ as record
from bench.record.steps import ROOT, STEPS, Place, Step

COMMIT = "c" * 40
PANELS = "DFLASH_MOE_CACHE_PANELS"


@pytest.fixture(autouse=True)
def _head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes COMMIT for the one whose trees are HEAD's."""
    monkeypatch.setattr(record, "is_of_head", lambda _root, result, _step: result["commit"] == COMMIT)


def writing(name: str, *, commit: str = COMMIT, complete: bool = True, code: int = 0) -> Step:
    """A step whose program writes a result and ends with `code`."""
    result = {"commit": commit, "dirty": False, "complete": complete, "rows": []}

    def commands(place: Place) -> list[list[object]]:
        program = f"open({str(place.json(name))!r}, 'w').write({json.dumps(result)!r}); raise SystemExit({code})"
        return [[sys.executable, "-c", program]]

    return Step(name, (name,), 1, commands)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, is_quick=False)


def test_what_is_there_of_these_sources_and_complete_is_not_measured_again(place: Place) -> None:
    assert record.record([writing("a")], place, again=False).took_s.keys() == {"a"}
    assert record.record([writing("a")], place, again=False).kept == ["a"]
    assert record.record([writing("a")], place, again=True).took_s.keys() == {"a"}
    place.json("a").write_text(json.dumps({"commit": "d" * 40, "complete": True, "rows": []}))
    assert record.record([writing("a")], place, again=False).took_s.keys() == {"a"}


def test_what_is_recorded_of_these_sources_is_not_measured_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path / "recorded")
    (tmp_path / "recorded").mkdir()
    (tmp_path / "recorded" / "a.json").write_text(json.dumps({"commit": COMMIT, "complete": True, "rows": []}))
    assert record.record([writing("a")], place, again=False).kept == ["a"]
    assert record.record([writing("a")], place, again=True).took_s.keys() == {"a"}


def test_a_step_that_fails_is_told_and_the_others_go_on(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [writing("a", code=3), writing("b", complete=False), writing("c", commit="e" * 40), writing("d")]
    run = record.record(steps, place, again=False)
    assert set(run.took_s) == {"a", "b", "c", "d"}
    assert run.failed["a"].startswith("exit status 3 of -c")
    assert run.failed["b"] == "b.json is incomplete"
    assert run.failed["c"] == "c.json is of other sources"
    assert "d" not in run.failed
    record._show_outcome(run)
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[-3:]] == [["FAILED", f"{n}:"] for n in "abc"]


def test_what_the_machine_lacks_is_left_out_by_name(place: Place) -> None:
    run = record.record([Step("cards", ("cards",), 1, lambda _place: [], lacking=lambda: "a card")], place, again=False)
    assert run.left_out == {"cards": "this machine lacks a card"}
    assert not run.failed


def test_nothing_writes_panels_while_it_is_measured_unless_its_command_says_so(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_MOE_CACHE_PANELS", "on")  # as whoever runs it has it
    shows = [sys.executable, "-c", f"import os; open({str(place.folder / 'said')!r}, 'a').write(os.environ[{PANELS!r}] + ' ')"]
    step = Step("a", (), 1, lambda _place: [[*shows], ["env", f"{PANELS}=auto", *shows]])
    assert not record.record([step], place, again=True).failed
    assert (place.folder / "said").read_text() == "off auto "


def test_a_changed_tree_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(record, "source_commit", lambda: (COMMIT, True))
    monkeypatch.setattr(record, "record", lambda *_arguments, **_options: pytest.fail("it measured"))
    assert record.main([]) == 2
    assert "the tree has changes: commit them first" in capsys.readouterr().err


def test_every_recorded_result_is_made_by_one_step_and_every_step_is_recorded() -> None:
    made = [name for step in STEPS for name in step.results]
    assert sorted(made) == sorted(path.stem for path in (ROOT / "bench/results").glob("*.json"))
    pictures = {picture for step in STEPS for _, picture, _ in step.plots}
    assert pictures == {path.name for path in (ROOT / "bench/results").glob("*.png")}


def test_all_steps_take_less_than_six_and_a_half_hours() -> None:
    assert sum(step.minutes for step in STEPS) < 390


def test_an_unknown_step_is_refused_with_those_there_are() -> None:
    with pytest.raises(SystemExit, match="--only nothing: no such step; there are ipc, experts"):
        record.main(["--only", "ipc,nothing", "--list"])
