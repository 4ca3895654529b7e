"""Two sides: what each process gets, in which order they run, what a row tells of its own side, and
what is refused before a process is started. A script stands in for the process of a sample.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import sys

import pytest

from dflash_moe.bench.harness import Recorder
from dflash_moe.bench.remote import RemoteParams, make_sides, read_variables, run_remote
from dflash_moe.cli import main
from dflash_moe.errors import ConfigError, DflashError

FAR = "version: 1\nworkers:\n  - {name: far, threads: 1, address: 'tcp://node7.example:7171'}\n"
SCRIPT = """#!{python}
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps({{"side": os.environ.get("SIDE"), "shared": os.environ.get("SHARED"), "argv": sys.argv[1:]}}) + "\\n")
if os.environ.get("FAIL"):
    sys.exit("worker far at tcp://node7.example:7171 is lost")
seconds = 0.5 if os.environ.get("SIDE") == "patch" else 1.0
print(os.environ.get("SAY") or json.dumps({{"rows": [{{"name": "auto", "median_s": seconds, "calls": 7, "dtype": "f32"}}]}}))
"""


@pytest.fixture
def params(tmp_path, monkeypatch):
    (tmp_path / "far.yaml").write_text(FAR)
    child = tmp_path / "python"
    child.write_text(SCRIPT.format(python=sys.executable, log=str(tmp_path / "log")))
    child.chmod(0o700)
    monkeypatch.setattr("dflash_moe.bench.remote.sys.executable", str(child))
    monkeypatch.setattr("dflash_moe.bench.remote.CHILD_S", 100.0)
    model = tmp_path / "model"
    model.mkdir()
    return RemoteParams(model, tmp_path / "far.yaml", repeat=5, prompt_tokens=8)


def log(params):
    return [json.loads(line) for line in (params.topology.parent / "log").read_text().splitlines()]


def sides_of(params, *, both=None, base=None, patch=None, is_redacted=False):
    return make_sides(params, both or {}, base or {"SIDE": "base"}, patch or {"SIDE": "patch"}, is_redacted=is_redacted)


def test_each_process_has_the_variables_of_its_side_and_rounds_alternate(params):
    before = dict(os.environ)
    result = run_remote(params, sides_of(params, both={"SHARED": "1"}), recorder=Recorder())
    assert dict(os.environ) == before
    ran = log(params)
    # A round that does not count, and five that do, each in the other order than the last one.
    assert [one["side"] for one in ran] == ["base", "patch", "patch", "base"] * 3
    assert {one["shared"] for one in ran} == {"1"}
    flat = ran[0]["argv"]
    assert flat[flat.index("bench") :] == [
        "bench", "decode", "--model", str(params.model), "--topology", str(params.topology), "--modes", "auto",
        "--prompt-tokens", "8", "--no-local", "--repeat", "1", "--json", "-",
    ]  # fmt: skip
    base, patch = result.rows
    assert (base["name"], base["samples_s"], base["calls"]) == ("base", [1.0] * 5, 7)
    assert (patch["name"], patch["samples_s"]) == ("patch", [0.5] * 5)
    assert result.complete


def test_a_row_tells_the_environment_of_its_own_side_alone(params, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NOT_TOLD", "x")
    sides = sides_of(
        params, both={"SHARED": "1", "A": "both"}, base={"B": "base"}, patch={"A": "patch", "OMP_NUM_THREADS": "1"}
    )
    result = run_remote(params, sides, recorder=Recorder(), is_dry=True)
    watched = ("A", "B", "SHARED", "OMP_NUM_THREADS", "NOT_TOLD")
    told = [{name: value for name, value in row["environment"].items() if name in watched} for row in result.rows]
    assert told == [
        {"A": "both", "B": "base", "SHARED": "1", "OMP_NUM_THREADS": "3"},
        {"A": "patch", "SHARED": "1", "OMP_NUM_THREADS": "1"},
    ]
    assert not (params.topology.parent / "log").exists()


def test_a_redacted_result_names_no_place(params, tmp_path):
    sides = sides_of(params, patch={"WHERE": "tcp://node7.example:7171", "API_KEY": "abc"}, is_redacted=True)
    found = json.dumps(run_remote(params, sides, recorder=Recorder(), is_dry=True).as_json())
    for secret in (str(tmp_path), "node7", "abc"):
        assert secret not in found
    assert '"WHERE": "tcp://<host>"' in found


@pytest.mark.parametrize("is_redacted", [False, True])
def test_a_process_that_fails_is_quoted(params, is_redacted):
    sides = sides_of(params, patch={"SIDE": "patch", "FAIL": "1"}, is_redacted=is_redacted)
    with pytest.raises(DflashError) as raised:
        run_remote(params, sides, recorder=Recorder())
    where = "tcp://<host>" if is_redacted else "tcp://node7.example:7171"
    assert str(raised.value) == f"side patch: bench decode ended with code 1: worker far at {where} is lost"


@pytest.mark.parametrize("said", ["x", "[]", '{"rows": []}', '{"rows": [{"median_s": 0}]}', '{"rows": [{"median_s": "a"}]}'])
def test_what_is_no_result_is_said_so(params, said):
    with pytest.raises(DflashError, match="side base: its process printed no result"):
        run_remote(params, sides_of(params, both={"SAY": said}), recorder=Recorder())


def test_workers_that_a_host_would_start_are_refused(params):
    params.topology.write_text("version: 1\nworkers:\n  - {name: near, threads: 1}\n")
    with pytest.raises(ConfigError, match="worker near .* would inherit the environment of a side"):
        sides_of(params)
    params.topology.write_text(FAR + "  - {name: own, address: loopback}\n")
    assert len(sides_of(params)) == 2


@pytest.mark.parametrize("pair", ["", "A", "=x", "1A=x", "A B=x", "A=x\0", "Ä=x"])
def test_what_is_no_variable_is_refused_by_its_flag(pair):
    with pytest.raises(ConfigError, match="--patch-env .*NAME=VALUE"):
        read_variables([pair], "--patch-env")


def test_values_may_be_empty_or_have_signs_and_none_is_given_twice():
    assert read_variables(["A=", "B=x=y z"], "--env") == {"A": "", "B": "x=y z"}
    with pytest.raises(ConfigError, match="--env A: it is given twice"):
        read_variables(["A=1", "A=2"], "--env")


def test_equal_sides_and_misspelt_settings_are_refused(params):
    with pytest.raises(ConfigError, match="base and patch have the same environment"):
        sides_of(params, base={"A": "1"}, patch={"A": "1"})
    with pytest.raises(ConfigError, match="DFLASH_MOE_EXPERT_COMPUTE_THREDS is not a setting"):
        sides_of(params, patch={"DFLASH_MOE_EXPERT_COMPUTE_THREDS": "1"})


def test_the_command_plans_measures_and_judges(params, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("dflash_moe.cli.bench.remote.options.model_directory", lambda _: params.model)
    words = ["bench", "remote", "-m", "demo", "--topology", str(params.topology), "--base-env", "SIDE=base"]
    words += ["--patch-env", "SIDE=patch", "--repeat", "5"]
    assert main.run([*words, "--dry-run", "--redact", "--json", str(tmp_path / "plan.json")]) == 0
    assert "dflash-moe bench decode --model '<path>'" in capsys.readouterr().out
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert [row["environment"]["SIDE"] for row in plan["rows"]] == ["base", "patch"]
    assert plan["params"]["is_dry"]
    assert main.run([*words, "--json", str(tmp_path / "found.json")]) == 0
    shown = capsys.readouterr().out
    assert "faster" in shown
    assert "takes 50.0% of the time over 5 rounds" in shown
    assert main.run(["bench", "compare", str(tmp_path / "found.json"), "--rows", "base", "patch"]) == 0
    assert "faster" in capsys.readouterr().out
