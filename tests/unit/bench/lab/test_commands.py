"""`bench.lab doorbell` and `step` as typed: tables, files, exit codes and refused options.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json

import pytest

from bench.lab import device_steps
from bench.lab.__main__ import PROGRAM, build_app
from bench.lab.cli.device import print_doorbell, print_steps
from dflash_moe.bench.harness import Recorder
from dflash_moe.bench.results import BenchResult
from dflash_moe.cli import main


def test_doorbell_prints_a_line_for_every_memory_and_ping_pong_and_writes_them(capsys, tmp_path):
    path = tmp_path / "doorbell.json"
    assert main.run(("doorbell", "--backend", "sim", "--rounds", "3", "--json", str(path)), build=build_app) == 0
    out = capsys.readouterr().out
    assert out.count("sealed segments") == 1 + 2
    assert out.count("yes") == 3 + 5
    assert len(json.loads(path.read_text())["rows"]) == 3 + 5


@pytest.mark.parametrize(("arguments", "text"), [
    (("doorbell", "--backend", "cpu"), "--backend 'cpu' is not allowed; allowed: cuda, hip, sim"),
    (("step", "--backend", "sim", "--tokens", "65"), "--tokens '65': give one or more numbers of 1..64"),
    (("step", "--backend", "sim", "--tokens", "1,x"), "--tokens '1,x': give one or more numbers of 1..64"),
])  # fmt: skip
def test_options_that_are_not_allowed_are_named(capsys, arguments, text):
    assert main.run(arguments, build=build_app) != 0
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(("same_bits", "code"), [(True, 0), (None, 0), (False, 1)])
def test_a_step_of_other_bits_than_staged_calls_fails_the_command(capsys, monkeypatch, same_bits, code):
    def measured(params: device_steps.StepParams, *, recorder: Recorder) -> BenchResult:
        row = dict.fromkeys(("layer_us", "compute_us", "added_p50_us", "added_p99_us", "queue_us", "open_us"), 1.25)
        result = recorder.begin("step", {})
        names = {"name": "n", "worker": "w", "path": "p", "tokens": 1}
        result.rows.append({**row, **names, "mark_us": 8.0, "same_bits": same_bits})
        return result

    monkeypatch.setattr(device_steps, "run_device_steps", measured)
    assert main.run(("step", "--backend", "sim"), build=build_app) == code
    out, err = capsys.readouterr()
    assert ("DIFFER" in out) == (same_bits is False)
    assert ("other bits than staged calls" in err) == (same_bits is False)


def test_what_failed_is_told_below_the_tables(capsys):
    print_doorbell([
        {"name": "register sealed", "memory": "sealed", "passed": False, "error": "not supported (CUDA error 801)"},
        {"name": "thread, m", "memory": "m", "echo": "thread", "rounds": 9, "mark_us": 5.0,
         "passed": False, "error": "no store of the card was seen"},
    ])  # fmt: skip
    print_steps([{"name": "card", "worker": "card", "error": "it does not start"}])
    lines = capsys.readouterr().out.splitlines()
    for line in ("register sealed: not supported (CUDA error 801)", "thread, m: no store of the card was seen"):
        assert line in lines
    assert "card: it does not start" in lines


@pytest.mark.parametrize(("name", "there"), [
    ("attention", "attention"), ("doorbell", "doorbell"), ("step", "step"), ("campaign", "prefill-cards"),
])  # fmt: skip
def test_a_user_of_the_package_is_told_where_the_command_is(capsys, name, there):
    assert main.run(("bench", name, "--json", "x.json")) == main.EXIT_USAGE
    said = f"No such command '{name}': in a checkout of the sources it is `python -m bench.lab {there}`"
    assert capsys.readouterr().err.splitlines()[-1] == said
    assert main.run(("help", there), build=build_app) == 0


def test_help_of_a_command_names_the_program_that_says_more(capsys):
    assert main.run(("step", "--help"), build=build_app, program=PROGRAM) == 0
    assert "`python -m bench.lab help step` says all of each" in " ".join(capsys.readouterr().out.split())
