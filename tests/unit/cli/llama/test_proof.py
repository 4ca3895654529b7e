"""When a program that computes the experts by itself is noticed, and when nothing is said.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_moe.cli.llama.llama import program_threads, summary
from dflash_moe.cli.llama.proof import DIAL_S, KEPT_S, LOADING_S, QUIET_S, LocalityProof, OpenFiles, Sighting
from dflash_moe.protocol.handover import Counted
from dflash_moe.telemetry import machine

PLANNED = ["a", "b"]
ALL = {"a": "", "b": ""}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def seen(
    *,
    is_mapped: bool = True,
    is_open: bool = False,
    is_connected: bool = True,
    reasons: dict | None = None,
    calls: int = 0,
) -> Sighting:
    return Sighting(is_mapped, is_open, is_connected, reasons or {}, calls)


def proof(clock: Clock | None = None, excluded: tuple[str, ...] = (), *, may_be_local: bool = False) -> LocalityProof:
    return LocalityProof(PLANNED, excluded, may_be_local=may_be_local, clock=clock or Clock())


@pytest.mark.parametrize("how", ["is_mapped", "is_open"])
def test_model_without_a_client_is_noticed_after_a_while(how):
    clock = Clock()
    judge = proof(clock)
    sighting = seen(**{"is_mapped": False, how: True}, is_connected=False)
    assert judge.judge(sighting) == ""
    clock.now += DIAL_S - 0.1
    assert judge.judge(sighting) == ""
    assert judge.judge(seen()) == ""
    clock.now += 0.2
    assert "has not asked for the workers" in judge.judge(sighting)


def test_program_that_loads_no_model_may_take_its_time():
    clock = Clock()
    judge = proof(clock)
    clock.now += 100 * DIAL_S
    assert judge.judge(seen(is_mapped=False, is_connected=False)) == ""


def test_kept_tensor_is_noticed_unless_excluded_or_allowed():
    sighting = seen(reasons={"a": "", "b": "no kernel"})
    computing = seen(reasons={"a": "", "b": "no kernel"}, calls=1)
    assert "the first is b: no kernel" in proof().judge(computing)
    assert "the first is b: no kernel" in proof().judge_end(sighting)
    for judge in (proof(excluded=("b",)), proof(may_be_local=True)):
        assert judge.judge(computing) == judge.judge_end(sighting) == ""


def test_model_that_comes_second_has_time_to_load():
    clock = Clock()
    judge = proof(clock)
    draft = seen(reasons={"a": "another type", "b": "another type"})
    assert judge.judge(draft) == ""
    clock.now += KEPT_S - 0.1
    assert judge.judge(draft) == ""
    assert judge.judge(seen(reasons=ALL, calls=1)) == ""
    clock.now += 0.2
    assert "the first is a: another type" in judge.judge(draft)


def test_calls_end_the_loading():
    partly = {"a": ""}
    assert proof().judge(seen(reasons=partly)) == ""
    assert "the first is b" in proof().judge(seen(reasons=partly, calls=1))
    assert proof().judge(seen(reasons=ALL, calls=1)) == ""
    assert proof(excluded=("b",)).judge(seen(reasons=partly, calls=1)) == ""
    # A program of the C interface loads no model and reports no tensors.
    assert proof().judge(seen(is_mapped=False, calls=1)) == ""


def test_proof_is_settled_when_all_was_seen():
    judge = proof()
    judge.judge(seen(reasons={"a": ""}))
    assert not judge.is_settled
    judge.judge(seen(reasons=ALL))
    assert judge.is_settled
    only_a = proof(excluded=("b",))
    only_a.judge(seen(reasons={"a": ""}))
    assert only_a.is_settled


@pytest.mark.parametrize(("stated", "cores", "expected"), [(None, 16, 12), (None, 4, 1), (3, 4, 3)])
def test_program_gets_the_cores_that_workers_leave(monkeypatch, stated, cores, expected):
    for name in ("physical_cores", "usable_cores"):
        monkeypatch.setattr(machine, name, lambda: cores)
    plan = SimpleNamespace(
        topology=SimpleNamespace(host=SimpleNamespace(threads=stated)),
        threads=SimpleNamespace(workers={"w0": 2, "w1": 2}),
    )
    assert program_threads(plan) == expected


def test_summary_says_what_was_moved():
    counted = Counted(
        calls=3, failed_calls=1, messages=3, rows=9, request_bytes=1024, reply_bytes=1024, floor_bytes=2000,
        call_ns=1_500_000_000, compute_ns=1_000_000_000,
    )  # fmt: skip
    assert summary(counted) == (
        "dflash-moe: 3 calls (1 failed), 2.0 KiB moved, 1.024 of the floor, 1.50 s in experts, 1.00 s of it computed by workers"
    )


def test_load_takes_its_time_after_a_draft_that_keeps_its_own():
    clock = Clock()
    judge = proof(clock)
    draft = {"a": "another type", "b": "another type"}
    for _ in range(10):
        assert judge.judge(seen(reasons=draft, is_open=True)) == ""
        # What the program has open still tells something.
        assert not judge.is_settled
        clock.now += KEPT_S
    assert judge.judge(seen(reasons=ALL, is_open=True)) == ""
    assert judge.is_settled
    judge = proof(clock)
    assert judge.judge(seen(reasons=draft, is_open=True)) == ""
    clock.now += KEPT_S - 0.1
    assert judge.judge(seen(reasons=draft)) == ""
    clock.now += 0.2
    assert "the first is a: another type" in judge.judge(seen(reasons=draft))


def test_slow_disk_gets_a_line_and_not_an_end():
    clock = Clock()
    judge = proof(clock)
    assert judge.judge(seen()) == judge.warn(seen()) == ""
    clock.now += QUIET_S
    assert judge.judge(seen()) == ""
    assert "has not loaded a tensor" in judge.warn(seen())
    assert judge.warn(seen()) == ""
    assert judge.judge(seen(reasons=ALL, calls=3)) == ""


@pytest.mark.parametrize(
    ("sighting", "is_wrong"),
    [
        (seen(), True),
        (seen(reasons={"a": ""}), True),
        # A server that was never asked anything.
        (seen(reasons=ALL), False),
        (seen(calls=1, reasons=ALL), False),
        (seen(is_mapped=False), False),
    ],
)
def test_run_that_computed_must_have_called(sighting, is_wrong):
    judge = proof()
    judge.judge(sighting)
    assert bool(judge.judge_end(sighting)) == is_wrong
    assert proof(may_be_local=True).judge_end(sighting) == ""


def test_look_at_a_header_is_no_load():
    clock = Clock()
    judge = proof(clock)
    sighting = seen(is_mapped=False, is_open=True)
    judge.judge(sighting)
    assert judge.judge_end(sighting) == ""
    clock.now += LOADING_S
    judge.judge(sighting)
    assert judge.judge_end(sighting) != ""


def test_open_and_mapped_files_are_seen(tmp_path: Path):
    path = tmp_path / "a model.gguf"
    path.write_bytes(b"x" * 4096)
    files = OpenFiles([path])
    assert files.look(os.getpid()) == (False, False)
    with path.open("rb") as file:
        assert files.look(os.getpid()) == (False, True)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
            assert files.look(os.getpid())[0]
    assert files.look(os.getpid()) == (False, False)


def test_process_that_is_gone_has_no_files(tmp_path: Path):
    (tmp_path / "x").touch()
    assert OpenFiles([tmp_path / "x"]).look(1 << 30) == (False, False)
