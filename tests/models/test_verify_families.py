"""Parity of each required family with its own eager experts, through two worker processes, in f32
and bf16.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

from bench.models.families import REQUIRED, tiny_options
from dflash_moe import Topology
from dflash_moe.model.make import make_checkpoint
from dflash_moe.operators.report import OPERATORS

pytestmark = pytest.mark.transformers


# Three unlike kinds of experts: a plain gate, clamped SwiGLU with biases, shared experts beside.
FIRST = ("qwen3_moe", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize(
    "arch", [*FIRST, *(pytest.param(arch, marks=pytest.mark.long) for arch in REQUIRED if arch not in FIRST)]
)
def test_a_family_has_parity(arch, tmp_path):
    from dflash_moe.proofs.verify import verify

    make_checkpoint(tiny_options(arch), tmp_path)
    for dtype in ("f32", "bf16"):
        report = verify(tmp_path, Topology.local(num_workers=2), dtype=dtype)
        assert report.excesses == []
        assert report.remote_calls > 0
        assert report.is_paged
        assert report.greedy.tokens > 0
        assert {found.operator for found in report.host.findings} <= {"", *OPERATORS}
        if dtype == "f32":
            assert (report.not_judged, report.greedy.equal) == ("", report.greedy.tokens)
        assert all(layer.calls == layer.expected_calls == 2 and layer.equal_in_stream for layer in report.layers)
        assert (report.request_dtype, report.reply_dtype) == (dtype, dtype)
