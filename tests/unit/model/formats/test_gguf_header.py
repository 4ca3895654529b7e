"""GGUF headers: what the `gguf` package writes is read alike; every damage names the file, and the
tensor where there is one.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import struct

import numpy as np
import pytest

from dflash_moe.errors import CheckpointError
from dflash_moe.model.formats.gguf_header import BLOCK_TYPES, is_gguf, read_gguf_header


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    extents = tuple(reversed(shape))
    return text(name) + struct.pack(f"<I{len(extents)}QIQ", len(extents), *extents, kind, offset)


def build(tensors: list, keys: list = (), data: int = 0, *, version: int = 3, counts: tuple | None = None) -> bytes:
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    header = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + bytes(data)


def read(tmp_path, content: bytes):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return read_gguf_header(path, 3)


F32, Q8_0 = 0, 8


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_have_their_place_type_and_shape(tmp_path, version):
    header = read(tmp_path, build([entry("a", (2, 3), F32, 0), entry("b", (4, 64), Q8_0, 32)], data=32 + 272, version=version))
    a, b = header.tensors["a"], header.tensors["b"]
    assert (a.file, a.dtype, a.shape, a.num_bytes) == (3, "F32", (2, 3), 24)
    assert (b.dtype, b.shape, b.num_bytes, b.offset - a.offset) == ("Q8_0", (4, 64), 4 * 2 * 34, 32)


def test_what_the_gguf_package_writes_is_read_alike(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the gguf package is an extra of the tests")
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    writer.add_uint32("qwen3moe.block_count", 7)
    writer.add_array("sections", [1, 2, 3])
    writer.add_array("tokenizer.ggml.tokens", ["a", "", "cd"])
    writer.add_float32("eps", 0.5)
    writer.add_bool("flag", True)
    for name, shape in (("a", (3, 2, 64)), ("b", (5,))):
        writer.add_tensor(name, np.ones(shape, np.float32))
    for kind in (gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.MXFP4):
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor(kind.name, np.zeros((2, 256 // block * num_bytes), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header, theirs = read_gguf_header(path, 0), gguf.GGUFReader(str(path))
    assert header.metadata["qwen3moe.block_count"] == 7
    assert header.metadata["sections"] == [1, 2, 3]
    assert (header.metadata["tokenizer.ggml.tokens"], header.metadata["eps"], header.metadata["flag"]) == (3, 0.5, True)
    assert len(theirs.tensors) == len(header.tensors)
    for tensor in theirs.tensors:
        info = header.tensors[tensor.name]
        assert (info.offset, info.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert info.shape == tuple(int(extent) for extent in reversed(tensor.shape))


def test_block_sizes_are_those_of_the_gguf_package():
    gguf = pytest.importorskip("gguf", reason="the gguf package is an extra of the tests")
    for kind, (name, block, num_bytes) in BLOCK_TYPES.items():
        if name == "Q2_0" and not hasattr(gguf.GGMLQuantizationType, name):
            continue  # it is younger than some versions of the package
        found = gguf.GGMLQuantizationType(kind)
        assert found.name == name.removeprefix("GGUF_")
        assert gguf.GGML_QUANT_SIZES[found] == (block, num_bytes)


HOSTILE = 1 << 63


def texts(first: bytes, length: int | None = None, *, count: int = 3) -> bytes:
    """Returns metadata k: a list of `count` texts, of which there is one, and a length."""
    second = b"" if length is None else struct.pack("<Q", length)
    return text("k") + struct.pack("<IIQQ", 9, 8, count, len(first)) + first + second


DAMAGED = {
    "empty": (b"", "the file is empty"),
    "short": (b"GGUF", "begin with GGUF"),
    "other": (b"\x80\x02" * 20, "begin with GGUF"),
    "version": (build([], version=1), "found version 1"),
    "big_endian": (build([], version=3 << 24), "big-endian"),
    "tensor_count": (build([], counts=(HOSTILE, 0)), "number of tensors is 9223372036854775808"),
    "key_count": (build([], counts=(0, HOSTILE)), "number of metadata entries is"),
    "key_length": (build([], [struct.pack("<Q", HOSTILE) + bytes(9)]), "key of metadata entry 0 has 9223372036854775808 bytes"),
    "key_twice": (build([], [text("k") + struct.pack("<IB", 0, 1)] * 2), "'k' appears twice"),
    "key_type": (build([], [text("k") + struct.pack("<IQ", 77, 1)]), "metadata 'k' has type 77"),
    "array_count": (build([], [text("k") + struct.pack("<IIQ", 9, 4, HOSTILE)]), "length of metadata 'k' is"),
    "array_depth": (build([], [text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9]), "nested too deeply"),
    "texts_first": (build([], [texts(b"ab", HOSTILE)]), "a text of metadata 'k' needs 9223372036854775808 bytes at byte 67"),
    "texts_last": (build([], [texts(b"ab", 1 << 40, count=2)]), "a text of metadata 'k' needs 1099511627776 bytes at byte 67"),
    "texts_end": (build([], [texts(b"a" * 39, count=2)]), "the length of a text of metadata 'k' needs 8 bytes at byte 96"),
    "text_end": (build([], [text("k") + struct.pack("<IQ", 8, 1 << 40)]), "needs 1099511627776 bytes"),
    "not_text": (build([], [struct.pack("<Q", 1) + b"\xff" + struct.pack("<IB", 0, 1)]), "not UTF-8"),
    "tensor_twice": (build([entry("a", (8,), F32, 0)] * 2, data=64), "tensor 'a' appears twice"),
    "dimensions": (build([entry("a", (1,) * 5, F32, 0)], data=64), "tensor 'a': found 5 dimensions"),
    "zero": (build([entry("a", (0, 4), F32, 0)], data=64), "tensor 'a': shape is [0, 4]"),
    "overflow": (build([entry("a", (1 << 40, 1 << 40), F32, 0)], data=64), "tensor 'a': ends at byte"),
    "wraps": (build([entry("a", (8,), F32, (1 << 64) - 32)], data=64), "tensor 'a': ends at byte"),
    "type": (build([entry("a", (8,), 4, 0)], data=64), "tensor 'a': type 4 is not known"),
    "blocks": (build([entry("a", (4, 33), Q8_0, 0)], data=640), "rows of 33 values cannot be cut into Q8_0 blocks of 32"),
    "misaligned": (build([entry("a", (8,), F32, 4)], data=64), "multiple of the alignment"),
    "alignment": (build([], [text("general.alignment") + struct.pack("<II", 4, 24)]), "general.alignment is 24"),
    "truncated": (build([entry("a", (8,), F32, 0)], data=31), "tensor 'a': ends at byte"),
    "overlap": (build([entry("a", (16,), F32, 0), entry("b", (8,), F32, 32)], data=128), "'a' and 'b' overlap"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named_with_its_file(tmp_path, case):
    content, what = DAMAGED[case]
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, content)
    assert what in str(caught.value)
    assert str(tmp_path / "x.gguf") in str(caught.value)


def test_every_truncation_of_a_header_is_refused(tmp_path):
    content = build([entry("a", (2, 3), F32, 0), entry("b", (4, 64), Q8_0, 32)], [text("k") + struct.pack("<If", 6, 1.0)], 304)
    for length in range(len(content)):
        with pytest.raises(CheckpointError):
            read(tmp_path, content[:length])
    assert len(read(tmp_path, content).tensors) == 2


def test_a_gguf_file_is_known_by_name_or_first_bytes(tmp_path):
    named, unnamed, other = tmp_path / "a.gguf", tmp_path / "b", tmp_path / "c"
    for path, content in ((named, b""), (unnamed, b"GGUF\x03"), (other, b"\x08")):
        path.write_bytes(content)
    assert [is_gguf(path) for path in (named, unnamed, other, tmp_path)] == [True, True, False, False]
