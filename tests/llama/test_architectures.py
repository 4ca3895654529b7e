"""Every architecture of llama.cpp with routed experts: its own tiny model, computed by our workers
and by llama.cpp alone.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.llama.programs import Llama, nmse, read_logits, run

NUM_TOKENS = 33
# Weights, activations and sums are float32 on both sides, so that logits differ by the order of
# sums alone. llama.cpp allows itself this much between two of its own builds (tools/results).
TOLERANCE = 1e-6
TAKEN = [
    "afmoe", "arctic", "bailingmoe", "bailingmoe2", "cohere2moe", "dbrx", "deepseek", "deepseek2",
    "deepseek32", "deepseek4", "dots1", "dots3note", "ernie4_5-moe", "exaone-moe", "glm-dsa",
    "glm4moe", "glm5-next", "gpt-oss", "granite", "granitemoe", "grok", "grovemoe", "hunyuan-moe", "hy_v3",
    "hy_v4", "kimi-linear", "laguna", "lfm2moe", "llada-moe", "llama", "maple", "mellum", "mimo2",
    "minicpm", "minimax-01", "minimax-m2", "minimax-m3", "mistral3", "mistral4", "olmoe", "phimoe",
    "qwen2moe", "qwen35moe", "qwen3moe", "qwen3next", "qwen3vlmoe", "qwen4exp", "rnd1",
    "smallthinker",
]  # fmt: skip
# Architecture: a word of the reason with which it is refused.
REFUSED = {
    "llama4": "inputs by the routing weights",
    "kimi-k3": "SITU",
    "bailingmoe3": "bounds",
    "refact": "no routed experts",
}


def _logits(llama: Llama, launcher: list[str], model: Path, out: Path) -> tuple[np.ndarray[Any, Any], str]:
    done = run([*launcher, llama.logits, "-m", model, out, NUM_TOKENS])
    assert done.returncode == 0, done.stderr[-3000:]
    return read_logits(out), done.stderr


def test_no_architecture_with_experts_is_forgotten(architectures: Path) -> None:
    import gguf

    found = set()
    for path in architectures.glob("*-moe.gguf"):
        names = [tensor.name for tensor in gguf.GGUFReader(str(path)).tensors]
        if any("_exps.weight" in name and "norm" not in name for name in names):
            found.add(path.name.removesuffix("-moe.gguf"))
    assert found == {*TAKEN, *REFUSED}


@pytest.mark.parametrize("name", TAKEN)
def test_logits_are_llama_cpps(
    name: str, llama: Llama, architectures: Path, tmp_path: Path, record: list[dict[str, Any]]
) -> None:
    model, report = architectures / f"{name}-moe.gguf", tmp_path / "report.json"
    wanted, _ = _logits(llama, [], model, tmp_path / "plain.bin")
    found, _ = _logits(llama, llama.launcher(model, "--json", report), model, tmp_path / "ours.bin")
    counted = json.loads(report.read_text())
    error = nmse(found, wanted)
    record.append({"name": name, "nmse": error, "calls": counted["calls"]})
    # A program that silently computed all by itself would have equal logits as well.
    assert counted["calls"] > 0
    assert counted["failed_calls"] == 0
    assert np.isfinite(wanted).all()
    assert error <= TOLERANCE


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_by_name(name: str, llama: Llama, architectures: Path, tmp_path: Path) -> None:
    model = architectures / f"{name}-moe.gguf"
    done = run([*llama.launcher(model), llama.logits, "-m", model, tmp_path / "ours.bin", NUM_TOKENS])
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2
    assert name in last
    assert REFUSED[name] in last
