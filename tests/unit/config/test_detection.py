"""After how many calls the audit finds a worker: the function against counting, and the documents'
table against the function.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dflash_moe.cli.doctor import doctor
from dflash_moe.config.detection import CERTAINTIES, audited_share, calls_until_caught, detections
from dflash_moe.topology import Topology

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "reliability.md"
_ROW = re.compile(r"\| ([0-9.]+) \| ([0-9.]+) \| ([0-9,]+) \| ([0-9,]+) \|")


@pytest.mark.parametrize(("wrong", "audited"), [(1.0, 0.1), (0.02, 0.3), (0.5, 0.5), (0.001, 0.2)])
@pytest.mark.parametrize("certainty", CERTAINTIES)
def test_it_is_the_first_call_by_which_the_chance_is_high_enough(wrong: float, audited: float, certainty: float) -> None:
    unnoticed, count = 1.0, 0
    while 1.0 - unnoticed < certainty:
        unnoticed *= 1.0 - wrong * audited
        count += 1
    assert calls_until_caught(wrong, audited, certainty) == count


def test_where_all_is_wrong_and_audited_the_first_call_tells() -> None:
    assert calls_until_caught(1.0, 1.0, 0.99) == 1


def test_the_share_is_what_the_budget_computes_of_all_rows() -> None:
    assert audited_share(0.002, 100, row_s=0.004) == pytest.approx(0.005)
    assert audited_share(1.0, 10, row_s=0.004) == 1.0
    assert detections(0.0) == []


def test_the_documents_table_is_what_the_function_says() -> None:
    _, _, section = DOCUMENT.read_text(encoding="utf-8").partition("### How long wrong numbers go unnoticed")
    rows = _ROW.findall(section.partition("\n## ")[0])
    assert len(rows) == 9
    for wrong, audited, *calls in rows:
        expected = [calls_until_caught(float(wrong) / 100, float(audited) / 100, certainty) for certainty in CERTAINTIES]
        assert [int(one.replace(",", "")) for one in calls] == expected
    assert len({row[:2] for row in rows}) == 9


def test_doctor_computes_it_for_a_topology(capsys: pytest.CaptureFixture[str]) -> None:
    topology = Topology.parse("version: 1\naudit: {cpu: 2%}\nworkers: [{name: w0}, {name: own, address: loopback}]\n")
    found = doctor.examine(topology)
    assert found["audit"]["workers"] == ["w0"]
    one = found["audit"]["detections"][0]
    assert one["calls"] == tuple(calls_until_caught(1.0, audited_share(0.02, one["rows_per_s"]), at) for at in CERTAINTIES)
    doctor.print_findings(found, has_topology=True)
    printed = capsys.readouterr().out
    assert "audit      w0: 0.02 of a core computes 5 rows a second again, at 4 ms a row" in printed
    assert re.search(r"^ +100 +5% +100% +14 +90$", printed, re.MULTILINE)
    off = doctor.examine(Topology.parse("version: 1\naudit: {cpu: off}\nworkers: [{name: w0}]\n"))
    assert off["audit"]["detections"] == []
    doctor.print_findings(off, has_topology=True)
    assert "audit      off (audit.cpu)" in capsys.readouterr().out
