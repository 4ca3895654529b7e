"""Checkpoint: headers are believed only where they agree with themselves and the file; an expert's
sources point at its values.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dflash_moe.errors import CheckpointError, UnsupportedError
from dflash_moe.model.checkpoint import Checkpoint, shard_fingerprint
from dflash_moe.model.expert_tensors import check_expert, expert_sources
from dflash_moe.model.ffn import FfnSpec, TensorPattern

H, W, E = 6, 4, 3  # hidden, intermediate width, experts


def write(path: Path, header: dict | bytes, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    header, data = {}, b""
    for name, value in tensors.items():
        values = value.astype(np.float32)
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [len(data), len(data) + values.nbytes]}
        data += values.tobytes()
    return write(path, header, data)


def entry(begin: int, end: int, **changes) -> dict:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end], **changes}


def read_matrix(source) -> np.ndarray:
    """What a worker would read, element by element."""
    file, offset, dtype, outputs, inputs, output_stride, input_stride = source
    assert dtype == "f32"

    def element(o: int, i: int) -> np.float32:
        return np.frombuffer(file.read(offset + 4 * (o * output_stride + i * input_stride), 4), np.float32)[0]

    return np.array([[element(o, i) for i in range(inputs)] for o in range(outputs)])


def read_vector(source) -> np.ndarray:
    file, offset, _dtype, count, stride = source
    return np.array([np.frombuffer(file.read(offset + 4 * i * stride, 4), np.float32)[0] for i in range(count)])


@pytest.fixture
def values():
    return np.random.default_rng(0)


def ffn(up: TensorPattern, gate: TensorPattern, down: TensorPattern, **more) -> FfnSpec:
    return FfnSpec(in_size=H, intermediate_size=W, out_size=H, up_tensor=up, gate_tensor=gate, down_tensor=down, **more)


PER_EXPERT = ffn(TensorPattern("e.{expert}.up"), TensorPattern("e.{expert}.gate"), TensorPattern("e.{expert}.down"))


def per_expert_tensors(values) -> dict[str, np.ndarray]:
    return {
        f"e.{e}.{name}": values.normal(size=shape)
        for e in range(E)
        for name, shape in (("up", (W, H)), ("gate", (W, H)), ("down", (H, W)))
    }


def test_sources_of_single_tensors_point_at_the_experts_values(tmp_path, values):
    tensors = per_expert_tensors(values)
    write_tensors(tmp_path / "model.safetensors", tensors)
    sources = expert_sources(Checkpoint.open(tmp_path), PER_EXPERT, 2)
    for name in ("up", "gate", "down"):
        np.testing.assert_array_equal(read_matrix(sources[name]), tensors[f"e.2.{name}"].astype(np.float32))
    assert sources["up_bias"] is None


def test_sources_of_packed_halves_point_at_the_experts_values(tmp_path, values):
    packed, down = values.normal(size=(E, 2 * W, H)), values.normal(size=(E, H, W))
    write_tensors(tmp_path / "model.safetensors", {"gu": packed, "d": down})
    spec = ffn(
        TensorPattern("gu", True, part="second_half"), TensorPattern("gu", True, part="first_half"), TensorPattern("d", True)
    )
    sources = expert_sources(Checkpoint.open(tmp_path), spec, 1)
    np.testing.assert_array_equal(read_matrix(sources["gate"]), packed[1, :W].astype(np.float32))
    np.testing.assert_array_equal(read_matrix(sources["up"]), packed[1, W:].astype(np.float32))
    np.testing.assert_array_equal(read_matrix(sources["down"]), down[1].astype(np.float32))


def test_sources_of_transposed_interleaved_tensors_and_biases_point_at_the_experts_values(tmp_path, values):
    packed, down = values.normal(size=(E, H, 2 * W)), values.normal(size=(E, W, H))
    bias, down_bias = values.normal(size=(E, 2 * W)), values.normal(size=(E, H))
    write_tensors(tmp_path / "model.safetensors", {"gu": packed, "d": down, "gub": bias, "db": down_bias})
    spec = ffn(
        TensorPattern("gu", True, True, "odd"), TensorPattern("gu", True, True, "even"), TensorPattern("d", True, True),
        gate_bias_tensor=TensorPattern("gub", True, part="even"), up_bias_tensor=TensorPattern("gub", True, part="odd"),
        down_bias_tensor=TensorPattern("db", True),
    )  # fmt: skip
    sources = expert_sources(Checkpoint.open(tmp_path), spec, 2)
    np.testing.assert_array_equal(read_matrix(sources["gate"]), packed[2, :, ::2].T.astype(np.float32))
    np.testing.assert_array_equal(read_matrix(sources["up"]), packed[2, :, 1::2].T.astype(np.float32))
    np.testing.assert_array_equal(read_matrix(sources["down"]), down[2].T.astype(np.float32))
    np.testing.assert_array_equal(read_vector(sources["gate_bias"]), bias[2, ::2].astype(np.float32))
    np.testing.assert_array_equal(read_vector(sources["up_bias"]), bias[2, 1::2].astype(np.float32))
    np.testing.assert_array_equal(read_vector(sources["down_bias"]), down_bias[2].astype(np.float32))


def test_a_sharded_checkpoint_is_read_through_its_index(tmp_path, values):
    tensors = per_expert_tensors(values)
    names = sorted(tensors)
    files = {"a-1.safetensors": names[:4], "a-2.safetensors": names[4:]}
    for file, held in files.items():
        write_tensors(tmp_path / file, {name: tensors[name] for name in held})
    weight_map = {name: file for file, held in files.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.tensors) == set(tensors)
    assert check_expert(checkpoint, PER_EXPERT, 0) == ("f32", "f32")
    (tmp_path / "a-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 weight files are missing, first a-2\.safetensors"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("file", ["../escape.safetensors", "/etc/passwd", "..", ""])
def test_an_index_cannot_name_files_elsewhere(tmp_path, file):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="not a file name"):
        Checkpoint.open(tmp_path)


def test_an_index_that_promises_an_absent_tensor_is_refused(tmp_path):
    write(tmp_path / "x.safetensors", {"a": entry(0, 4)}, bytes(4))
    weight_map = {"a": "x.safetensors", "b": "x.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="'b' should be in x.safetensors"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        (b"", b"", 200_000_000, "header length"),
        (b"{}", b"", 3, "header length"),
        (b"not json", b"", None, "not JSON"),
        (b"[]", b"", None, "expected a map"),
        (b"[" * 100_000, b"", None, "not JSON"),
        (b'{"a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}, "a": 1}', bytes(4), None, "'a' appears twice"),
        ({"a": entry(0, 8)}, bytes(4), None, "'a': ends at byte .* truncated"),
        ({"a": entry(0, 8, shape=[3])}, bytes(8), None, "'a': F32 \\[3\\] does not have"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), None, "'a' and 'b' overlap"),
        ({"a": entry(0, 8, data_offsets=[8, 0])}, bytes(8), None, "'a': data_offsets"),
        ({"a": entry(0, 8, data_offsets=[-8, 0])}, bytes(8), None, "'a': data_offsets"),
        ({"a": entry(0, 8, data_offsets=[0, 8.0])}, bytes(8), None, "'a': data_offsets"),
        ({"a": entry(0, 8, shape=[1 << 62, 1 << 62])}, bytes(8), None, "'a': shape"),
        ({"a": entry(0, 8, shape=[-2])}, bytes(8), None, "'a': shape"),
        ({"a": entry(0, 8, shape=[1] * 9)}, bytes(8), None, "'a': shape"),
        ({"a": entry(0, 8, dtype=3)}, bytes(8), None, "'a': dtype"),
        ({"a": 7}, b"", None, "'a': found a int"),
    ],
)
def test_a_header_that_disagrees_with_itself_or_the_file_is_refused_by_name(tmp_path, header, data, length, message):
    path = write(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert str(path) in str(caught.value)


def test_every_truncation_of_a_file_is_refused(tmp_path, values):
    whole = write_tensors(tmp_path / "model.safetensors", {"a": values.normal(size=(3, 5))}).read_bytes()
    for size in range(len(whole)):
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("present", "message"),
    [
        ([], "the folder is empty"),
        (["model.gguf"], "GGUF"),
        (["pytorch_model.bin"], "pickled"),
        (["other.safetensors"], "without the index"),
    ],
)
def test_a_directory_without_a_checkpoint_says_what_is_there(tmp_path, present, message):
    for name in present:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


def test_a_format_that_no_kernel_reads_is_named(tmp_path):
    tensors = {
        f"e.0.{name}": entry(24 * i, 24 * i + 24, dtype="F8_E4M3", shape=[24]) for i, name in enumerate(("up", "gate", "down"))
    }
    write(tmp_path / "model.safetensors", tensors, bytes(72))
    with pytest.raises(UnsupportedError, match=r"e\.0\.gate.*F8_E4M3"):
        expert_sources(Checkpoint.open(tmp_path), PER_EXPERT, 0)


def test_a_shape_that_the_spec_does_not_expect_is_named_with_both(tmp_path, values):
    tensors = per_expert_tensors(values)
    tensors["e.1.up"] = values.normal(size=(W, H + 1))
    write_tensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"'e\.1\.up' has shape \[4, 7\], expected \[4, 6\]"):
        check_expert(Checkpoint.open(tmp_path), PER_EXPERT, 1)


def test_missing_and_surplus_experts_are_named(tmp_path, values):
    packed = {"gu": values.normal(size=(E, 2 * W, H)), "d": values.normal(size=(E, H, W))}
    write_tensors(tmp_path / "model.safetensors", packed | per_expert_tensors(values))
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match=r"'e\.3\.gate' is missing"):
        expert_sources(checkpoint, PER_EXPERT, 3)
    up, gate = (TensorPattern("gu", True, part=part) for part in ("second_half", "first_half"))
    halves = ffn(up, gate, TensorPattern("d", True))
    with pytest.raises(CheckpointError, match="'gu' has 3 experts, asked for 3"):
        expert_sources(checkpoint, halves, 3)


def fingerprint_of(directory: Path, config: dict, tensors: dict[str, np.ndarray]) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    write_tensors(directory / "model.safetensors", tensors)
    return Checkpoint.open(directory).fingerprint()


def test_the_fingerprint_follows_weights_names_and_meaning_but_not_the_tool_that_wrote_them(tmp_path, values):
    tensors = {"a": values.normal(size=(8, 8))}
    same = fingerprint_of(tmp_path / "same", {"hidden_act": "silu", "transformers_version": "5"}, tensors)
    again = fingerprint_of(tmp_path / "again", {"transformers_version": "6", "hidden_act": "silu"}, tensors)
    assert same == again
    others = [
        fingerprint_of(tmp_path / "act", {"hidden_act": "gelu"}, tensors),
        fingerprint_of(tmp_path / "name", {"hidden_act": "silu"}, {"b": tensors["a"]}),
        fingerprint_of(tmp_path / "shape", {"hidden_act": "silu"}, {"a": tensors["a"].reshape(4, 16)}),
        fingerprint_of(tmp_path / "values", {"hidden_act": "silu"}, {"a": tensors["a"] + 1}),
    ]
    assert len({same, *others}) == 5


def test_a_shards_fingerprint_names_its_model_layer_and_experts():
    found = {
        shard_fingerprint(model, layer, experts)
        for model in ("a", "b")
        for layer in ("l.1", "l.2")
        for experts in ((0,), (1,), (0, 1))
    }
    assert len(found) == 12
    assert all(0 <= value < 1 << 64 for value in found)


def test_a_shards_fingerprint_tells_requantised_weights_from_those_of_the_checkpoint():
    kept = ("", "bf16", "q4_k+q6_k", "int8_g32", "int4_g32", "int8_g32+bf16")
    prints = [shard_fingerprint("a", "l.1", (0, 1), weight_dtype) for weight_dtype in kept]
    assert prints[0] == prints[1] == prints[2]
    assert len(set(prints)) == 4


def test_a_shards_fingerprint_tells_numerics_classes_apart():
    prints = [shard_fingerprint("a", "l.1", (0, 1), "int8_g32", numerics) for numerics in ("f32-canonical", "int8-groups")]
    assert prints[0] == shard_fingerprint("a", "l.1", (0, 1), "int8_g32") != prints[1]
