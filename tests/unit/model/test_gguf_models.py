"""GGUF files as models: layers, formats, split files; the host's weights are those written; what
cannot be read is named.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re

import pytest

from dflash_moe.errors import CheckpointError, UnsupportedError
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.make import MakeOptions, make_checkpoint

gguf = pytest.importorskip("gguf", reason="the gguf package is an extra of the tests")
pytestmark = pytest.mark.transformers


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen2_moe", "minimax_m2", "gpt_oss"])
def source(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    options = MakeOptions(
        request.param, num_layers=2, hidden_size=256, num_experts=4, top_k=2, moe_intermediate_size=256, dtype="f32", seed=1
    )
    make_checkpoint(options, directory)
    return directory


def write(source, path, *args, **more):
    from bench.models.gguf_files import write_gguf

    return write_gguf(source, path, *args, **more)


def test_the_hosts_weights_are_those_of_the_file(source, tmp_path):
    import torch

    from dflash_moe.integrations.host_weights import load_weights
    from dflash_moe.model.architecture import find_model_class, load_config

    def loaded(path):
        checkpoint = Checkpoint.open(path)
        model_class = find_model_class(load_config(checkpoint))
        model, missing = load_weights(model_class, checkpoint, has_experts=True, dtype=torch.float32)
        assert missing == []
        return model

    ours, theirs = loaded(write(source, tmp_path / "m.gguf", "f32")), loaded(source)
    expected = theirs.state_dict()
    assert type(ours) is type(theirs)
    assert ours.state_dict().keys() == expected.keys()
    assert [name for name, value in ours.state_dict().items() if not torch.equal(value, expected[name])] == []
    for field in (
        "moe_intermediate_size", "num_experts", "num_experts_per_tok", "num_hidden_layers", "vocab_size", "head_dim",
        "layer_types", "num_attention_heads", "num_key_value_heads", "sliding_window", "tie_word_embeddings", "rope_parameters",
    ):  # fmt: skip
        assert getattr(ours.config, field, None) == getattr(theirs.config, field, None), field


def test_a_part_of_each_head_is_rotated_where_the_file_says_so(tmp_path):
    import json

    from dflash_moe.model.architecture import load_config

    source = tmp_path / "hf"
    make_checkpoint(MakeOptions("minimax_m2", num_layers=1, hidden_size=64, num_experts=2, top_k=1, dtype="f32"), source)
    config = source / "config.json"
    settings = json.loads(config.read_text())
    settings["rope_parameters"]["partial_rotary_factor"] = 0.5
    config.write_text(json.dumps(settings))
    found = load_config(Checkpoint.open(write(source, tmp_path / "m.gguf", "f32")))
    assert found.rope_parameters["partial_rotary_factor"] == 0.5


def test_inspection_has_one_row_for_layers_that_are_alike_and_the_sizes_of_the_plan(tmp_path, capsys):
    """Every second layer has its down_proj in another format, as llama.cpp's mixed files do."""
    from dflash_moe.cli.main import run
    from dflash_moe.config import Settings, format_bytes
    from dflash_moe.forward.fitted import fit_model
    from dflash_moe.model.inspect import inspect_model
    from dflash_moe.model.sizing import model_sizes

    made = MakeOptions(
        "qwen3_moe", num_layers=12, hidden_size=256, num_experts=2, top_k=1, moe_intermediate_size=256, dtype="f32"
    )
    make_checkpoint(made, tmp_path / "hf")
    path = write(tmp_path / "hf", tmp_path / "m.gguf", "q4_k", down="q6_k", host="q4_k", every_second=True)
    assert run(["model", "inspect", str(path)]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if re.match(r"^ +\d+ +2 +1 ", line)]
    assert [(row[0], row[7], " ".join(row[12:])) for row in rows] == [
        ("6", "q4_k+q6_k", "0, 2, 4, ..., 10"), ("6", "q4_k", "1, 3, 5, ..., 11"),
    ]  # fmt: skip
    found, plan = inspect_model(path), fit_model(model_sizes(Checkpoint.open(path)), Settings())
    assert (found.host_bytes, found.host_bytes_on_card) == (plan.in_memory.dense_bytes, plan.on_card.dense_bytes)
    assert f"other weights, at the host: {format_bytes(found.host_bytes)}, {format_bytes(found.host_bytes_on_card)} in" in out
    assert found.host_bytes < found.host_bytes_on_card


def test_layers_keep_the_formats_they_are_stored_in(source, tmp_path):
    from dflash_moe.model.spec import model_spec

    spec = model_spec(write(source, tmp_path / "m.gguf", "q4_k", down="q6_k"))
    layer = spec.layers[1]
    assert (spec.dtype, layer.name, layer.num_experts, layer.top_k) == ("bf16", "model.layers.1.mlp.experts", 4, 2)
    bias_bytes = 3 * 256 * 4 if layer.ffn.has_down_bias else 0
    assert (layer.weight_dtype, layer.expert_bytes) == ("q4_k+q6_k", 256 * (2 * 144 + 210) + bias_bytes)
    packed = 256 * (2 * 148 + 210) + bias_bytes  # a worker's six-bit scales take a byte each
    assert (layer.resident_dtype("int8"), layer.resident_bytes("auto")) == ("q4_k+q6_k", packed)
    assert layer.ffn.gate_tensor.name == "blk.1.ffn_gate_exps.weight"
    assert (layer.ffn.gate_tensor.part, layer.ffn.gate_tensor.is_transposed) == ("all", False)


def test_a_split_file_is_the_same_model(source, tmp_path):
    from bench.models.gguf_files import split_gguf
    from dflash_moe.model.spec import model_spec

    whole = write(source, tmp_path / "m.gguf", "q8_0")
    first = split_gguf(whole, tmp_path, 3)
    assert model_spec(first).layers == model_spec(whole).layers
    last = Checkpoint.open(first.with_name("m-00003-of-00003.gguf"))
    assert last.fingerprint() == Checkpoint.open(whole).fingerprint()
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 parts are missing, first m-00002-of-00003\.gguf"):
        Checkpoint.open(first)


def test_inspection_names_the_class_and_counts_layers_that_fit(source, tmp_path, capsys):
    from dflash_moe.cli.main import run
    from dflash_moe.model.inspect import inspect_model

    found = inspect_model(write(source, tmp_path / "m.gguf", "q8_0"))
    assert found.architectures == inspect_model(source).architectures
    layer = found.resident_bytes()["auto"] // 2
    assert [found.layers_within(size) for size in (layer - 1, layer, 2 * layer - 1, 2 * layer)] == [0, 1, 1, 2]
    assert run(["model", "inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{found.architectures[0]} (")
    assert re.search(r"routed experts: [\d.]+ MiB, ", out)
    assert "2 of 2" in out


def test_a_part_that_is_not_what_its_name_says_is_refused(source, tmp_path):
    from bench.models.gguf_files import split_gguf

    first = split_gguf(write(source, tmp_path / "m.gguf", "q8_0"), tmp_path, 3)
    second, third = first.with_name("m-00002-of-00003.gguf"), first.with_name("m-00003-of-00003.gguf")
    aside = second.rename(tmp_path / "aside")
    third.rename(second)
    aside.rename(third)
    with pytest.raises(CheckpointError, match=r"is part 3 of 3 by its metadata, and its name makes it part 2 of 3; give all"):
        Checkpoint.open(first)
    alone = third.rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"is part 2 of 3 by its metadata, and its name is that of a whole model"):
        Checkpoint.open(alone)


def test_a_part_that_was_cut_short_is_refused(source, tmp_path):
    from bench.models.gguf_files import split_gguf

    first = split_gguf(write(source, tmp_path / "m.gguf", "q8_0"), tmp_path, 3)
    second = first.with_name("m-00002-of-00003.gguf")
    second.write_bytes(second.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf: tensor .* it is truncated - download or copy it again"):
        Checkpoint.open(first)


def test_a_directory_with_one_model_is_that_model_and_with_two_asks_which(source, tmp_path):
    write(source, tmp_path / "a.gguf", "q8_0")
    assert Checkpoint.open(tmp_path).path == tmp_path / "a.gguf"
    write(source, tmp_path / "b.gguf", "q4_0")
    with pytest.raises(CheckpointError, match=r"2 GGUF models \(a\.gguf, b\.gguf\); pass the path of one"):
        Checkpoint.open(tmp_path)


def tiny_file(path, architecture: str, num_experts: int = 0):
    import numpy as np

    writer = gguf.GGUFWriter(str(path), architecture)
    if num_experts:
        writer.add_expert_count(num_experts)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grok", r"GGUF architecture 'grok' is not supported: transformers has no class of it"),
        ("qwen3mo", r"GGUF architecture 'qwen3mo' is not supported; the nearest are qwen3moe, .*; supported: afmoe, .*"),
        ("zzz", r"GGUF architecture 'zzz' is not supported; supported: afmoe, .*"),
    ],
)
def test_an_architecture_that_is_not_supported_is_named(tmp_path, name, expected):
    from dflash_moe.model.spec import model_spec

    with pytest.raises(UnsupportedError, match=expected):
        model_spec(tiny_file(tmp_path / "m.gguf", name, num_experts=4))


def test_missing_metadata_is_named(tmp_path):
    from dflash_moe.model.spec import model_spec

    with pytest.raises(CheckpointError, match=r"metadata 'qwen3moe\.context_length' is missing"):
        model_spec(tiny_file(tmp_path / "m.gguf", "qwen3moe"))


@pytest.mark.parametrize(("number", "name"), [(15, "Q8_K"), (41, "Q1_0"), (42, "Q2_0")])
def test_types_that_are_not_read_are_refused_by_name(source, tmp_path, number, name):
    from dflash_moe.model.spec import model_spec

    path = write(source, tmp_path / "m.gguf", "f32")
    data = bytearray(path.read_bytes())
    tensor = b"blk.0.ffn_up_exps.weight"
    at = data.index(tensor) + len(tensor) + 4 + 3 * 8
    data[at : at + 4] = number.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(UnsupportedError, match=rf"'blk\.0\.ffn_up_exps\.weight' has format {name}; supported: .*IQ3_XXS"):
        model_spec(path)


@pytest.mark.parametrize("name", ["iq2_xs", "iq1_m", "tq1_0", "nvfp4"])
def test_the_hosts_weights_in_low_bit_types_are_what_the_package_makes_of_them(source, tmp_path, name):
    import numpy as np

    checkpoint = Checkpoint.open(write(source, tmp_path / "m.gguf", "f32", host=name))
    tensor = "blk.0.attn_k.weight"
    rows = checkpoint.raw(tensor).reshape(checkpoint.stored[tensor].shape[0], -1)
    expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[name.upper()])
    np.testing.assert_array_equal(checkpoint.values(tensor), expected)


def test_nvfp4_with_a_further_scale_is_refused_by_name(tmp_path):
    from types import SimpleNamespace

    from dflash_moe.model.formats.stored_tensor import TensorInfo
    from dflash_moe.model.gguf_architectures.reading import refuse_scaled_nvfp4

    weight, scale = TensorInfo(0, 0, "NVFP4", (4, 64), 144), TensorInfo(0, 160, "F32", (1,), 4)
    stored = {"blk.0.attn_k.weight": weight, "blk.0.attn_q.scale": scale}
    checkpoint = SimpleNamespace(files=(tmp_path / "m.gguf",), stored=stored)
    refuse_scaled_nvfp4(checkpoint)
    stored["blk.0.attn_k.scale"] = scale
    with pytest.raises(
        UnsupportedError, match=r"m\.gguf: tensor 'blk\.0\.attn_k\.weight' has format NVFP4 with a further scale"
    ):
        refuse_scaled_nvfp4(checkpoint)
