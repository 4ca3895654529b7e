"""Decoder layers are computed by host layers where these were proven equal, and a layer that
computes something nearly the same keeps its own code.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dflash_moe.engine.host_model import HostModel, open_host
from dflash_moe.operators.report import Finding
from tests.host_models import checkpoint, logits_of, prompt, start

pytestmark = pytest.mark.transformers

TAKEN = ("qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "qwen2_moe", "granitemoe", "olmoe", "ernie4_5_moe", "dots1")
# A layer that stays, and what its report says.
STAYING = {"deepseek_v3": "latent attention has no block form", "phimoe": "its children are not those of"}
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


# Which method of which class of the model's own file is another.
WRONG: dict[str, tuple[str, str, Wrapper]] = {
    "residual of attention scaled": ("Qwen3MoeAttention", "forward", _of_attention(lambda found: found * 1.001)),
    "output scaled": ("Qwen3MoeDecoderLayer", "forward", outputs(lambda found: found * 1.0001)),
    "output shifted": ("Qwen3MoeDecoderLayer", "forward", outputs(lambda found: found + 1e-3)),
    "attention and feed-forward in parallel": ("Qwen3MoeDecoderLayer", "forward", _parallel),
    "norm of what attention gives": ("Qwen3MoeDecoderLayer", "forward", _norm_of_output),
    "query scaled": ("Qwen3MoeAttention", "forward", _scaled_query),
    "experts' output scaled": ("Qwen3MoeSparseMoeBlock", "forward", outputs(lambda found: found * 1.001)),
    "experts' inputs clamped": ("Qwen3MoeSparseMoeBlock", "forward", _clamped),
    "routing weights squared": (
        "Qwen3MoeTopKRouter", "forward", outputs(lambda found: (found[0], found[1].square(), found[2])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_layer_that_computes_something_else_keeps_its_code(name, monkeypatch):
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    kind, method, wrap = WRONG[name]
    owner = getattr(modeling_qwen3_moe, kind)
    monkeypatch.setattr(owner, method, wrap(getattr(owner, method)))
    with start("qwen3_moe", "f32") as runtime:
        host = opened(runtime, "qwen3_moe")
        assert [finding.operator for finding in layers(host)] == [""] * NUM_LAYERS, host.report.lines()
        assert host.packed.loop is None
        found = logits_of(host.packed, prompt()).double()
    options = {"dtype": torch.float32, "experts_implementation": "eager", "attn_implementation": "eager"}
    model: nn.Module = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3_moe", "f32"), **options).eval()
    with torch.inference_mode():
        eager = model(input_ids=torch.tensor([prompt()])).logits[0].double()
    assert (found - eager).abs().max() / eager.std() < 1e-5
