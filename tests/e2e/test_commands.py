"""The commands a user types, as processes: demo, generate, bench prefill, bad input.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

MODEL = Path(__file__).parents[2] / "bench" / "demo_model" / "dflash_moe_demo" / "model"
LAYERS, WORKERS = 4, 2
PROMPT = "The following functions read and write a file; each of them returns a list of the"
TWO_WORKERS = "version: 1\nworkers:\n  - {name: w0, backend: cpu, threads: 1}\n  - {name: w1, backend: cpu, threads: 1}\n"


def dflash(*arguments: object, timeout: float = 250) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dflash_moe", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture
def two_workers(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(TWO_WORKERS)
    return path


@pytest.mark.timeout(300)
def test_demo_completes_a_sentence_and_proves_equal_bits():
    done = dflash("demo", timeout=290)
    assert done.returncode == 0, done.stderr
    assert "completion:" in done.stdout
    assert "Every mode gave the same bits" in done.stdout
    for mode in ("stream", "batched", "auto"):
        assert f"\n{mode} " in done.stdout


def generate(topology: Path, out: Path, prompt: str, num_tokens: int, *flags: str) -> tuple[str, dict]:
    """(stdout, report) of a `generate` that must succeed."""
    done = dflash(
        "generate", "--model", MODEL, "--topology", topology, "--prompt", prompt, "--max-new-tokens", num_tokens,
        "--json", out, *flags,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(out.read_text())


@pytest.fixture(scope="module")
def batched(tmp_path_factory):
    """(stdout, report) of one `generate` in mode batched."""
    place = tmp_path_factory.mktemp("batched")
    (place / "two.yaml").write_text(TWO_WORKERS)
    return generate(place / "two.yaml", place / "out.json", PROMPT, 5, "--mode", "batched")


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
    _, stream = generate(two_workers, tmp_path / "stream.json", PROMPT, 5, "--mode", "stream")
    assert stream["token_ids"] == batched[1]["token_ids"]
    assert stream["calls"] > batched[1]["calls"]


@pytest.mark.timeout(200)
def test_bench_prefill_counts_calls_and_bytes_as_designed(two_workers, tmp_path):
    out = tmp_path / "prefill.json"
    tokens, capacity = 300, 128
    done = dflash(
        "bench", "prefill", "--model", MODEL, "--topology", two_workers, "--prompt-tokens", tokens, "--new-tokens", 2,
        "--modes", "stream,batched", "--dtypes", "f32,bf16", "--repeat", 1, "--batch-capacity", capacity, "--json", out,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
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
        (["bench", "prefill", "--model", MODEL, "--modes", "fast"], "'fast' is not allowed"),
        (["bench", "prefill", "--model", MODEL, "--mode", "stream"], "use --modes and --dtypes"),
        (["generate", "--model", MODEL, "--prompt", "a", "--mode", "fast"], "--mode"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(arguments, said):
    done = dflash(*arguments)
    assert done.returncode == 2
    assert said in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
