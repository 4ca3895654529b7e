"""Decoder layers are computed by host layers where these were proven equal, and a layer that
computes something nearly the same keeps its own code.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dflash_moe import ExpertRuntime, Topology
from dflash_moe.forward import independence
from dflash_moe.forward.host_model import HostModel, open_host
from dflash_moe.forward.independence import find_dependence
from dflash_moe.forward.layer_loop import LayerLoop
from dflash_moe.integrations.transformers import without_experts
from dflash_moe.model.architecture import find_model_class, load_config
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.operators.layers import block_forms
from dflash_moe.operators.layers.reads import kernels_of
from dflash_moe.operators.report import Finding
from tests.host_models import ORIGINAL_MAX, checkpoint, logits_of, prompt, start

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
def test_a_layer_without_a_block_form_is_named_in_report_and_log(arch, caplog):
    caplog.set_level(logging.INFO, "dflash_moe")
    with start(arch, "f32") as runtime:
        host = opened(runtime, arch)
        found = layers(host)
        assert [finding.operator for finding in found] == [""] * NUM_LAYERS
        assert all(STAYING[arch] in finding.reason for finding in found)
        assert any("stays in torch" in line and STAYING[arch] in line for line in caplog.messages)
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


# Behind it the wrong layers below compute something else. No usual probe row stands there, and a
# prompt of the tests passes it.
BOUNDARY = 60
# No usual probe row makes a linear layer of a tiny model give as much.
LIMIT = 50.0


def _scaled_past_a_position(right: Callable[..., Any]) -> Callable[..., Any]:
    """What attention gives is scaled by the position, from one on."""

    def forward(self: Any, hidden_states: torch.Tensor, *, position_ids: torch.Tensor, **options: Any) -> Any:
        attended, weights = right(self, hidden_states, position_ids=position_ids, **options)
        return attended * (1 + 0.1 * (position_ids >= BOUNDARY))[..., None], weights

    return forward


def _scaled_where_cosines_tell(right: Callable[..., Any]) -> Callable[..., Any]:
    """As above, with the position read from the sine that turns slowest."""

    def forward(self: Any, hidden_states: torch.Tensor, position_embeddings: Any, **options: Any) -> Any:
        attended, weights = right(self, hidden_states, position_embeddings=position_embeddings, **options)
        width = position_embeddings[1].shape[-1]
        slowest = self.config.rope_parameters["rope_theta"] ** (2 / width - 1)
        is_past = position_embeddings[1][..., -1:] >= math.sin((BOUNDARY - 0.5) * slowest)
        return attended * (1 + 0.1 * is_past), weights

    return forward


def _limited(child: str) -> Wrapper:
    """What a linear layer or the experts give is limited."""

    def wrap(right: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: Any, *arguments: Any, **options: Any) -> Any:
            module = self.get_submodule(child)
            hook = module.register_forward_hook(lambda _module, _inputs, found: found.clamp(-LIMIT, LIMIT))
            try:
                return right(self, *arguments, **options)
            finally:
                hook.remove()

        return forward

    return wrap


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
    "attention scaled past a position": ("qwen3_moe", "Qwen3MoeAttention", "forward", _scaled_past_a_position),
    "attention scaled where cosines tell": ("qwen3_moe", "Qwen3MoeAttention", "forward", _scaled_where_cosines_tell),
    "limited values": ("qwen3_moe", "Qwen3MoeAttention", "forward", _limited("v_proj")),
    "limited queries": ("qwen3_moe", "Qwen3MoeAttention", "forward", _limited("q_proj")),
    "limited keys behind a norm": ("qwen3_moe", "Qwen3MoeAttention", "forward", _limited("k_norm")),
    "limited output of attention": ("mixtral", "MixtralAttention", "forward", _limited("o_proj")),
    "limited experts": ("mixtral", "MixtralSparseMoeBlock", "forward", _limited("experts")),
    "limited latents": ("deepseek_v3", "DeepseekV3Attention", "forward", _limited("kv_a_proj_with_mqa")),
    "limited gate": ("deepseek_v3", "DeepseekV3MLP", "forward", _limited("gate_proj")),
    "limited down projection": ("deepseek_v3", "DeepseekV3MLP", "forward", _limited("down_proj")),
    "correction doubled": ("minimax_m2", "MiniMaxM2SparseMoeBlock", "forward", _doubled_correction),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_layer_that_computes_something_else_keeps_its_code(name, monkeypatch):
    arch, kind, method, wrap = WRONG[name]
    owner = getattr(importlib.import_module(f"transformers.models.{arch}.modeling_{arch}"), kind)
    monkeypatch.setattr(owner, method, wrap(getattr(owner, method)))
    with start(arch, "f32") as runtime:
        host = opened(runtime, arch)
        assert [finding.operator for finding in layers(host)] == [""] * NUM_LAYERS, host.report.lines()
        assert host.packed.loop is None
        found = logits_of(host.packed, prompt()).double()
    eager = _eager(checkpoint(arch, "f32"), prompt())
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


def test_layers_of_a_kind_are_compared_in_float64_once(monkeypatch):
    copies = Mock(side_effect=block_forms.exact_copy)
    monkeypatch.setattr(block_forms, "exact_copy", copies)
    with start("qwen3_moe", "bf16") as runtime:
        found = layers(opened(runtime, "qwen3_moe", "bf16"))
        assert [finding.operator for finding in found] == ["layer"] * NUM_LAYERS
        assert copies.call_count == 1


@pytest.mark.parametrize("factor", [1.001, math.nan])
def test_a_layer_behind_the_first_of_its_kind_that_computes_something_else_keeps_its_code(factor, monkeypatch):
    import transformers.models.qwen3_moe.modeling_qwen3_moe as qwen3_moe

    right = qwen3_moe.Qwen3MoeAttention.forward

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        attended, weights = right(self, *arguments, **options)
        return attended * (factor if self.layer_idx else 1.0), weights

    monkeypatch.setattr(qwen3_moe.Qwen3MoeAttention, "forward", forward)
    with start("qwen3_moe", "f32") as runtime:
        host = opened(runtime, "qwen3_moe")
        assert [finding.operator for finding in layers(host)] == ["layer", ""]
        assert "no block forms fit" in layers(host)[1].reason


def test_in_a_loop_one_layer_of_each_kind_is_tried_in_company(monkeypatch):
    with start("deepseek_v3", "f32") as runtime:
        packed = opened(runtime, "deepseek_v3").packed
        loop = packed.loop
        # The first layer has a gated MLP, the second one experts.
        assert len({kernels_of(layer) for layer in loop.layers}) == NUM_LAYERS
        assert kernels_of(loop.layers[0]) == kernels_of(loop.layers[0])
    with start("qwen3_moe", "f32") as runtime:
        packed = opened(runtime, "qwen3_moe").packed
        loop = packed.loop
        tried = []
        right = LayerLoop.run

        def run(self: Any, token_ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
            tried.append(self.layers)
            return right(self, token_ids, *arguments) + 1e-3 * (len(token_ids) > 60)

        with without_experts(packed.model):
            assert find_dependence(packed) == ""
            monkeypatch.setattr(LayerLoop, "run", run)
            assert find_dependence(packed) == "logits (output, torch.float32): other bits whole, beside 16 other sequences"
        assert set(tried) == {loop.layers[:1]}
        assert packed.loop is loop


def test_rows_between_the_layers_of_a_loop_are_compared(monkeypatch):
    with start("qwen3_moe", "f32") as runtime:
        packed = opened(runtime, "qwen3_moe").packed

        def see(self: Any, layer: int, positions: Any, hidden_states: torch.Tensor) -> None:
            hidden_states[:, 3] += 1e-3 * (len(positions) == 1)  # a token alone
            seen(self, layer, positions, hidden_states)

        seen = independence._BetweenLayers.see
        monkeypatch.setattr(independence._BetweenLayers, "see", see)
        with without_experts(packed.model):
            found = find_dependence(packed)
        assert found == "layers.-1 (output, torch.float32): other bits cut at 36, beside 0 other sequences"
        assert packed.residuals is None


def _eager(folder: Path, tokens: list[int]) -> torch.Tensor:
    """The logits of the model's own eager forward in float32."""
    options = {"dtype": torch.float32, "experts_implementation": "eager", "attn_implementation": "eager"}
    model = find_model_class(load_config(Checkpoint.open(folder))).from_pretrained(folder, **options).eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).logits[0].double()


def test_queries_that_are_scaled_by_position_keep_their_code_and_are_right_behind_the_boundary():
    # Queries of mistral4 are scaled by 1 + beta * log(1 + floor(position / original maximum)).
    with start("mistral4", "f32") as runtime:
        host = opened(runtime, "mistral4")
        assert {finding.operator for finding in layers(host)} == {""}
        assert all("reads position_ids" in finding.reason for finding in layers(host))
        assert host.report.not_independent == ""
        tokens = prompt(4 * ORIGINAL_MAX + 9)
        found = logits_of(host.packed, tokens, [50]).double()
    eager = _eager(checkpoint("mistral4", "f32"), tokens)
    assert ((found - eager).abs().amax(-1) / eager.std()).max() < 1e-5


def test_a_limit_that_only_a_row_along_weights_reaches_is_kept(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(checkpoint("olmoe", "f32"), tmp_path / "olmoe")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    layer = "model.layers.0"
    weight = tensors[f"{layer}.self_attn.v_proj.weight"][5]
    along = weight / tensors[f"{layer}.input_layernorm.weight"]
    tensors["model.embed_tokens.weight"][7] = along
    save_file(tensors, file, {"format": "pt"})
    reached = float(weight.square().sum() / along.square().mean().sqrt())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"clip_qkv": reached / 2}))
    with ExpertRuntime.start(Topology.local(1, threads=1), model=folder) as runtime:
        host = open_host(folder, runtime)
        assert host.packed is not None
        assert {finding.operator for finding in layers(host)} == {""}, host.report.lines()
        assert all("such as a limit" in finding.reason for finding in layers(host))
        found = logits_of(host.packed, [3, 7, 9]).double()
    eager = _eager(folder, [3, 7, 9])
    assert ((found - eager).abs().amax(-1) / eager.std()).max() < 1e-5


def test_a_model_whose_layers_ask_for_lengths_keeps_one_sequence(monkeypatch):
    import transformers.models.qwen3_moe.modeling_qwen3_moe as qwen3_moe

    right = qwen3_moe.Qwen3MoeAttention.forward

    def forward(self: Any, hidden_states: torch.Tensor, *, past_key_values: Any = None, **options: Any) -> Any:
        seen = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
        attended, weights = right(self, hidden_states, past_key_values=past_key_values, **options)
        return attended * (1 + 0.1 * (seen > 0)), weights

    monkeypatch.setattr(qwen3_moe.Qwen3MoeAttention, "forward", forward)
    with start("qwen3_moe", "f32") as runtime:
        host = open_host(checkpoint("qwen3_moe", "f32"), runtime)
        assert host.packed is None
        assert "asks the cache for get_seq_length" in host.report.not_paged
        assert "Qwen3MoeAttention (model.layers.0.self_attn)" in host.report.not_paged


def _behind_boundary(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Wrapper:
    """What a model's body gives is changed by the positions of its rows."""

    def wrap(right: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: Any, *, position_ids: torch.Tensor, **options: Any) -> Any:
            found = right(self, position_ids=position_ids, **options)
            found.last_hidden_state = change(found.last_hidden_state, position_ids)
            return found

        return forward

    return wrap


def _limited_logits(right: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, **options: Any) -> Any:
        found = right(self, **options)
        found.logits = found.logits.clamp(-LIMIT, LIMIT)
        return found

    return forward


# What stands around the layers computes something else than the loop does.
AROUND: dict[str, tuple[str, Wrapper]] = {
    "scaled past a position": (
        "Qwen3MoeModel", _behind_boundary(lambda out, positions: out * (1 + 0.1 * (positions >= BOUNDARY))[..., None]),
    ),
    "limited logits": ("Qwen3MoeForCausalLM", _limited_logits),
}  # fmt: skip


@pytest.mark.parametrize("name", AROUND)
def test_a_model_that_computes_something_else_around_its_layers_keeps_its_own_loop(name, monkeypatch):
    import transformers.models.qwen3_moe.modeling_qwen3_moe as qwen3_moe

    kind, wrap = AROUND[name]
    owner = getattr(qwen3_moe, kind)
    monkeypatch.setattr(owner, "forward", wrap(owner.forward))
    with start("qwen3_moe", "f32") as runtime:
        host = opened(runtime, "qwen3_moe")
        assert {finding.operator for finding in layers(host)} == {"layer"}
        assert host.packed.loop is None


def test_rows_that_depend_on_others_behind_a_position_only_are_named(monkeypatch):
    import transformers.models.mistral4.modeling_mistral4 as mistral4

    right = mistral4.get_llama_4_attn_scale
    monkeypatch.setattr(
        mistral4, "get_llama_4_attn_scale",
        lambda positions, *sizes: right(positions, *sizes) * (1 + 1e-3 * (positions.max() >= BOUNDARY)),
    )  # fmt: skip
    with start("mistral4", "f32") as runtime:
        host = opened(runtime, "mistral4")
        assert "layers.0.self_attn" in host.report.not_independent
        assert "at positions" in host.report.not_independent
