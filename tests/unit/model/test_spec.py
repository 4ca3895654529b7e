"""model_spec: layers, formulas and tensor names come from the model; what cannot be served is
refused by class and field.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import json

import pytest

from bench.models.families import tiny_options
from dflash_moe.errors import CheckpointError, ConfigError, UnsupportedError
from dflash_moe.model.make import build_model, make_checkpoint
from dflash_moe.model.spec import layer_numbers, model_spec

pytestmark = pytest.mark.transformers


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints by architecture, made once."""
    found = {}

    def make(arch):
        if arch not in found:
            found[arch] = tmp_path_factory.mktemp(arch)
            make_checkpoint(tiny_options(arch), found[arch])
        return found[arch]

    return make


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def own_copy(made, tmp_path):
    """A copy of a made checkpoint that a test may damage."""

    def copy(arch):
        for path in made(arch).iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        return tmp_path

    return copy


def test_experts_stored_one_by_one_are_found_by_template(made):
    spec = model_spec(made("mixtral"))
    ffn = spec.layers[1].ffn
    assert [layer.index for layer in spec.layers] == [0, 1]
    assert (spec.dtype, spec.layers[0].weight_dtype) == ("bf16", "bf16")
    assert (ffn.in_size, ffn.intermediate_size, ffn.out_size, ffn.gate, ffn.activation) == (96, 40, 96, "gated", "silu")
    assert ffn.gate_tensor.name == "model.layers.1.block_sparse_moe.experts.{expert}.w1.weight"
    assert ffn.up_tensor.name == "model.layers.1.block_sparse_moe.experts.{expert}.w3.weight"
    assert ffn.down_tensor.name == "model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"
    assert spec.layers[0].expert_bytes == 2 * 3 * 96 * 40


def test_packed_transposed_interleaved_experts_with_biases_are_found(made):
    ffn = model_spec(made("gpt_oss")).layers[0].ffn
    assert (ffn.gate, ffn.alpha, ffn.up_offset, ffn.gate_max, ffn.up_limit) == ("clamped_swiglu", 1.702, 1.0, 7.0, 7.0)
    assert (ffn.gate_tensor.is_packed, ffn.gate_tensor.is_transposed, ffn.gate_tensor.part) == (True, True, "even")
    assert ffn.up_tensor.part == "odd"
    assert (ffn.down_tensor.is_transposed, ffn.down_tensor.part) == (True, "all")
    assert (ffn.gate_bias_tensor.part, ffn.up_bias_tensor.part, ffn.down_bias_tensor.part) == ("even", "odd", "all")


def test_packed_halves_are_found(tmp_path):
    model = build_model(tiny_options("qwen3_moe"))
    model.save_pretrained(tmp_path, save_original_format=False)
    ffn = model_spec(tmp_path).layers[0].ffn
    assert ffn.gate_tensor.name == "model.layers.0.mlp.experts.gate_up_proj"
    assert (ffn.gate_tensor.part, ffn.up_tensor.part, ffn.down_tensor.part) == ("first_half", "second_half", "all")


def test_layers_are_numbered_as_the_decoder_numbers_them_dense_ones_left_out(made):
    assert [layer.index for layer in model_spec(made("deepseek_v3")).layers] == [1]


def test_a_checkpoint_of_the_base_model_is_found_without_its_prefix(tmp_path):
    build_model(tiny_options("qwen3_moe")).model.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["Qwen3MoeForCausalLM"])
    assert model_spec(tmp_path).layers[0].ffn.up_tensor.name == "layers.0.mlp.experts.{expert}.up_proj.weight"


def test_layers_of_two_stacks_are_numbered_by_their_place():
    assert layer_numbers(("a.layers.1.experts", "a.layers.3.experts")) == (1, 3)
    assert layer_numbers(("a.layers.1.experts", "b.layers.1.experts")) == (0, 1)
    assert layer_numbers(("encoder.experts",)) == (0,)


def test_the_models_dtype_can_be_chosen_and_weights_stay_as_stored(made):
    spec = model_spec(made("mixtral"), "f32")
    assert (spec.dtype, spec.layers[0].weight_dtype) == ("f32", "bf16")
    with pytest.raises(ConfigError, match="'int8' is not allowed"):
        model_spec(made("mixtral"), "int8")


def test_a_quantised_checkpoint_is_refused_by_class_and_field(own_copy):
    directory = own_copy("mixtral")
    edit_config(directory, quantization_config={"quant_method": "fp8", "weight_block_size": [64, 128]})
    with pytest.raises(UnsupportedError, match=r"MixtralConfig\.quantization_config\.weight_block_size: found \[64, 128\]"):
        model_spec(directory)
    edit_config(directory, quantization_config={"quant_method": "gptq", "bits": 3})
    with pytest.raises(UnsupportedError, match=r"MixtralConfig\.quantization_config\.bits: found 3"):
        model_spec(directory)
    edit_config(directory, quantization_config={"quant_method": "aqlm"})
    with pytest.raises(UnsupportedError, match=r"MixtralConfig\.quantization_config: method aqlm"):
        model_spec(directory)


def test_an_unknown_activation_is_refused_by_class_and_field(own_copy):
    directory = own_copy("mixtral")
    edit_config(directory, hidden_act="mish")
    with pytest.raises(UnsupportedError, match=r"MixtralExperts\.act_fn: found MishActivation"):
        model_spec(directory)


def test_a_model_without_experts_is_refused(tmp_path):
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2, vocab_size=32
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM: the model is dense: it has no experts"):
        model_spec(tmp_path)


def test_experts_off_the_interface_are_refused_by_class(tmp_path):
    import transformers

    config = transformers.SwitchTransformersConfig(
        num_layers=2, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, d_model=32, d_kv=8,
        d_ff=32, num_heads=2, num_experts=2, vocab_size=32,
    )  # fmt: skip
    transformers.SwitchTransformersForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"SwitchTransformers\w+ \(.*\): its experts are not on"):
        model_spec(tmp_path)


def test_a_post_expert_norm_is_refused_by_class_and_field(made, monkeypatch):
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    monkeypatch.setattr(MixtralExperts, "__init__", _with(MixtralExperts, has_post_expert_norm=True))
    with pytest.raises(UnsupportedError, match=r"MixtralExperts\.has_post_expert_norm"):
        model_spec(made("mixtral"))


def test_an_unknown_gate_is_refused_by_class_and_field(made, monkeypatch):
    import torch
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    def odd_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.tanh(gate) * up

    monkeypatch.setattr(MixtralExperts, "_apply_gate", odd_gate)
    with pytest.raises(UnsupportedError, match=r"MixtralExperts\._apply_gate: computes none of the known gates"):
        model_spec(made("mixtral"))


def test_a_forward_that_computes_something_else_is_found_by_the_probe(made, monkeypatch):
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    eager = MixtralExperts.forward.__wrapped__

    def squared_weights(self, hidden, ids, weights):
        return eager(self, hidden, ids, weights * weights)

    def forward(self, hidden, ids, weights):
        return squared_weights(self, hidden, ids, weights)

    forward.__wrapped__ = squared_weights
    monkeypatch.setattr(MixtralExperts, "forward", forward)
    with pytest.raises(UnsupportedError, match=r"MixtralExperts\.forward: differs from the formula"):
        model_spec(made("mixtral"))


def test_weights_of_another_model_are_refused(own_copy):
    directory = own_copy("mixtral")
    edit_config(directory, intermediate_size=48)
    with pytest.raises(CheckpointError, match=r"w1\.weight' has shape \[40, 96\], expected \[48, 96\]"):
        model_spec(directory)


def test_a_directory_without_config_is_refused(tmp_path, made):
    (tmp_path / "model.safetensors").write_bytes((made("mixtral") / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"it has weights but no config\.json"):
        model_spec(tmp_path)


def _with(experts_class, **attributes):
    original = experts_class.__init__

    def __init__(self, *arguments, **options):  # noqa: N807 - it replaces one
        original(self, *arguments, **options)
        for name, value in attributes.items():
            setattr(self, name, value)

    return __init__


def test_experts_with_a_limit_that_usual_rows_do_not_reach_are_refused(made, monkeypatch):
    from transformers.models.mixtral import modeling_mixtral

    right = modeling_mixtral.MixtralExperts.forward

    class Limited:
        """The experts' activation, limited far above what gates give for usual rows."""

        def __init__(self, activation):
            self.activation = activation

        def __call__(self, gate):
            return self.activation(gate).clamp(max=5000)

    def forward(self, *arguments):
        limited = copy.copy(self)
        limited.__dict__["_modules"] = {**self._modules}
        limited.__dict__["_modules"].pop("act_fn", None)
        limited.__dict__["act_fn"] = Limited(self.act_fn)
        return right.__wrapped__(limited, *arguments)

    forward.__wrapped__ = forward
    monkeypatch.setattr(modeling_mixtral.MixtralExperts, "forward", forward)
    with pytest.raises(UnsupportedError, match="MixtralExperts.forward: differs from the formula"):
        model_spec(made("mixtral"))
