"""The commands a user types: demo and generate as processes, and within this one all for which a
process of their own would only import torch again.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dflash_moe.cli import demo
from dflash_moe.cli.main import run
from tests.host_models import checkpoint

MODEL = Path(__file__).parents[2] / "bench" / "demo_model" / "dflash_moe_demo" / "model"
LAYERS, WORKERS = 4, 2
PROMPT = "The following functions read and write a file; each of them returns a list of the"
TWO_WORKERS = "version: 1\nworkers:\n  - {name: w0, backend: cpu, threads: 1}\n  - {name: w1, backend: cpu, threads: 1}\n"


# Two rounds of the demo's five compare as many bits.
DEMO = "import sys; from dflash_moe.cli import demo, main; demo.ROUNDS = 2; sys.exit(main.main())"


def process(*command: object) -> subprocess.CompletedProcess[str]:
    """What came of a Python process that had to succeed."""
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def two_workers(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(TWO_WORKERS)
    return path


@pytest.mark.timeout(300)
def test_demo_completes_a_sentence_and_proves_equal_bits():
    done = process("-c", DEMO, "demo")
    assert "completion:" in done.stdout
    assert "Every mode gave the same bits" in done.stdout
    near, far = (done.stdout.index(f"\n{place}\n") for place in (demo.NEAR, demo.FAR))
    assert near < far
    for table in (done.stdout[near:far], done.stdout[far:]):
        rows = [line.split() for line in table.splitlines() if line.startswith(("stream", "batched", "auto"))]
        assert [(mode, dtype) for mode, dtype, *_ in rows] == [(m, d) for d in demo.DTYPES for m in demo.MODES]
        calls, mib_out = ({(row[0], row[1]): float(row[at].replace(",", "")) for row in rows} for at in (4, 5))
        assert calls["batched", "f32"] * 100 < calls["stream", "f32"], "whole chunks are few calls"
        assert mib_out["batched", "bf16"] < 0.52 * mib_out["batched", "f32"], "bf16 halves the bytes"


def generate(topology: Path, out: Path, mode: str) -> list[str]:
    """The command that completes the prompt in a mode."""
    return [
        "generate", "--model", str(MODEL), "--topology", str(topology), "--prompt", PROMPT, "--max-tokens", "5",
        "--json", str(out), "--mode", mode,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def batched(tmp_path_factory):
    """(stdout, report) of one `generate` in mode batched, a process as a user starts it."""
    place = tmp_path_factory.mktemp("batched")
    (place / "two.yaml").write_text(TWO_WORKERS)
    done = process("-m", "dflash_moe", *generate(place / "two.yaml", place / "out.json", "batched"))
    return done.stdout, json.loads((place / "out.json").read_text())


def test_generate_writes_text_and_counts_what_it_moved(batched):
    text, report = batched
    assert report["text"] in text
    assert len(report["token_ids"]) == 5
    # One request per active worker, layer and forward pass: a prefill and four decode steps.
    assert LAYERS * 5 <= report["calls"] <= LAYERS * 5 * WORKERS
    moved = report["request_bytes"] + report["reply_bytes"]
    # Two frame headers, the reply's times and the padding of the index part: at most 255 bytes a
    # call over the floor.
    assert report["floor_bytes"] < moved <= report["floor_bytes"] + 255 * report["calls"]
    assert report["ttft_s"] > 0
    assert len(report["tpot_samples_s"]) == 4


def test_generate_gives_the_same_tokens_in_every_mode(batched, two_workers, tmp_path):
    assert run(generate(two_workers, tmp_path / "stream.json", "stream")) == 0
    stream = json.loads((tmp_path / "stream.json").read_text())
    assert stream["token_ids"] == batched[1]["token_ids"]
    assert stream["calls"] > batched[1]["calls"]


def test_generate_ends_with_a_sentence_of_speed_and_bytes(two_workers, capsys):
    arguments = ["generate", "--model", str(MODEL), "--topology", str(two_workers), "--prompt", PROMPT]
    assert run([*arguments, "--max-tokens", "5", "--transport", "shared"]) == 0
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.fullmatch(
        r"5 tokens, [\d.]+ tokens/s after the first, time to first token [\d.]+ s; 2 workers over shared, mode auto; "
        r"[\d.]+ KiB moved, 1\.\d{4} times the floor",
        said,
    ), said


def test_generate_ends_before_a_stop_string(two_workers, batched, capsys):
    text = batched[1]["text"]
    arguments = ["generate", "--model", str(MODEL), "--topology", str(two_workers), "--prompt", PROMPT, "--mode", "batched"]
    assert run([*arguments, "--max-tokens", "5", "--stop", text[4:7], "--stop", "never said"]) == 0
    assert capsys.readouterr().out == text[: text.index(text[4:7])] + "\n"


def test_generate_completes_several_prompts_as_json_lines(two_workers, batched, tmp_path, capsys):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    lines = [PROMPT, {"prompt": "def", "max_tokens": 3, "n": 2, "temperature": 1, "seed": 5, "logprobs": 2}, {"prompt": "a b"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["generate", "--model", str(MODEL), "--topology", str(two_workers), "--prompt-file", str(prompts)]
    assert run([*arguments, "--mode", "batched", "--max-tokens", "5", "--json", str(out)]) == 0
    shown, said = capsys.readouterr()
    found = [json.loads(line) for line in shown.splitlines()]
    assert [(one["prompt"], one["choice"]) for one in found] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert (found[0]["token_ids"], found[0]["text"]) == (batched[1]["token_ids"], batched[1]["text"])
    assert [len(one["token_ids"]) for one in found] == [5, 3, 3, 5]
    assert {one["finish_reason"] for one in found} == {"length"}
    assert [len(one.get("logprobs", ())) for one in found] == [0, 3, 3, 0]
    report = json.loads(out.read_text())
    assert [{name: one[name] for name in shown} for one, shown in zip(report["outputs"], found, strict=True)] == found
    assert all(one["ttft_s"] > 0 and one["tpot_s"] > 0 for one in report["outputs"])
    assert report["request_bytes"] + report["reply_bytes"] > report["floor_bytes"] > 0
    assert said.strip().splitlines()[-1].startswith("16 tokens of 3 prompts, ")


def test_a_prompt_that_fails_is_a_line_and_the_exit_code_while_others_go_on(two_workers, tmp_path, capsys, monkeypatch):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    prompts.write_text('"a"\n{"prompt": "b", "max_tokens": 600}\n"c"\n')
    monkeypatch.setenv("DFLASH_MOE_ENGINE_KV_MEMORY", "256KiB")
    arguments = ["generate", "--model", str(MODEL), "--topology", str(two_workers), "--prompt-file", str(prompts)]
    assert run([*arguments, "--max-tokens", "4", "--json", str(out)]) == 2
    shown, said = capsys.readouterr()
    first, wrong, last = map(json.loads, shown.splitlines())
    assert [(one["prompt"], len(one["token_ids"])) for one in (first, last)] == [(0, 4), (2, 4)]
    assert wrong.keys() == {"prompt", "error"}
    assert wrong["prompt"] == 1
    assert "raise engine.kv_memory" in wrong["error"]
    assert said.strip().splitlines()[-1].startswith(f"1 of 3 prompts failed; the first, {prompts}:2: ")
    assert json.loads(out.read_text())["outputs"][1] == wrong


def test_a_model_without_pages_says_so_at_the_start(two_workers, capsys):
    model = checkpoint("deepseek_v32", "f32")
    arguments = ["generate", "--model", str(model), "--topology", str(two_workers), "--prompt", "a list"]
    assert run([*arguments, "--max-tokens", "2"]) == 0
    first, *_, last = [line for line in capsys.readouterr().err.splitlines() if "token" in line or "sequence" in line]
    assert first.startswith("one sequence at a time, with the model's own cache: DeepseekV32ForCausalLM")
    assert last.startswith("2 tokens, ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a", "max_token": 2}', "p.jsonl:2: unknown field 'max_token'; did you mean 'max_tokens'?"),
        ('{"prompt": "a", "max_tokens": 99999}', "p.jsonl:2: a sequence of 100000 tokens was asked for"),
    ],
)
def test_json_lines_that_cannot_be_computed_are_refused_before_anything_is_loaded(line, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dflash_moe.experts.expert_runtime.ExpertRuntime.start", lambda *_, **__: pytest.fail("it loads"))
    path = tmp_path / "p.jsonl"
    path.write_text(f'"a"\n{line}\n')
    assert run(["generate", "--model", str(MODEL), "--prompt-file", str(path)]) == 2
    shown, error = capsys.readouterr()
    assert said in error.strip().splitlines()[-1]
    assert shown == ""


@pytest.mark.timeout(200)
def test_bench_prefill_counts_calls_and_bytes_as_designed(two_workers, tmp_path):
    out = tmp_path / "prefill.json"
    tokens, capacity = 300, 128
    arguments = [
        "bench", "prefill", "--model", MODEL, "--topology", two_workers, "--prompt-tokens", tokens, "--new-tokens", 2,
        "--modes", "stream,batched", "--dtypes", "f32,bf16", "--repeat", 1, "--batch-capacity", capacity, "--json", out,
    ]  # fmt: skip
    assert run([str(argument) for argument in arguments]) == 0
    result = json.loads(out.read_text())
    rows = {(row["mode"], row["dtype"]): row for row in result["rows"]}
    assert result["complete"] is True
    assert set(rows) == {(mode, dtype) for mode in ("stream", "batched", "local") for dtype in ("f32", "bf16")}
    for dtype in ("f32", "bf16"):
        batched = rows["batched", dtype]
        assert batched["calls"] == LAYERS * WORKERS * math.ceil(tokens / capacity)
        assert batched["request_bytes"] + batched["reply_bytes"] <= 1.02 * batched["floor_bytes"]
        assert rows["stream", dtype]["calls"] > batched["calls"]
        assert rows["stream", dtype]["digests"] == batched["digests"]
    halved = rows["batched", "bf16"]["reply_bytes"] / rows["batched", "f32"]["reply_bytes"]
    assert 0.49 < halved < 0.51
    assert {process["name"] for process in result["params"]["processes"]} == {"host", "w0", "w1"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "--model", MODEL], "--prompt TEXT or --prompt-file FILE"),
        (["generate", "--model", MODEL, "--prompt", "a", "--prompt-file", "b"], "and not both"),
        (["generate", "--model", MODEL, "--prompt-file", "/nonexistent/p.txt"], "cannot be read"),
        (["generate", "--model", "Qwen/Qwen3-30B-A3B", "--prompt", "a"], "hf download Qwen/Qwen3-30B-A3B"),
        (["generate", "--model", MODEL, "--prompt", "a", "--json", "/proc/none/out.json"], "its folder cannot be made"),
        (["generate", "--model", MODEL, "--prompt", "a", "--json", "/"], "cannot be written"),
        (["generate", "--model", MODEL, "--prompt", "a", "--top-p", "0"], "--top-p=0.0 is not allowed; allowed: above 0"),
        (["generate", "--model", MODEL, "--prompt", "a", "--stop", ""], "--stop='' is not allowed"),
        (["bench", "prefill", "--model", MODEL, "--modes", "fast"], "'fast' is not allowed"),
        (["bench", "prefill", "--model", MODEL, "--mode", "stream"], "use --modes and --dtypes"),
        (["generate", "--model", MODEL, "--prompt", "a", "--mode", "fast"], "--mode"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(arguments, said, capsys):
    assert run([str(argument) for argument in arguments]) == 2
    shown, error = capsys.readouterr()
    assert said in error.strip().splitlines()[-1]
    assert "Traceback" not in error
    assert shown == ""
