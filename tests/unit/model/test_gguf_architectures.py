"""Every GGUF architecture as llama.cpp's converter writes it: our reader finds the numbers that the
source checkpoint held, and logits are its. A wrong permutation, a missing `+ 1` and a swapped gate
and up are each found.

The files are made by bench/campaigns/gguf_architectures.py.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

gguf = pytest.importorskip("gguf", reason="the gguf package is an extra of the tests")
pytestmark = pytest.mark.transformers

GOLDENS = Path(__file__).parents[2] / "golden" / "gguf"
NAMES = sorted(path.name.removesuffix(".gguf.xz") for path in GOLDENS.glob("*.gguf.xz"))
# llama.cpp's converter adds one to norms of this architecture.
OFFSET = "qwen35moe"


def unpacked(name, folder):
    from bench.models.gguf_goldens import unpack

    return unpack(GOLDENS, name, folder / f"{name}.gguf")


def differing(name, folder):
    """Returns the names of the parameters that our reader finds otherwise than the source has."""
    from bench.models.gguf_goldens import Golden, digests, load_eager_model

    expected = Golden.read(GOLDENS, name).digests
    found = digests(load_eager_model(unpacked(name, folder)))
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))


def test_every_architecture_with_experts_is_read_or_refused_with_a_reason():
    from dflash_moe.model.gguf_architectures.reading import supported
    from dflash_moe.model.gguf_architectures.refused import REFUSED

    experts = {gguf.MODEL_TENSOR.FFN_UP_EXP, gguf.MODEL_TENSOR.FFN_GATE_UP_EXP, gguf.MODEL_TENSOR.FFN_DOWN_EXP}
    known = {gguf.MODEL_ARCH_NAMES[arch] for arch, tensors in gguf.MODEL_TENSORS.items() if experts & set(tensors)}
    assert known
    assert sorted(known - set(supported()) - REFUSED.keys()) == []
    assert sorted(REFUSED.keys() & set(supported())) == []


def test_the_documents_table_is_that_of_the_code():
    from dflash_moe.model.gguf_architectures.reading import ARCHITECTURES
    from dflash_moe.model.gguf_architectures.refused import REFUSED

    text = (GOLDENS.parents[2] / "docs" / "howto" / "weight_formats.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z0-9_.-]+)` \| (.+) \|$", text, re.MULTILINE))
    assert {name: reason for name, reason in rows.items() if name in REFUSED} == REFUSED
    assert ARCHITECTURES.keys() <= rows.keys()


def test_there_is_a_file_for_every_source():
    from bench.models.gguf_sources import SOURCES

    assert sorted(SOURCES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_that_of_the_source(name, tmp_path):
    from transformers import AutoConfig

    from bench.models.gguf_goldens import (
        Golden,
        digests,
        load_eager_model,
        logits,
        logits_excess,
        parameters,
    )  # fmt: skip
    from dflash_moe.model.architecture import find_model_class

    golden = Golden.read(GOLDENS, name)
    ours = load_eager_model(unpacked(name, tmp_path))
    assert digests(ours) == golden.digests
    config = AutoConfig.for_model(**golden.config)
    theirs = find_model_class(config)._from_config(config).float().eval()
    theirs.set_experts_implementation("eager")
    for parameter, value in parameters(theirs).items():
        value.copy_(parameters(ours)[parameter])
    theirs.tie_weights()
    assert logits_excess(logits(ours), logits(theirs), config.get_text_config().num_hidden_layers) == []


@pytest.mark.parametrize("name", NAMES)
def test_workers_find_the_experts(name, tmp_path):
    from dflash_moe.model.gguf_architectures.gguf_experts import gguf_experts
    from dflash_moe.model.spec import model_spec

    path = unpacked(name, tmp_path)
    spec, without_torch = model_spec(path), gguf_experts(path)
    assert [layer.index for layer in spec.layers] == [layer.index for layer in without_torch.spec.layers]
    for layer, other in zip(spec.layers, without_torch.spec.layers, strict=True):
        assert (layer.num_experts, layer.top_k, layer.weight_dtype) == (other.num_experts, other.top_k, "f32")
        assert (layer.ffn.in_size, layer.ffn.intermediate_size) == (other.ffn.in_size, other.ffn.intermediate_size)


def test_a_wrong_permutation_is_found(tmp_path, monkeypatch):
    from dflash_moe.model.gguf_architectures import conversions

    monkeypatch.setattr(conversions, "_halves", lambda inputs, num_heads: inputs[0])
    for name in ("llama", "granitemoe"):
        assert differing(name, tmp_path) == [
            f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "kq"
        ]


def test_a_missing_offset_of_norms_is_found(tmp_path, monkeypatch):
    from transformers.integrations.gguf.gguf_conversion_mapping import SubtractOne

    monkeypatch.setattr(SubtractOne, "__init__", lambda self, offset=0.0: setattr(self, "offset", 0.0))
    found = differing(OFFSET, tmp_path)
    assert found
    assert all(name.endswith("norm.weight") for name in found)


@pytest.mark.parametrize("name", NAMES)
def test_a_swapped_gate_and_up_is_found(name, tmp_path, monkeypatch):
    from dflash_moe.model.gguf_architectures import conversions

    if name == OFFSET:
        pytest.skip("transformers' own table joins gate and up")
    monkeypatch.setattr(conversions, "_GATE_AND_UP", conversions._GATE_AND_UP[::-1])
    found = differing(name, tmp_path)
    assert found
    assert all("experts.gate_up_proj" in name for name in found)


def test_layers_that_predict_further_tokens_are_left_out_and_named(tmp_path):
    from dflash_moe.model.inspect import inspect_model

    found = inspect_model(unpacked("glm4moe", tmp_path))
    assert found.left_out == "glm4moe.gguf: layer 2 predicts further tokens (NextN), which is left out"
    assert [layer.index for layer in found.layers] == [1]
    assert inspect_model(unpacked("llama", tmp_path)).left_out is None


def test_a_model_without_experts_is_named(tmp_path):
    from dflash_moe.errors import UnsupportedError
    from dflash_moe.model.spec import model_spec

    path = rewritten(unpacked("llama", tmp_path), tmp_path / "dense.gguf", {"llama.expert_count": 0})
    with pytest.raises(UnsupportedError, match=r"this llama model has no routed experts, so there is nothing to offload"):
        model_spec(path)


@pytest.mark.parametrize(
    ("name", "key", "value", "expected"),
    [
        ("llama", "llama.expert_gating_func", 2, r"expert_gating_func: found 'sigmoid'; .* has softmax"),
        ("dots1", "dots1.expert_gating_func", 1, r"expert_gating_func: found 'softmax'; .* has sigmoid"),
        ("afmoe", "afmoe.expert_weights_norm", False, r"expert_weights_norm: found False; .* norms the weights"),
        ("llama", "llama.rope.freq_base", 9000.0, r"rope_freqs\.weight: found 'factors up to 8'; read are those of Llama 3"),
        ("qwen3moe", "qwen3moe.rope.scaling.type", "dynamic", r"rope\.scaling\.type: found 'dynamic'; read are none,"),
    ],
)
def test_what_a_class_of_transformers_does_not_compute_is_refused(tmp_path, name, key, value, expected):
    from dflash_moe.errors import UnsupportedError
    from dflash_moe.model.spec import model_spec

    path = rewritten(unpacked(name, tmp_path), tmp_path / "other.gguf", {key: value})
    with pytest.raises(UnsupportedError, match=expected):
        model_spec(path)


def rewritten(source, path, changed):
    """Writes `source` as `path` with some metadata changed or added."""
    import numpy as np

    reader = gguf.GGUFReader(str(source))
    writer = gguf.GGUFWriter(str(path), reader.fields["general.architecture"].contents())
    kinds = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.")) and key not in changed:
            writer.add_key_value(key, field.contents(), *field.types[:2])
    for key, value in changed.items():
        writer.add_key_value(key, value, kinds.get(type(value), gguf.GGUFValueType.STRING))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.asarray(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_in_which_keys_and_values_expand_as_one_is_the_same_model(tmp_path):
    """Older files hold the matrix of MLA as published, and the sizes of whole heads."""
    from bench.models.gguf_goldens import Golden, digests, load_eager_model

    name = "deepseek2-v3"
    path = with_joined_latents(unpacked(name, tmp_path), tmp_path / "joined.gguf")
    assert digests(load_eager_model(path)) == Golden.read(GOLDENS, name).digests


def with_joined_latents(source, path):
    import numpy as np

    reader = gguf.GGUFReader(str(source))
    writer = gguf.GGUFWriter(str(path), "deepseek2")
    apart = {field.name: field.contents() for field in reader.fields.values()}
    for key, field in reader.fields.items():
        if key.startswith(("GGUF.", "general.")) or key.endswith("_mla"):
            continue
        value = field.contents()
        if key.endswith(("attention.key_length", "attention.value_length")):
            value = apart[f"{key}_mla"]
        writer.add_key_value(key, value, *field.types[:2])
    tensors = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
    for name, value in tensors.items():
        if name.endswith("attn_k_b.weight"):
            both = np.concatenate([value.transpose(0, 2, 1), tensors[name.replace("_k_b", "_v_b")]], axis=1)
            writer.add_tensor(name.replace("_k_b", "_kv_b"), np.ascontiguousarray(both.reshape(-1, both.shape[-1])))
        elif not name.endswith("attn_v_b.weight"):
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
