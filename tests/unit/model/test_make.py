"""model make: real architectures at small sizes, routing that uses all experts, a tokenizer that
takes any text.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses

import pytest

from bench.models.families import REQUIRED, tiny_options
from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.inspect import inspect_model
from dflash_moe.model.make import MakeOptions, build_config, make_checkpoint, write_tokenizer

pytestmark = pytest.mark.transformers


def test_routing_is_even_and_the_seed_decides_the_weights(tmp_path):
    options = tiny_options("qwen3_moe")
    made = make_checkpoint(options, tmp_path / "a")
    assert made.least_used > 1 / 3
    assert made.most_used < 3
    make_checkpoint(options, tmp_path / "b")
    make_checkpoint(dataclasses.replace(options, seed=2), tmp_path / "c")
    prints = [Checkpoint.open(tmp_path / name).fingerprint() for name in "abc"]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("arch", REQUIRED)
def test_sizes_reach_the_configuration(arch):
    text = build_config(MakeOptions(arch, 3, 128, 12, 3, 96)).get_text_config()
    assert (text.num_hidden_layers, text.hidden_size, text.num_experts_per_tok) == (3, 128, 3)
    fields = text.to_dict()
    assert 12 in [fields.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")]
    assert fields.get("moe_intermediate_size", fields["intermediate_size"]) == 96


def test_parts_that_no_text_reaches_are_small():
    config = build_config(tiny_options("qwen3_vl_moe"))
    assert (config.vision_config.depth, config.vision_config.hidden_size) == (1, 64)
    assert config.vision_config.out_hidden_size == config.text_config.hidden_size == 96


def test_further_fields_win_over_sizes():
    text = build_config(tiny_options("mixtral"), {"num_experts_per_tok": 1, "sliding_window": 21}).get_text_config()
    assert (text.num_experts_per_tok, text.sliding_window, text.hidden_size) == (1, 21, 96)


@pytest.mark.parametrize("text", ["plain", "Grüße, 世界 🎉\n\ttab\x00\x7f", " leading and  double ", ""])
def test_the_tokenizer_has_one_token_per_byte_and_loses_nothing(tmp_path, text):
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    token_ids = tokenizer(text)["input_ids"]
    assert bytes(token_ids) == text.encode()
    assert tokenizer.decode(token_ids, clean_up_tokenization_spaces=False) == text


def test_an_unknown_architecture_gets_a_suggestion():
    with pytest.raises(ConfigError, match="--arch 'qwen3moe': transformers has no such model type; did you mean qwen3_moe"):
        build_config(MakeOptions("qwen3moe"))


def test_a_dense_architecture_is_refused():
    with pytest.raises(ConfigError, match="LlamaConfig has no number of experts"):
        build_config(MakeOptions("llama"))


def test_sizes_an_architecture_does_not_take_are_refused_by_class():
    with pytest.raises(UnsupportedError, match="ZayaConfig: does not take the sizes"):
        build_config(MakeOptions("zaya", top_k=2))


@pytest.mark.parametrize(
    "changes", [{"hidden_size": 33}, {"num_layers": 0}, {"top_k": 17}, {"num_experts": 0, "top_k": 0}, {"dtype": "int8"}]
)
def test_an_impossible_size_is_refused_by_option(changes):
    with pytest.raises(ConfigError, match=f"--{next(iter(changes)).replace('num_layers', 'layers').replace('_', '-')}"):
        dataclasses.replace(MakeOptions("mixtral"), **changes).check()


def test_a_directory_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "precious").touch()
    with pytest.raises(ConfigError, match="not an empty directory"):
        make_checkpoint(tiny_options("mixtral"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_inspection_says_what_is_there(tmp_path):
    make_checkpoint(tiny_options("deepseek_v3"), tmp_path)
    found = inspect_model(tmp_path)
    assert found.reason is None
    assert found.expert_bytes == 8 * 3 * 96 * 40 * 2
    assert found.host_bytes == found.checkpoint_bytes - found.expert_bytes > 0
    assert found.fits() == {4: 1.0}
    shown = found.to_json()
    assert (shown["supported"], shown["dtype"], shown["layers"][0]["index"]) == (True, "bf16", 1)
