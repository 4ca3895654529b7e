"""`dflash-moe simulate`: replay, summary, and planted bugs that it must find.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.campaigns.planted_bugs import BUGS, ROOT, find, plant
from dflash_moe import _simulation
from dflash_moe.cli import main, simulate
from dflash_moe.cli.simulate import SimulatedMembers

BUILD = ROOT / "build" / "core"
# It is found by one of the first seeds.
PLANTED = ("slot_reused_early", "scattered_to_the_first")


def test_a_seed_replays_its_events(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["simulate", "--seed", "3", "--seconds", "2"]) == 0
    first = capsys.readouterr().out
    assert main.run(["simulate", "--seed", "3", "--seconds", "2"]) == 0
    assert capsys.readouterr().out == first
    assert "the last 200 events before the end" in first
    assert f"event hash {_simulation.simulate(3, 2.0, SimulatedMembers).event_hash:016x}" in first


def test_the_summary_adds_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "summary.json"
    assert main.run(["simulate", "--seeds", "4", "--seconds", "2", "--json", str(out)]) == 0
    assert "no rule was broken" in capsys.readouterr().out
    row = json.loads(out.read_text(encoding="utf-8"))["rows"][0]
    reports = [_simulation.simulate(seed, 2.0, SimulatedMembers) for seed in (1, 2, 3, 4)]
    assert {report.num_hosts for report in reports} == {1, 2}
    assert row["calls"] == sum(report.num_calls for report in reports)
    assert row["succeeded"] + row["abandoned"] + sum(row["failed"].values()) == row["calls"]
    assert sum(row["faults"].values()) == sum(sum(report.faults.values()) for report in reports)
    assert row["failing"] == {}
    with_two = [report for report in reports if report.num_hosts == 2]
    assert row["two_hosts"]["virtual_hours"] == pytest.approx(sum(report.virtual_s for report in with_two) / 3600)
    assert row["two_hosts"]["batches"] == sum(report.num_batches for report in with_two)


def test_hours_are_virtual() -> None:
    assert main.run(["simulate", "--hours", "0.002", "--seconds", "1"]) == 0


def test_a_violation_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = simulate._simulate_one

    def broken(seed: int, seconds: float) -> tuple[object, float]:
        report, cpu_s = real(seed, seconds)
        told = {name: getattr(report, name) for name in dir(report) if not name.startswith("_")}
        return SimpleNamespace(**(told | {"violations": ["at 5 ns: a rule"]})), cpu_s

    monkeypatch.setattr(simulate, "_simulate_one", broken)
    assert main.run(["simulate", "--seeds", "1", "--first", "9", "--seconds", "1"]) == 1
    assert "replay it: dflash-moe simulate --seed 9 --seconds 1" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--seed", "1", "--seeds", "2"], ["--seeds", "1", "--hours", "1"]])
def test_contradicting_flags_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["simulate", *arguments]) == 2
    assert "--seeds" in capsys.readouterr().err


@pytest.mark.skipif(not (BUILD / "compile_commands.json").is_file(), reason="needs build/core, which `make` leaves")
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str, tmp_path: Path) -> None:
    finding = find(BUGS[name], BUILD, tmp_path, num_seeds=40)
    assert finding.seed is not None, finding.shown


def test_every_planted_bug_still_fits_its_source() -> None:
    for bug in BUGS.values():
        assert (ROOT / bug.source).read_text(encoding="utf-8").count(bug.good) == 1, bug.name


def test_a_bug_without_its_passage_is_refused(tmp_path: Path) -> None:
    bug = next(iter(BUGS.values()))
    with pytest.raises(ValueError, match="0 times"):
        plant(type(bug)(bug.name, bug.what, bug.source, "no such passage", ""), BUILD, tmp_path)
