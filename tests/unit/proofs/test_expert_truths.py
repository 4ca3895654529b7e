"""The truths of a layer, which are made expert by expert, are those of the whole experts module in
float64 and in float32.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy

import pytest

from bench.models.families import tiny_options
from bench.models.quantised_files import write_fp8, write_mxfp4
from dflash_moe.model.make import make_checkpoint

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.transformers

ROWS, TOP_K = 40, 3


def a_call(layer):
    from dflash_moe.model.capture import ExpertsCall

    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(ROWS, layer.ffn.in_size, generator=generator).bfloat16()
    # A row may choose an expert twice, and ids beyond the experts mean none.
    ids = torch.randint(0, layer.num_experts + 1, (ROWS, TOP_K), generator=generator)
    weights = torch.rand(ROWS, TOP_K, generator=generator)
    return ExpertsCall(layer.name, hidden, ids, weights, None)


def whole(module, call, dtype):
    """What the whole module gives, one choice of each row at a time: not every eager loop takes an
    expert twice.
    """
    wide = copy.deepcopy(module).to(dtype)
    is_expert = call.topk_ids < module.down_proj.shape[0]
    total = torch.zeros(ROWS, 1, dtype=dtype)
    for place in range(TOP_K):
        taken = is_expert[:, place]
        part = wide(
            call.hidden_states[taken].to(dtype), call.topk_ids[taken][:, place : place + 1],
            call.topk_weights[taken][:, place : place + 1].to(dtype),
        )  # fmt: skip
        total = torch.zeros(ROWS, part.shape[1], dtype=dtype) + total
        total[taken] += part
    return total


CASES = {
    "qwen3_moe": None, "mixtral": None, "gpt_oss": None, "granitemoe": None, "fp8": write_fp8, "mxfp4": write_mxfp4,
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_expert_by_expert_is_as_the_whole_module(case, tmp_path):
    from dflash_moe.integrations.host_weights import load_whole
    from dflash_moe.model.spec import model_spec
    from dflash_moe.placement import plan_placement
    from dflash_moe.proofs.expert_truths import StoredExperts
    from dflash_moe.topology import Topology

    arch = {"fp8": "qwen3_moe", "mxfp4": "gpt_oss"}.get(case, case)
    directory = tmp_path / "floats"
    make_checkpoint(tiny_options(arch) if arch == case else wider(arch), directory)
    if CASES[case] is not None:
        directory = CASES[case](directory, tmp_path / "quantised")
    spec = model_spec(directory)
    model = load_whole(directory, "f32")
    shards = plan_placement(spec.layers, Topology.local(num_workers=2)).layers
    layer = spec.layers[-1]
    call = a_call(layer)
    with torch.inference_mode():
        truths = StoredExperts(directory).truths(layer, shards[-1], call)
        module = model.get_submodule(layer.name)
        expected = whole(module, call, torch.float64)
        torch.testing.assert_close(truths.exact, expected, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(truths.widened, whole(module, call, torch.float32), rtol=1e-4, atol=1e-5)
    assert truths.exact.std() > 0
    assert torch.equal(truths.held, truths.exact)
    assert torch.equal(truths.computed, truths.exact)


def wider(arch):
    from dataclasses import replace

    return replace(tiny_options(arch), hidden_size=256, moe_intermediate_size=128)
