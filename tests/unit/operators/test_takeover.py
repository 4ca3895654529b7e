"""Which operator stands in for each module of the required families, and that what is packed is not
kept a second time or lost in silence.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from bench.models.families import REQUIRED, tiny_options
from dflash_moe import _core
from dflash_moe.errors import UnsupportedError
from dflash_moe.model.make import build_model
from dflash_moe.operators.activations import HostActivation
from dflash_moe.operators.linear import HostEmbedding
from dflash_moe.operators.norms import HostNorm
from dflash_moe.operators.routers import HostRouter
from dflash_moe.operators.takeover import Takeover, take_over

pytestmark = pytest.mark.transformers

POOL = _core.HostPool(threads=1, isa=_core.best_isa())
CLASSES = _core.numerics_classes(_core.best_isa())
DTYPES = ("f32", "f16", "bf16")
NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
# The router's form in each family.
ROUTERS = {
    "qwen3_moe": "softmax, top 2", "qwen2_moe": "softmax, top 2", "olmoe": "softmax, top 2", "deepseek_v2": "softmax, top 2",
    "mixtral": "softmax, top 2, normalised", "gpt_oss": "softmax, top 2, normalised",
    "deepseek_v3": "sigmoid, bias, top 2, normalised, x 2.5", "glm4_moe": "sigmoid, bias, top 2, normalised",
    "minimax_m2": "sigmoid, bias, top 2, normalised", "ernie4_5_moe": "softmax, bias, top 2, normalised",
    "phimoe": "sparse mixer within 0.02, top 2",
}  # fmt: skip
NORMS = {"phimoe": "layer, w, eps 1e-05", "qwen3_moe": "rms, w, eps 1e-06", "mixtral": "rms, w, eps 1e-05"}


def forms(report, operator: str) -> set[str]:
    return {finding.form for finding in report.taken if finding.operator == operator}


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_router_that_chooses_one_expert_gets_its_form(arch, dtype):
    model = build_model(replace(tiny_options(arch, dtype), top_k=1), {"norm_topk_prob": True} if arch == "qwen3_moe" else None)
    report = take_over(model, POOL, "f32-canonical")
    assert forms(report, "router") == {"softmax, top 1, normalised"}
    assert not report.kept


@pytest.mark.parametrize("arch", REQUIRED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_module_gets_the_one_form_that_it_has(arch, dtype):
    model = build_model(tiny_options(arch, dtype))
    num_linears = sum(type(module) is nn.Linear for module in model.modules())
    report = take_over(model, POOL, "f32-canonical")
    assert forms(report, "router") == {ROUTERS[arch]}
    assert forms(report, "linear") == {f"{dtype}, f32-canonical"}
    assert sum(finding.operator == "linear" for finding in report.taken) == num_linears
    assert len(forms(report, "norm")) == 1
    if arch in NORMS:
        assert forms(report, "norm") == {NORMS[arch]}
    assert not report.kept
    assert all(0.0 <= finding.excess <= 1.0 for finding in report.taken)
    named = [finding.module for finding in report.findings]
    assert len(named) == len(set(named)), "a module is reported twice"


@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_class_is_proven_within_what_it_rounds(numerics, dtype):
    report = take_over(build_model(tiny_options("deepseek_v3", dtype)), POOL, numerics)
    assert not report.kept
    assert all(form.startswith(dtype) for form in forms(report, "linear"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tied_embedding_reads_the_output_s_rows(dtype):
    model = build_model(tiny_options("mixtral", dtype))
    model.lm_head.weight = model.model.embed_tokens.weight
    ids = torch.tensor([[0, 5, 256, 5]])
    expected = model.model.embed_tokens(ids)
    report = take_over(model, POOL, "f32-canonical")
    taken = model.model.embed_tokens
    assert isinstance(taken, HostEmbedding)
    assert taken.packed is model.lm_head.packed
    assert torch.equal(taken(ids), expected)
    assert "embedding" in {finding.operator for finding in report.taken}


def test_an_embedding_of_its_own_stays():
    model = build_model(tiny_options("mixtral"))
    take_over(model, POOL, "f32-canonical")
    assert type(model.model.embed_tokens) is nn.Embedding


def test_packed_weights_are_kept_once_and_cannot_be_saved():
    model = build_model(tiny_options("qwen3_moe"))
    take_over(model, POOL, "f32-canonical")
    left = {name for name, _value in model.named_parameters() if ".experts." not in name}
    assert left == {"model.embed_tokens.weight"}
    with pytest.raises(UnsupportedError, match="load_model"):
        model.state_dict()


def test_logits_are_float32_whatever_the_model():
    model = build_model(tiny_options("qwen3_moe", "bf16"))
    take_over(model, POOL, "f32-canonical")
    assert model.lm_head(torch.ones(1, 3, 96, dtype=torch.bfloat16)).dtype == torch.float32


def test_near_ties_of_float32_do_not_hide_a_router_s_form():
    # Seeds whose rows scaled by 1e-4 tie in the module's own float32 softmax.
    for seed in range(24):
        model = build_model(replace(tiny_options("olmoe", "f32"), seed=seed, num_experts=32, num_layers=1))
        report = take_over(model, POOL, "f32-canonical")
        assert forms(report, "router") == {"softmax, top 2"}, f"seed {seed}: {report.lines()}"


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_norms_and_routers_of_a_wide_model_have_one_form(kind):
    # The mean of a wide random row is near 0, where a norm that takes it off is hard to tell from
    # one that does not; and among many experts all scores are small.
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"softmax": {"num_experts": 128}, "sigmoid": {"n_routed_experts": 128, "n_group": 4, "topk_group": 2}}[kind]
    config = AutoConfig.for_model(
        {"softmax": "qwen3_moe", "sigmoid": "glm4_moe"}[kind], hidden_size=2048, num_experts_per_tok=8, num_hidden_layers=1,
        moe_intermediate_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        vocab_size=64, first_k_dense_replace=0, pad_token_id=None, **sizes,
    )  # fmt: skip
    for seed in range(4):
        torch.manual_seed(seed)
        report = take_over(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), POOL, "f32-canonical")
        assert not report.kept, report.lines()
        assert len(forms(report, "router")) == len(forms(report, "norm")) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_router_whose_matrix_is_a_child_s_is_taken(dtype):
    report = take_over(build_model(tiny_options("hunyuan_v1_moe", dtype)), POOL, "f32-canonical")
    assert forms(report, "router") == {"softmax, top 2, normalised"}, report.lines()
    assert not any(finding.kind == "HunYuanMoEV1Gate" for finding in report.kept)


class _Odd(nn.Module):
    """Leaves of odd widths, which no vector length divides."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.narrow = nn.Linear(width, 19)
        self.wide = nn.Linear(19, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.rms = nn.RMSNorm(width, eps=1e-6)
        self.act = nn.SiLU()
        self.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [7, 37, 61, 257])
def test_odd_widths(width, dtype):
    model = build_model(tiny_options("mixtral", NAMES[dtype]))
    odd = model.odd = _Odd(width, dtype).eval()
    before = copy.deepcopy(odd)
    report = take_over(model, POOL, "f32-canonical")
    assert not report.kept, report.lines()
    assert isinstance(odd.norm, HostNorm)
    assert isinstance(odd.rms, HostNorm)
    assert isinstance(odd.act, HostActivation)
    rows = torch.randn(5, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    for name in ("narrow", "norm", "rms", "act"):
        ours, own = getattr(odd, name), getattr(before, name)
        assert torch.allclose(ours(rows).float(), own(rows).float(), rtol=2e-2, atol=2e-2), name
        assert torch.equal(ours(rows), torch.cat([ours(rows[place : place + 1]) for place in range(5)])), name


def test_a_wide_layer_norm_of_one_hot_rows_is_taken():
    # The square of the one is in one of 16 sums, to which the others add roundings of one sign.
    model = build_model(tiny_options("mixtral", "f32"))
    model.wide = nn.LayerNorm(4096)
    assert not take_over(model, POOL, "f32-canonical").kept


class _ChannelsFirst(nn.LayerNorm):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image.permute(0, 2, 3, 1))


def test_a_module_that_takes_no_rows_stays_and_is_named():
    model = build_model(tiny_options("mixtral", "f32"))
    model.image_norm = _ChannelsFirst(24)
    report = take_over(model, POOL, "f32-canonical")
    assert [(finding.module, finding.kind) for finding in report.kept] == [("image_norm", "_ChannelsFirst")]


def test_a_router_that_is_given_its_bias_uses_what_it_is_given():
    model = build_model(tiny_options("minimax_m2", "f32"))
    block = model.model.layers[0].mlp
    own = copy.deepcopy(block.gate)
    Takeover(model, POOL, "f32-canonical").run()
    assert isinstance(block.gate, HostRouter)
    rows = torch.randn(9, 96, generator=torch.Generator().manual_seed(2))
    for bias in (torch.zeros(8), torch.tensor([5.0, 0, 0, 0, 0, 0, 0, 4.0])):
        found, expected = block.gate(rows, bias), own(rows, bias)
        assert torch.equal(found[2].sort(-1).values, expected[2].sort(-1).values)
    assert set(block.gate(rows, bias)[2].flatten().tolist()) == {0, 7}
