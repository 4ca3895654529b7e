"""`bench.lab doorbell` on the simulated card: every memory and echo; what fails is a row, and the
others are tried.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest

from bench.lab.bell_echo import EchoProcess
from bench.lab.doorbell import OPEN, PAIRS, PINNED, SEALED, DoorbellParams, run_doorbell
from dflash_moe import _measure
from dflash_moe.bench.harness import Recorder
from dflash_moe.errors import UnsupportedError

ROUNDS = 5


def by_name(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {tuple(row.get(key) for key in ("memory", "echo")): row for row in rows}


def test_every_memory_is_registered_and_every_echo_is_answered_in_every_round(tmp_path):
    result = run_doorbell(DoorbellParams("sim", rounds=ROUNDS), recorder=Recorder(tmp_path / "out.json"))
    rows = by_name(result.rows)
    assert set(rows) == {(memory, None) for memory in (SEALED, OPEN, PINNED)} | set(PAIRS)
    for row in result.rows:
        assert row["passed"], row
    for pair in PAIRS:
        row = rows[pair]
        assert (row["answered"], row["seen"], len(row["samples_s"])) == (ROUNDS, ROUNDS, ROUNDS - 1)
        assert 0 < row["min_us"] <= row["p50_us"] <= row["p99_us"]
        assert row["mark_us"] is None, "no mark is for a simulated card"
    assert rows[SEALED, None]["bytes"] > rows[PINNED, None]["bytes"]
    stored = json.loads((tmp_path / "out.json").read_text())
    assert stored["complete"]
    assert stored["params"]["device_name"].startswith("sim-cuda 0")


class Silent:
    """An echo that never answers."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def begin(self, first: int) -> None:
        pass

    def seen(self) -> list[int]:
        return []


def test_a_card_that_nobody_answers_gives_up_within_its_budget_and_the_next_ones_are_tried(monkeypatch):
    monkeypatch.setattr("bench.lab.doorbell.EchoThread", Silent)
    monkeypatch.setattr("bench.lab.doorbell.PAIRS", pairs := [pair for pair in PAIRS if pair[1] != "process"])
    rows = by_name(run_doorbell(DoorbellParams("sim", rounds=ROUNDS, budget_s=0.05)).rows)
    for pair in pairs:
        assert not rows[pair]["passed"], rows[pair]
        assert rows[pair]["error"] == "no store of the card was seen by the processor within 0.05 s"


def test_memory_that_the_driver_refuses_is_a_row_with_its_words(monkeypatch):
    class Choosy:
        """Of a driver that maps no read-only memory."""

        pinned = _measure.BellMemory.pinned

        @staticmethod
        def of_segments(*, is_open: bool, slot_bytes: int) -> Any:
            return _measure.BellMemory.of_segments(is_open=is_open, slot_bytes=slot_bytes) if is_open else Refused()

    class Refused:
        def map(self, device: _measure.BellDevice) -> int:
            raise UnsupportedError("registering 4096 bytes of the host's memory to be read failed: not supported")

        def unmap(self, device: _measure.BellDevice) -> None:
            pass

    class Measure:
        BellMemory = Choosy
        BellDevice = _measure.BellDevice

    monkeypatch.setattr("bench.lab.doorbell._measure", Measure)
    rows = by_name(run_doorbell(DoorbellParams("sim", rounds=ROUNDS)).rows)
    for (memory, _), row in rows.items():
        assert row["passed"] == (memory != SEALED)
        if memory == SEALED:
            assert "not supported" in row["error"]


def test_an_echo_process_ends_with_its_block_although_nobody_rang():
    memory = _measure.BellMemory.of_segments(is_open=False, slot_bytes=4096)
    with EchoProcess.forked(memory, rounds=ROUNDS, timeout_s=60.0) as echo:
        pid = echo.pid
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_echo_process_that_is_stuck_costs_no_more_than_the_limit(monkeypatch):
    monkeypatch.setattr("bench.lab.bell_echo.JOIN_S", 0.05)
    memory = _measure.BellMemory.of_segments(is_open=False, slot_bytes=4096)
    with EchoProcess.forked(memory, rounds=ROUNDS, timeout_s=60.0) as echo:
        echo.begin(1)  # nobody rings, so it would answer a minute later
        began = time.monotonic()
        assert echo.seen() == []
        assert time.monotonic() - began < 50.0  # less than the echo's own minute
