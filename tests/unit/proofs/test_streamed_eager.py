"""The eager model with one layer in memory at a time: the same bits as the whole one, for families
of unlike build; what is in memory; and what is loaded whole.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from bench.models.families import tiny_options
from bench.models.quantised_files import write_fp8, write_mxfp4
from dflash_moe.model.make import make_checkpoint

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.transformers

# Dense layers before sparse ones and MLA; linear attention with parameters that a module above
# initialises; biases and inputs before outputs; packed experts, and experts one tensor each.
FAMILIES = ("deepseek_v3", "qwen3_next", "gpt_oss", "qwen3_moe", "mixtral", "granitemoe")
GOLDENS = Path(__file__).parents[2] / "golden" / "gguf"
ARCHITECTURES = sorted(path.name.removesuffix(".gguf.xz") for path in GOLDENS.glob("*.gguf.xz"))


@pytest.fixture
def made(tmp_path):
    def make(arch: str, **changed):
        make_checkpoint(replace(tiny_options(arch), **changed), tmp_path / arch)
        return tmp_path / arch

    return make


def logits(model):
    token_ids = torch.randint(0, 50, (1, 24), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        return model(input_ids=token_ids, use_cache=False).logits


def streamed_and_whole(directory, dtype):
    from dflash_moe.integrations.host_weights import load_whole
    from dflash_moe.proofs.streamed_eager import StreamedEager

    streamed = StreamedEager(directory, dtype)
    return streamed, streamed.run(logits), logits(load_whole(directory, dtype))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("arch", FAMILIES)
def test_a_streamed_model_has_the_bits_of_the_whole_one(arch, dtype, made):
    streamed, found, expected = streamed_and_whole(made(arch, num_layers=3), dtype)
    assert not streamed.whole
    assert torch.equal(found, expected)
    assert (streamed.live, streamed.most_live) == (set(), 1)


def test_tied_embeddings_stay_tied(made):
    from safetensors.torch import load_file, save_file

    directory = made("qwen3_moe")
    tensors = load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    streamed, found, expected = streamed_and_whole(directory, "f32")
    assert streamed.model.lm_head.weight is streamed.model.model.embed_tokens.weight
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("arch", "write"), [("qwen3_moe", write_fp8), ("gpt_oss", write_mxfp4)])
def test_quantised_weights_are_dequantised_layer_by_layer(arch, write, tmp_path):
    make_checkpoint(replace(tiny_options(arch), hidden_size=256, moe_intermediate_size=128), tmp_path / "floats")
    directory = write(tmp_path / "floats", tmp_path / "quantised")
    for dtype in ("f32", "bf16"):
        streamed, found, expected = streamed_and_whole(directory, dtype)
        assert streamed.most_live == 1
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_files_of_llama_cpp_are_streamed_in_every_architecture(name, tmp_path):
    from bench.models.gguf_goldens import unpack

    path = unpack(GOLDENS, name, tmp_path / "model.gguf")
    for dtype in ("f32", "bf16"):
        streamed, found, expected = streamed_and_whole(path, dtype)
        assert (streamed.whole, streamed.most_live) == ("", 1)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("experts", ["q4_k", "q6_k", "iq4_xs"])
def test_blocks_are_dequantised_expert_by_expert(experts, tmp_path):
    pytest.importorskip("gguf")
    from bench.models.gguf_files import write_gguf

    make_checkpoint(replace(tiny_options("qwen3_moe"), hidden_size=256, moe_intermediate_size=256), tmp_path / "floats")
    path = write_gguf(tmp_path / "floats", tmp_path / "model.gguf", experts, host="q8_0")
    streamed, found, expected = streamed_and_whole(path, "bf16")
    assert streamed.most_live == 1
    assert torch.equal(found, expected)


def test_between_calls_no_layer_has_weights(made):
    from dflash_moe.proofs.streamed_eager import StreamedEager

    streamed = StreamedEager(made("qwen3_moe", num_layers=4), "f32")
    seen = []
    model = streamed.model
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(
            lambda *_: seen.append([not one.mlp.experts.down_proj.is_meta for one in model.model.layers])
        )
    streamed.run(logits)
    assert seen == [[at == one for at in range(4)] for one in range(4)]
    in_layers = [value for name, value in model.named_parameters() if ".layers." in name]
    assert all(value.is_meta for value in in_layers)
    assert not model.lm_head.weight.is_meta


def test_an_error_in_a_layer_leaves_no_layer_in_memory(made):
    from dflash_moe.proofs.streamed_eager import StreamedEager

    streamed = StreamedEager(made("qwen3_moe"), "f32")
    streamed.model.model.layers[1].mlp.register_forward_hook(lambda *_: (_ for _ in ()).throw(ValueError("planted")))
    with pytest.raises(ValueError, match="planted"):
        streamed.run(logits)
    assert streamed.live == set()


def test_a_model_that_reads_weights_of_a_layer_it_does_not_call_is_loaded_whole(made, caplog):
    from dflash_moe.proofs.streamed_eager import StreamedEager

    directory = made("qwen3_moe")
    streamed = StreamedEager(directory, "f32")

    def peeking(model):
        return logits(model) + model.model.layers[0].mlp.experts.down_proj.sum()

    with caplog.at_level(logging.WARNING):
        found = streamed.run(peeking)
    assert torch.isfinite(found).all()
    assert "it reads weights of a layer that it does not call" in streamed.whole
    assert "Qwen3MoeForCausalLM: loaded whole" in caplog.text


def test_a_model_without_layers_that_can_be_loaded_alone_is_loaded_whole(made, monkeypatch):
    from dflash_moe.proofs import streamed_eager

    monkeypatch.setattr(streamed_eager, "find_layers", lambda *_: {})
    streamed, found, expected = streamed_and_whole(made("mixtral"), "f32")
    assert "no list of layers" in streamed.whole
    assert torch.equal(found, expected)
