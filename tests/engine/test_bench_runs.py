"""Benches as users run them: decode, several prompts, timelines, and what an interrupted run leaves
behind.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dflash_moe.bench import read_speed
from dflash_moe.cli.main import run
from dflash_moe.model.make import MakeOptions, make_checkpoint

LAYERS, WORKERS = 2, 2
ROOT = Path(__file__).resolve().parents[2]
# `bench` as a process whose read speeds are of small buffers. Those of a whole run are eight times
# the last cache, and 2 GB where that has 300 MB, read anew by every thread in every round.
PROCESS = (
    "import sys; from dflash_moe.bench import read_speed; read_speed.CACHES = 0; "
    "from dflash_moe.cli.main import main; sys.exit(main())"
)


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    """Benches that run in this process measure read speeds with small buffers too."""
    monkeypatch.setattr(read_speed, "CACHES", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_checkpoint(MakeOptions("qwen3_moe", LAYERS, 64, 8, 2, 32, "bf16", 0), directory)
    return directory


@pytest.fixture
def two_workers(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(
        "version: 1\nfailure: {restart: off}\n"
        "workers: [{name: w0, backend: cpu, threads: 1}, {name: w1, backend: cpu, threads: 1}]\n"
    )
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", PROCESS, "bench", *map(str, arguments)]


def bench(*arguments: object) -> None:
    assert run(["bench", *map(str, arguments)]) == 0


def test_decode_keeps_every_token_and_counts_one_call_per_worker_and_layer(model, two_workers, tmp_path):
    out, picture = tmp_path / "d.json", tmp_path / "d.png"
    tokens, rounds = 6, 2
    bench(
        "decode", "--model", model, "--topology", two_workers, "--new-tokens", tokens, "--repeat", rounds,
        "--dtypes", "bf16,f32", "--modes", "batched,auto", "--json", out, "--plot", picture,
    )  # fmt: skip
    result = json.loads(out.read_text())
    assert (result["case"], result["complete"], result["interleaved"]) == ("decode", True, True)
    assert [(row["name"], row["dtype"]) for row in result["rows"]] == [
        (mode, dtype) for dtype in ("bf16", "f32") for mode in ("batched", "auto", "local")
    ]
    for row in result["rows"]:
        assert len(row["samples_s"]) == tokens * rounds
        assert row["samples_per_round"] == tokens
        # The file has four digits of a sample.
        assert row["p50_s"] <= row["p95_s"] <= row["p99_s"] <= max(row["samples_s"]) * 1.001
        assert 0 < row["calls_per_token"] <= LAYERS * (1 if row["name"] == "local" else WORKERS)
        assert 0 < row["floor_bytes_per_token"] < row["request_bytes_per_token"] + row["reply_bytes_per_token"]
        sides = ["host"] if row["name"] == "local" else ["host", "w0", "w1"]
        assert [part["side"] for part in row["reads"]] == sides
        assert row["read_bytes_per_token"] == sum(part["bytes_per_token"] for part in row["reads"])
        seconds = sum(part["bytes_per_token"] / part["read_bytes_per_s"] for part in row["reads"])
        assert row["share_of_read"] == pytest.approx(seconds / row["p50_s"])
    by_name = {(row["name"], row["dtype"]): row for row in result["rows"]}
    # Whoever computes them, one token reads the same weights, keys and values.
    assert len({row["read_bytes_per_token"] for row in result["rows"] if row["dtype"] == "bf16"}) == 1
    for dtype in ("bf16", "f32"):
        assert by_name["batched", dtype]["tokens_digests"] == by_name["auto", dtype]["tokens_digests"]
    assert result["params"]["oversubscribed"] is (result["params"]["cores_usable"] < WORKERS + 1)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_prefill_of_several_prompts_summarises_auto_and_draws_timelines(model, two_workers, tmp_path, capsys):
    out, picture = tmp_path / "p.json", tmp_path / "p.svg"
    bench(
        "prefill", "--model", model, "--topology", two_workers, "--prompt-tokens", "16,1100", "--new-tokens", 1, "--repeat", 3,
        "--stream-repeat", 1, "--timeline", "--no-local", "--json", out, "--plot", picture,
    )  # fmt: skip
    result = json.loads(out.read_text())
    counts = {(row["name"], row["prompt_tokens"]): len(row["samples_s"]) for row in result["rows"]}
    assert counts == {
        ("stream", 16): 3, ("batched", 16): 3, ("auto", 16): 3, ("stream", 1100): 1, ("batched", 1100): 3, ("auto", 1100): 3,
    }  # fmt: skip
    assert [(entry["prompt_tokens"], entry["same_bits"]) for entry in result["summary"]] == [(16, True), (1100, True)]
    auto = next(row for row in result["rows"] if row["name"] == "auto")
    assert set(auto["auto"]) == {"w0", "w1"}
    assert [one["mode"] for one in result["timelines"]] == ["stream", "batched", "auto"]
    batched = result["timelines"][1]
    assert batched["prompt_tokens"] == 1100
    assert {one["worker"] for one in batched["slices"]} == {"w0", "w1"}
    for one in batched["slices"]:
        order = ("encode_start_ns", "published_ns", "worker_received_ns", "worker_started_ns", "worker_finished_ns",
                 "arrived_ns", "combined_ns")  # fmt: skip
        assert [one[key] for key in order] == sorted(one[key] for key in order)
    assert picture.is_file()
    assert (tmp_path / "p_timeline.svg").is_file()
    assert "its time / auto's" in capsys.readouterr().out


@pytest.fixture
def long_bench(model, two_workers, tmp_path):
    """A decode bench that would run for hours, past its first kept round; yields (process, result
    file).
    """
    out = tmp_path / "long.json"
    arguments = command(
        "decode", "--model", model, "--topology", two_workers, "--repeat", 100_000, "--new-tokens", 2, "--modes", "batched",
        "--no-local", "--json", out,
    )  # fmt: skip
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "round 3 of" in line:
                break
        yield running, out
        if running.poll() is None:
            running.kill()


def partial(out: Path) -> dict:
    result = json.loads(out.read_text())
    assert result["complete"] is False
    assert len(result["rows"][0]["samples_s"]) >= 4  # two rounds of two tokens
    return result


@pytest.mark.parametrize(
    ("number", "code", "cause"),
    [(signal.SIGTERM, 143, "SIGTERM"), pytest.param(signal.SIGINT, 130, "Ctrl-C", marks=pytest.mark.long)],
)
def test_a_signal_keeps_the_rounds_and_says_where(long_bench, number, code, cause):
    running, out = long_bench
    running.send_signal(number)
    text, errors = running.communicate(timeout=200)
    assert running.returncode == code, errors
    assert partial(out)["ended_by"] == cause
    assert str(out) in errors
    assert "Traceback" not in errors
    assert "batched" in text  # the table of what there is


def test_a_lost_worker_keeps_the_rounds_and_the_exit_code(long_bench):
    running, out = long_bench
    children = [pid for task in Path(f"/proc/{running.pid}/task").glob("*/children") for pid in task.read_text().split()]
    worker = next(pid for pid in children if b"worker" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(int(worker), signal.SIGKILL)
    _, errors = running.communicate(timeout=200)
    assert running.returncode == 3, errors
    assert partial(out)["ended_by"] == "WorkerLost"
    assert "worker w" in errors.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prefill", "--prompt-tokens", "64,x"], "--prompt-tokens '64,x'"),
        (["prefill", "--prompt-tokens", "0"], "1..1048576"),
        (["prefill", "--plot", "out.gif"], ".png or .svg"),
        (["decode", "--modes", "fast"], "'fast' is not allowed"),
        (["decode", "--mode", "stream"], "bench decode measures lists"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(model, tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert run(["bench", *arguments, "--model", str(model)]) == 2
    shown, error = capsys.readouterr()
    assert shown == ""
    assert said in error.strip().splitlines()[-1]


def test_a_topology_that_does_not_fit_is_told_before_the_work(model, tmp_path, capsys):
    crowded = tmp_path / "crowded.yaml"
    crowded.write_text("version: 1\nworkers: [{name: w0, backend: cpu, threads: 900}]\n")
    absent = tmp_path / "absent.yaml"
    absent.write_text(
        "version: 1\nipc: {start_timeout_s: 1}\n"
        "workers: [{name: far, backend: cpu, address: 'unix:///nonexistent/worker.sock'}]\n"
    )
    code = run(["bench", "decode", "--model", str(model), "--topology", str(absent), "--json", str(tmp_path / "x.json")])
    assert code != 0
    assert "far" in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "x.json").exists()

    from dflash_moe.bench.harness import Recorder
    from dflash_moe.bench.model_host import describe_topology
    from dflash_moe.topology import Topology

    said: list[str] = []

    class Said:
        def say(self, line):
            said.append(line)

        def advance(self, done, total, label): ...

        def loading(self, holder, count, total): ...

    params = describe_topology(Topology.load(crowded), {}, Recorder(None, Said()))
    assert params["oversubscribed"] is True
    assert "901 threads" in said[0]


@pytest.mark.long
def test_the_campaign_of_the_modes_runs_a_setting(model, tmp_path):
    done = subprocess.run(
        [
            sys.executable, "-m", "bench.campaigns.modes", "--model", str(model), "--rounds", "1",
            "--stream-rounds", "1", "--prompt-tokens", "8,80", "--settings", "slow_link", "--out", str(tmp_path),
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1 settings, 1 rounds: about" in done.stdout
    assert "slow_link: 80 tokens:" in done.stdout
    assert json.loads((tmp_path / "modes_slow_link.json").read_text())["params"]["workers"][1]["emulate"]["mbit_s"] == 200
    assert (tmp_path / "modes_slow_link_timeline.png").is_file()


def test_overlap_measures_whole_calls_against_auto():
    from bench.lab.overlap import OverlapParams, run_overlap

    params = OverlapParams(64, hidden_size=64, moe_intermediate_size=32, num_experts=4, top_k=2, repeat=2, mbit_s=100)
    result = run_overlap(params)
    whole, auto = result.rows
    assert (whole["name"], auto["name"], whole["num_slices"]) == ("one_slice", "auto", 1)
    assert len(whole["samples_s"]) == len(auto["samples_s"]) == 2 * whole["samples_per_round"]
    # 64 rows of 64 bf16 elements are 8 KiB; 100 Mbit/s carry them in 0.66 ms.
    assert whole["send_s"] >= 0.0006
    assert result.summary[0]["ideal_s"] == max(whole["send_s"], whole["compute_s"], whole["receive_s"])
