"""When a program that computes the experts by itself is noticed, and when nothing is said.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from dflash_moe.cli.llama_proof import DIAL_S, LOADING_S, QUIET_S, LocalityProof, OpenFiles, Sighting

PLANNED = ["a", "b"]
ALL = {"a": "", "b": ""}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def seen(
    *, is_mapped: bool = True, is_open: bool = False, is_connected: bool = True, reasons: dict | None = None, calls: int = 0
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


def test_kept_tensor_is_noticed_at_once_unless_excluded_or_allowed():
    sighting = seen(reasons={"a": "", "b": "no kernel"})
    assert "the first is b: no kernel" in proof().judge(sighting)
    assert proof(excluded=("b",)).judge(sighting) == ""
    assert proof(may_be_local=True).judge(sighting) == ""


def test_calls_end_the_loading():
    partly = {"a": ""}
    assert proof().judge(seen(reasons=partly)) == ""
    assert "the first is b" in proof().judge(seen(reasons=partly, calls=1))
    assert proof().judge(seen(reasons=ALL, calls=1)) == ""
    assert proof(excluded=("b",)).judge(seen(reasons=partly, calls=1)) == ""
    # A program of the C interface loads no model and reports no tensors.
    assert proof().judge(seen(is_mapped=False, calls=1)) == ""


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
