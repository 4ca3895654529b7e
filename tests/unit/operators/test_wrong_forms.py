"""Wrong operators are refused: each test puts one form that is nearly right in the place of the
right one, and the proof must see it. (tests/engine/test_wrong_operators.py has those that no proof
of a single module can see.)

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.models.families import tiny_options
from dflash_moe import _core
from dflash_moe.model.make import build_model
from dflash_moe.operators import latent_proof, routers, takeover
from dflash_moe.operators.activations import HostActivation
from dflash_moe.operators.latent_proof import take_latent_heads
from dflash_moe.operators.linear import HostLinear, memory_source
from dflash_moe.operators.norms import HostNorm, NormForm
from dflash_moe.operators.paged_attention import LatentHeads
from dflash_moe.operators.report import TakeoverReport
from dflash_moe.operators.router_form import RouterForm
from dflash_moe.operators.routers import HostRouter, find_form, find_signature, router_excess
from dflash_moe.operators.takeover import take_over

pytestmark = pytest.mark.transformers

POOL = _core.HostPool(threads=1, isa=_core.best_isa())
# Where a wrong form differs by less than one rounding of bf16, only f32 can tell.
BOTH, WIDE = ("f32", "bf16"), ("f32",)


def lively(arch: str, dtype: str) -> Any:
    """A tiny model whose vectors are neither 0 nor 1."""
    model = build_model(tiny_options(arch, dtype))
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for _name, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.ndim == 1 and value.is_floating_point():
                value.add_((0.2 * torch.rand(value.shape, generator=generator)).to(value.dtype))
    return model


def kept(report: TakeoverReport, kind: str) -> bool:
    """Whether no module of a kind was taken, and all were named."""
    return not any(kind in finding.kind for finding in report.taken) and any(kind in finding.kind for finding in report.kept)


# -- norms ---------------------------------------------------------------------------------------
NORMS: dict[str, tuple[str, NormForm, tuple[str, ...]]] = {
    "ten times the eps": ("qwen3_moe", NormForm("rms", 1e-5), BOTH),
    "a tenth of the eps": ("qwen3_moe", NormForm("rms", 1e-7), BOTH),
    "1 + w": ("qwen3_moe", NormForm("rms", 1e-6, adds_one=True), BOTH),
    "mean taken off": ("qwen3_moe", NormForm("layer", 1e-6), BOTH),
    "mean not taken off": ("phimoe", NormForm("rms", 1e-5), BOTH),
    "ten times the eps of a layer norm": ("phimoe", NormForm("layer", 1e-4), BOTH),
}


@pytest.mark.parametrize(("arch", "form", "dtype"), [
    pytest.param(arch, form, dtype, id=f"{name}-{dtype}")
    for name, (arch, form, dtypes) in NORMS.items() for dtype in dtypes
])  # fmt: skip
def test_a_wrong_norm_is_refused(arch, form, dtype, monkeypatch):
    monkeypatch.setattr(takeover, "norm_forms", lambda module: [form] if "Norm" in type(module).__name__ else [])
    assert kept(take_over(lively(arch, dtype), POOL, "f32-canonical"), "Norm")


class _NormOfRounded(HostNorm):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows.bfloat16().to(rows.dtype))


class _NormBeforeItsWeight(HostNorm):
    """Rounds to bf16 between the normalised row and the weight."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scale, self.scale = self.scale, torch.ones_like(self.scale)
        normal = super().forward(rows)
        self.scale = scale
        return (normal.bfloat16().float() * scale).to(rows.dtype)


class _NormWithoutBias(HostNorm):
    def __init__(self, pool: _core.HostPool, form: NormForm, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(pool, form, weight, None)


@pytest.mark.parametrize(("arch", "wrong", "dtype"), [
    ("qwen3_moe", _NormOfRounded, "f32"), ("qwen3_moe", _NormBeforeItsWeight, "f32"),
    ("phimoe", _NormWithoutBias, "f32"), ("phimoe", _NormWithoutBias, "bf16"),
])  # fmt: skip
def test_a_norm_that_rounds_elsewhere_or_lacks_its_bias_is_refused(arch, wrong, dtype, monkeypatch):
    monkeypatch.setattr(takeover, "HostNorm", wrong)
    assert kept(take_over(lively(arch, dtype), POOL, "f32-canonical"), "Norm")


# -- linear layers -------------------------------------------------------------------------------
def _rounded(self: HostLinear, rows: torch.Tensor) -> torch.Tensor:
    return _forward(self, rows.bfloat16().to(rows.dtype))


_forward = HostLinear.forward

LINEARS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "rows in another order": ("mixtral", lambda weight: weight.flip(0)),
    "inputs in another order": ("mixtral", lambda weight: weight.flip(1)),
    "one output missing": ("mixtral", lambda weight: weight.clone().index_fill_(0, torch.tensor([0]), 0.0)),
    "the last input missing": ("mixtral", lambda weight: weight.clone().index_fill_(1, torch.tensor([95]), 0.0)),
    "scaled": ("mixtral", lambda weight: weight * 1.05),
    "negative": ("mixtral", lambda weight: -weight),
}


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("arch", "change"), LINEARS.values(), ids=LINEARS)
def test_a_wrong_matrix_is_refused(arch, change, dtype, monkeypatch):
    changed = []  # keeps the matrices until they are packed

    def source(weight: torch.Tensor) -> Any:
        changed.append(change(weight.detach()).contiguous())
        return memory_source(changed[-1])

    monkeypatch.setattr(takeover, "memory_source", source)
    assert kept(take_over(lively(arch, dtype), POOL, "f32-canonical"), "Linear")


@pytest.mark.parametrize("dtype", BOTH)
def test_a_missing_bias_is_refused(dtype, monkeypatch):
    monkeypatch.setattr(takeover, "bias_source", lambda bias: None)
    report = take_over(lively("gpt_oss", dtype), POOL, "f32-canonical")
    assert sum(finding.kind == "Linear" for finding in report.kept) == 8
    # The output has none, and is the one that is taken.
    assert [finding.module for finding in report.taken if finding.kind == "Linear"] == ["lm_head"]


@pytest.mark.parametrize("numerics", ["bf16-dot", "int8-groups"])
def test_inputs_rounded_more_than_the_class_says_are_refused(numerics, monkeypatch):
    monkeypatch.setattr(HostLinear, "forward", _rounded)
    # Weights in f32 are taken by f32-canonical, whatever was asked for.
    if numerics in _core.numerics_classes(_core.best_isa()):
        assert kept(take_over(lively("mixtral", "f32"), POOL, numerics), "Linear")
    assert kept(take_over(lively("mixtral", "f32"), POOL, "f32-canonical"), "Linear")


# -- activations ---------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("wrong", ["gelu", "gelu_tanh", "relu", "sigmoid"])
def test_a_wrong_activation_is_refused(wrong, dtype, monkeypatch):
    known = takeover.known_activation
    monkeypatch.setattr(takeover, "known_activation", lambda module: known(module) and wrong)
    try:
        HostActivation(POOL, wrong)
    except Exception:  # noqa: BLE001 - this core has no such activation
        pytest.skip(f"no activation {wrong}")
    assert kept(take_over(lively("glm4_moe", dtype), POOL, "f32-canonical"), "SiLU")


# -- routers -------------------------------------------------------------------------------------
ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sigmoid for softmax": ("qwen3_moe", {"score": "sigmoid"}),
    "logits for softmax": ("qwen3_moe", {"score": "identity"}),
    "normalised": ("qwen3_moe", {"normalizes": True}),
    "scaled": ("qwen3_moe", {"scale": 1.01}),
    "one expert fewer": ("qwen3_moe", {"top_k": 1}),
    "not normalised": ("mixtral", {"normalizes": False}),
    "softmax over all, not over the chosen": ("gpt_oss", {"normalizes": False}),
    "softmax for sigmoid": ("deepseek_v3", {"score": "softmax"}),
    "no correction bias": ("deepseek_v3", {"has_bias": False}),
    "not scaled": ("deepseek_v3", {"scale": 1.0}),
    "sigmoids not normalised": ("deepseek_v3", {"normalizes": False}),
    "one group": ("deepseek_v3 groups", {"num_groups": 1, "topk_groups": 1}),
    "groups of another size": ("deepseek_v3 groups", {"num_groups": 2, "topk_groups": 1}),
    "another number of groups": ("deepseek_v3 groups", {"topk_groups": 3}),
    "groups by their best": ("deepseek_v3 groups", {"group_score": "max"}),
    "softmax groups by two": ("deepseek_v2 groups", {"group_score": "top_two_sum"}),
    "correction bias of a softmax missing": ("ernie4_5_moe", {"has_bias": False}),
}


def router_of(name: str, dtype: str) -> Any:
    """The last layer's router of a tiny model, with a correction bias that decides."""
    arch, _, has_groups = name.partition(" ")
    model = lively(arch, dtype)
    found = [module for path, module in model.named_modules() if find_router(path, module)][-1]
    for path, value in [*found.named_parameters(), *found.named_buffers()]:
        if "correction" in path:
            value.data.copy_(0.3 * torch.rand(value.shape, generator=torch.Generator().manual_seed(4)))
    if has_groups:
        found.num_group, found.topk_group, found.topk_method = 4, (1 if arch == "deepseek_v2" else 2), "group_limited_greedy"
    return found


def find_router(path: str, module: Any) -> bool:
    weight = module._parameters.get("weight")
    return path.rpartition(".")[2] in ("gate", "router") and weight is not None and weight.shape == (8, 96)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("name", sorted({name for name, _change in ROUTERS.values()}))
def test_the_right_router_is_found_and_proven(name, dtype):
    module = router_of(name, dtype)
    signature = find_signature(module, 8, 96)
    form, reason = find_form(module, signature)
    assert form is not None, reason
    assert router_excess(HostRouter(POOL, form, signature, module), module) <= 1.0
    assert form.num_groups == (4 if "groups" in name else 1)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("name", "change"), ROUTERS.values(), ids=ROUTERS)
def test_a_wrong_router_is_refused(name, change, dtype, monkeypatch):
    module = router_of(name, dtype)
    signature = find_signature(module, 8, 96)
    right, _ = find_form(module, signature)
    wrong = replace(right, **change)
    if "top_k" not in change:
        assert not router_excess(HostRouter(POOL, wrong, signature, module), module) <= 1.0
    monkeypatch.setattr(routers, "_candidates", lambda *_arguments, **_options: [wrong])
    assert find_form(module, signature)[0] is None


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("wrong", ["shifted", "in the weights too"])
def test_a_correction_bias_used_otherwise_is_refused(wrong, dtype, monkeypatch):
    module = router_of("deepseek_v3", dtype)
    signature = find_signature(module, 8, 96)
    form, _ = find_form(module, signature)
    if wrong == "shifted":
        ours = HostRouter(POOL, form, signature, module)
        ours.correction = ours.correction.roll(1)
        assert not router_excess(ours, module) <= 1.0
    else:
        # A module that adds the bias to the weights as well has none of our forms.
        monkeypatch.setattr(type(module), "forward", _weights_with_bias)
        assert find_form(module, signature)[0] is None


def _weights_with_bias(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits = torch.nn.functional.linear(hidden_states, self.weight)
    weights, ids = (logits.sigmoid() + self.e_score_correction_bias).topk(self.top_k, dim=-1)
    return logits, 2.5 * weights / weights.sum(-1, keepdim=True), ids


def test_forms_that_fit_equally_are_refused(monkeypatch):
    module = router_of("qwen3_moe", "f32")
    signature = find_signature(module, 8, 96)
    right = RouterForm(8, 2, "softmax", normalizes=False)
    near = replace(right, scale=1.0 + 1e-9)
    monkeypatch.setattr(routers, "_candidates", lambda *_arguments, **_options: [right, near])
    form, reason = find_form(module, signature)
    assert form is None
    assert "2 forms" in reason


@pytest.mark.parametrize("dtype", BOTH)
def test_a_sigmoid_of_one_expert_is_told_from_scores_that_never_tie(dtype, monkeypatch):
    module = router_of("qwen3_moe", dtype)

    def one_of(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = torch.nn.functional.linear(hidden_states.float(), self.weight.float())
        weights, ids = logits.sigmoid().topk(1, dim=-1)
        return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20), ids

    monkeypatch.setattr(type(module), "forward", one_of)
    signature = find_signature(module, 8, 96)
    form, reason = find_form(module, signature)
    assert str(form) == "sigmoid, top 1, normalised", reason
    assert router_excess(HostRouter(POOL, form, signature, module), module) <= 1.0


# -- latent heads --------------------------------------------------------------------------------

LATENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heads in another order": lambda heads: heads.flip(0),
    "values of the next head": lambda heads: torch.cat((heads[:, :12], heads[:, 12:].roll(1, 0)), dim=1),
    "values before keys": lambda heads: heads.roll(12, 1),
    "scaled keys": lambda heads: torch.cat((heads[:, :12] * 1.02, heads[:, 12:]), dim=1),
    "latents in another order": lambda heads: heads.flip(2),
}


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("change", LATENTS.values(), ids=LATENTS)
def test_wrong_latent_heads_are_refused(change, dtype, monkeypatch):
    module = lively("deepseek_v3", dtype).model.layers[0].self_attn
    assert take_latent_heads(POOL, module, "f32-canonical")[1] == ""

    def wrong(pool: _core.HostPool, owner: Any, weight: torch.Tensor, numerics: str) -> LatentHeads:
        heads = weight.view(4, -1, weight.shape[1])
        return LatentHeads(pool, owner, change(heads).reshape(weight.shape).contiguous(), numerics)

    assert (module.qk_nope_head_dim, module.num_heads) == (12, 4)
    monkeypatch.setattr(latent_proof, "LatentHeads", wrong)
    heads, reason = take_latent_heads(POOL, module, "f32-canonical")
    assert heads is None
    assert "times what is allowed" in reason


def test_expanded_latents_with_a_limit_that_no_probe_row_reaches_are_refused(monkeypatch):
    module = lively("deepseek_v3", "f32").model.layers[0].self_attn
    right = type(module).expand_kv

    def limited(self: Any, latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = right(self, latents, rotated)
        return keys, values.clamp(-200, 200)

    monkeypatch.setattr(type(module), "expand_kv", limited)
    heads, reason = take_latent_heads(POOL, module, "f32-canonical")
    assert heads is None
    assert "such as a limit" in reason


@pytest.mark.parametrize("dtype", BOTH)
def test_an_activation_with_a_limit_is_refused(dtype, monkeypatch):
    model = lively("glm4_moe", dtype)
    kind = next(type(module) for module in model.modules() if "SiLU" in type(module).__name__)
    right = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, values: right(self, values).clamp(max=1000))
    assert kept(take_over(model, POOL, "f32-canonical"), "SiLU")
