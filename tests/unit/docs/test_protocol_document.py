"""The words of docs/protocol.md, carried out in plain Python, give the bytes the core gives.

The checksum and the header here are written from the document alone, so an error in either shows.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from dflash_moe import _core
from tests.checks import documents

DOCUMENT = Path(__file__).resolve().parents[3] / "docs/protocol.md"
SAMPLE = {
    "kind": 1, "request_dtype": 2, "reply_dtype": 0, "generation": 1, "call_id": 2, "weights_fingerprint": 3, "layer": 4,
    "shard": 5, "num_rows": 6, "num_pairs": 7, "payload_bytes": 8, "payload_checksum": 9, "slice": 10, "attempt": 11,
}  # fmt: skip


def _crc32c(register: int, data: bytes) -> int:
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register


def checksum_by_the_document(data: bytes) -> int:
    lanes = [0xFFFFFFFF] * 4
    num_words = len(data) // 8
    for word in range(num_words):
        lanes[word % 4] = _crc32c(lanes[word % 4], data[8 * word : 8 * word + 8])
    lanes[num_words % 4] = _crc32c(lanes[num_words % 4], data[8 * num_words :])
    factors = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
    products = [lane * factor % 2**32 for lane, factor in zip(lanes, factors, strict=True)]
    return _crc32c(0xFFFFFFFF, struct.pack("<4IQ", *products, len(data))) ^ 0xFFFFFFFF


def header_by_the_document(fields: dict[str, int]) -> bytes:
    sizes = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
    rows = documents.table(DOCUMENT.read_text(), "frame")
    assert rows is not None
    values = {**fields, "magic": 0x584D4644, "version": 1}
    header = bytearray(64)
    for offset, kind, name, _ in rows[:-1]:
        struct.pack_into("<" + sizes[kind], header, int(offset), values[name])
    struct.pack_into("<I", header, 60, checksum_by_the_document(bytes(header[:60])))
    return bytes(header)


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 31, 32, 33, 60, 64, 257])
def test_core_computes_the_documented_checksum(num_bytes: int) -> None:
    data = random.Random(num_bytes).randbytes(num_bytes)
    assert _core.checksum(data) == checksum_by_the_document(data)


def test_core_writes_the_documented_header() -> None:
    assert _core.encode_frame_header(SAMPLE) == header_by_the_document(SAMPLE)


def test_sample_of_the_document_is_what_its_words_say() -> None:
    block = documents.block(DOCUMENT.read_text(), "sample")
    assert block is not None
    assert bytes.fromhex(block) == header_by_the_document(SAMPLE)


@pytest.mark.parametrize(("num_rows", "num_pairs", "width"), [(1, 1, 1), (3, 7, 32), (850, 3400, 2048)])
@pytest.mark.parametrize(("dtype", "element_bytes"), [("f32", 4), ("bf16", 2)])
def test_core_lays_payloads_out_as_documented(
    num_rows: int, num_pairs: int, width: int, dtype: str, element_bytes: int
) -> None:
    request = _core.request_layout(num_rows, num_pairs, width, dtype)
    rows_offset = -(-(4 * num_pairs + 2 * num_rows + 2 * num_pairs) // 64) * 64
    assert request == {
        "weights_offset": 0,
        "row_counts_offset": 4 * num_pairs,
        "local_ids_offset": 4 * num_pairs + 2 * num_rows,
        "rows_offset": rows_offset,
        "payload_bytes": rows_offset + num_rows * width * element_bytes,
    }
    reply = _core.reply_layout(num_rows, width, dtype)
    assert reply == {"rows_offset": 32, "payload_bytes": 32 + num_rows * width * element_bytes}
