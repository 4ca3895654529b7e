"""Decoder layers are computed by host layers where these were proven equal, and a layer that
computes something nearly the same keeps its own code.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dflash_moe import ExpertRuntime, Topology
from dflash_moe.engine.host_model import HostModel, open_host
from dflash_moe.operators.report import Finding
from tests.host_models import checkpoint, logits_of, prompt, start

pytestmark = pytest.mark.transformers

TAKEN = (
    "qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "qwen2_moe", "granitemoe", "olmoe", "ernie4_5_moe", "dots1", "deepseek_v3",
    "deepseek_v2", "minimax_m2", "phimoe", "hunyuan_v1_moe",
)  # fmt: skip
# A layer that stays, and what its report says.
STAYING = {"cohere2_moe": "its children are not those of", "flex_olmo": "no block forms fit"}
NUM_LAYERS = 2


def layers(host: HostModel) -> list[Finding]:
    """What was found of whole decoder layers."""
    return [finding for finding in host.report.findings if finding.kind.endswith("DecoderLayer")]


def opened(runtime: Any, arch: str, dtype: str = "f32") -> HostModel:
    host = open_host(checkpoint(arch, dtype), runtime)
    assert host.packed is not None, host.report.lines()
    return host


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("arch", TAKEN)
def test_all_layers_are_taken_and_looped_over(arch, dtype):
    with start(arch, dtype) as runtime:
        host = opened(runtime, arch, dtype)
        found = layers(host)
        assert [finding.operator for finding in found] == ["layer"] * NUM_LAYERS, host.report.lines()
        assert all(0 <= finding.excess <= 1 for finding in found)
        assert host.packed.loop is not None


@pytest.mark.parametrize("arch", STAYING)
def test_a_layer_without_a_block_form_is_named(arch):
    with start(arch, "f32") as runtime:
        host = opened(runtime, arch)
        found = layers(host)
        assert [finding.operator for finding in found] == [""] * NUM_LAYERS
        assert all(STAYING[arch] in finding.reason for finding in found)
        assert host.packed.loop is None


Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def outputs(change: Callable[[Any], Any]) -> Wrapper:
    """A method whose outputs are changed."""

    def wrap(right: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *arguments, **options: change(right(self, *arguments, **options))

    return wrap


def _of_attention(change: Callable[[torch.Tensor], torch.Tensor]) -> Wrapper:
    return outputs(lambda found: (change(found[0]), found[1]))


def _parallel(_right: Callable[..., Any]) -> Callable[..., Any]:
    """Attention and feed-forward read the same rows."""

    def forward(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)
        return hidden_states + attended + self.mlp(self.post_attention_layernorm(hidden_states))

    return forward


def _norm_of_output(_right: Callable[..., Any]) -> Callable[..., Any]:
    """The second norm is applied to what attention gives, not to the feed-forward's input."""

    def forward(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        return hidden_states + self.mlp(hidden_states)

    return forward


def _scaled_query(right: Callable[..., Any]) -> Callable[..., Any]:
    """Queries are scaled behind their norm, which no operator of attention is told."""

    def forward(self: Any, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        hook = self.q_norm.register_forward_hook(lambda _module, _inputs, found: found * 1.01)
        try:
            return right(self, hidden_states, *arguments, **options)
        finally:
            hook.remove()

    return forward


def _clamped(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, rows: right(self, rows.clamp(-2, 2))


def _scaled_latent(right: Callable[..., Any]) -> Callable[..., Any]:
    """Latents are scaled behind their norm."""

    def forward(self: Any, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        hook = self.kv_a_layernorm.register_forward_hook(lambda _module, _inputs, found: found * 1.01)
        try:
            return right(self, hidden_states, *arguments, **options)
        finally:
            hook.remove()

    return forward


def _doubled_correction(right: Callable[..., Any]) -> Callable[..., Any]:
    """The router is called with another correction than the block has."""

    def forward(self: Any, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        kept = self.e_score_correction_bias
        self.e_score_correction_bias = 2 * kept
        try:
            return right(self, hidden_states, *arguments, **options)
        finally:
            self.e_score_correction_bias = kept

    return forward


# Which method of which class in a family's own file is another.
WRONG: dict[str, tuple[str, str, str, Wrapper]] = {
    "residual of attention scaled": ("qwen3_moe", "Qwen3MoeAttention", "forward", _of_attention(lambda found: found * 1.001)),
    "output scaled": ("qwen3_moe", "Qwen3MoeDecoderLayer", "forward", outputs(lambda found: found * 1.0001)),
    "output shifted": ("qwen3_moe", "Qwen3MoeDecoderLayer", "forward", outputs(lambda found: found + 1e-3)),
    "attention and feed-forward in parallel": ("qwen3_moe", "Qwen3MoeDecoderLayer", "forward", _parallel),
    "norm of what attention gives": ("qwen3_moe", "Qwen3MoeDecoderLayer", "forward", _norm_of_output),
    "query scaled": ("qwen3_moe", "Qwen3MoeAttention", "forward", _scaled_query),
    "experts' output scaled": ("qwen3_moe", "Qwen3MoeSparseMoeBlock", "forward", outputs(lambda found: found * 1.001)),
    "experts' inputs clamped": ("qwen3_moe", "Qwen3MoeSparseMoeBlock", "forward", _clamped),
    "routing weights squared": (
        "qwen3_moe", "Qwen3MoeTopKRouter", "forward", outputs(lambda found: (found[0], found[1].square(), found[2])),
    ),
    "latent attention scaled": ("deepseek_v3", "DeepseekV3Attention", "forward", _of_attention(lambda found: found * 1.001)),
    "latents of another size": ("deepseek_v3", "DeepseekV3Attention", "forward", _scaled_latent),
    "correction doubled": ("minimax_m2", "MiniMaxM2SparseMoeBlock", "forward", _doubled_correction),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_layer_that_computes_something_else_keeps_its_code(name, monkeypatch):
    from transformers import AutoModelForCausalLM

    arch, kind, method, wrap = WRONG[name]
    owner = getattr(importlib.import_module(f"transformers.models.{arch}.modeling_{arch}"), kind)
    monkeypatch.setattr(owner, method, wrap(getattr(owner, method)))
    with start(arch, "f32") as runtime:
        host = opened(runtime, arch)
        assert [finding.operator for finding in layers(host)] == [""] * NUM_LAYERS, host.report.lines()
        assert host.packed.loop is None
        found = logits_of(host.packed, prompt()).double()
    options = {"dtype": torch.float32, "experts_implementation": "eager", "attn_implementation": "eager"}
    model: nn.Module = AutoModelForCausalLM.from_pretrained(checkpoint(arch, "f32"), **options).eval()
    with torch.inference_mode():
        eager = model(input_ids=torch.tensor([prompt()])).logits[0].double()
    assert (found - eager).abs().max() / eager.std() < 1e-5


def test_latent_attention_whose_queries_have_no_low_rank_is_taken(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(checkpoint("deepseek_v3", "f32"))
    config.q_lora_rank = None
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.save_pretrained(tmp_path)
    with ExpertRuntime.start(Topology.local(1, threads=1), model=tmp_path) as runtime:
        host = open_host(tmp_path, runtime)
        assert host.packed is not None
        assert [finding.operator for finding in layers(host)] == ["layer"] * NUM_LAYERS, host.report.lines()
        found = logits_of(host.packed, prompt()).double()
    options = {"dtype": torch.float32, "experts_implementation": "eager", "attn_implementation": "eager"}
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    with torch.inference_mode():
        expected = eager(input_ids=torch.tensor([prompt()])).logits[0].double()
    assert (found - expected).abs().max() / expected.std() < 1e-5
