"""The documented program in C, without Python in its process, gets the sums that the Python API
gets.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

import dflash_moe as dm
from bench.models.tiny_gguf import tiny_gguf
from dflash_moe import _core
from dflash_moe.model.gguf_architectures.gguf_experts import gguf_experts

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(_core.__file__).parent
NUM_TOKENS = 4
TOPOLOGY = """\
version: 1
ipc: {dtype: f32}
workers:
  - {name: w0, backend: cpu, threads: 1}
  - {name: w1, backend: cpu, threads: 1}
"""


def test_the_c_example_computes_what_python_does(tmp_path: Path) -> None:
    model, plan, program = tmp_path / "tiny.gguf", tmp_path / "topology.yaml", tmp_path / "experts"
    tiny_gguf(model, "q8_0", hidden_size=64, moe_intermediate_size=32, num_experts=8, top_k=2, num_layers=2)
    plan.write_text(TOPOLOGY)
    source, library = ROOT / "docs" / "examples" / "experts.c", PACKAGE / "libdflash_moe.so"
    subprocess.run(
        ["cc", "-std=c11", source, f"-I{PACKAGE / 'include'}", library, f"-Wl,-rpath,{PACKAGE}", "-o", program],
        check=True, timeout=120,
    )  # fmt: skip
    launcher = [sys.executable, "-m", "dflash_moe", "llama", "--model", model, "--topology", plan, "--plugin", "none", "--"]
    done = subprocess.run(
        [*map(str, launcher), str(program)], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.search(r"^sum (\S+), calls 1, rows (\d+), bytes \d+$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    assert float(found[1]) == pytest.approx(_expected_sum(model, plan), rel=1e-5)
    # Each worker has half of the experts, so that a row travels once or twice.
    assert NUM_TOKENS <= int(found[2]) <= 2 * NUM_TOKENS


def _expected_sum(model: Path, plan: Path) -> float:
    """The sum that the example prints, of the same inputs."""
    with dm.ExpertRuntime.start(dm.Topology.load(plan), gguf_experts(model).spec) as runtime:
        layer = runtime.layers[0]
        hidden_states = ((np.arange(NUM_TOKENS * layer.ffn.in_size) % 17) / 16 - 0.5).astype(np.float32)
        pairs = np.arange(NUM_TOKENS * layer.top_k)
        topk_ids = (pairs // layer.top_k + pairs % layer.top_k) % layer.num_experts
        output = runtime.experts(
            layer.index, hidden_states.reshape(NUM_TOKENS, -1), topk_ids.reshape(NUM_TOKENS, -1).astype(np.int32),
            np.full((NUM_TOKENS, layer.top_k), 1 / layer.top_k, np.float32),
        )  # fmt: skip
    flat = np.asarray(output, np.float64).ravel()
    return float(np.sum(flat * (np.arange(len(flat)) % 13 + 1)))
