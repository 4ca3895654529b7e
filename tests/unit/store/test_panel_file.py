"""The format of files of panels: its bytes, its limits, and that nothing else is taken for one.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from dflash_moe.errors import CheckpointError
from dflash_moe.store import closed_json, panel_file
from dflash_moe.store.panel_file import (
    PREFIX,
    PanelHeader,
    StoredExpert,
    encode_header,
    experts_per_file,
    first_offset,
    read_header,
)
from tests.unit.store.stored_panels import GROUP, LAYOUT, MODEL, SHAPE

EXPERTS = tuple(StoredExpert(4096 + 8192 * n, 6024, 0x0123456789ABCDEF + n, 7 * n, f"{n:064x}") for n in range(2))
HEADER = PanelHeader(LAYOUT, SHAPE, "model", "ab" * 32, 4, EXPERTS)


def as_json(header: PanelHeader = HEADER) -> dict:
    return closed_json.decode(panel_file._payload(header))


def read(data: bytes, name: str | None = None) -> PanelHeader:
    """Reads the header of a file with these bytes, by default under the name that they ask for."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / (name or f"{data[16:48].hex()}.panels")
        path.write_bytes(data)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return read_header(descriptor, path)
        finally:
            os.close(descriptor)


def file_of(payload: bytes, num_bytes: int = 20480) -> bytes:
    """Returns a file whose prefix vouches for a payload, whatever that is."""
    begin = PREFIX.pack(b"DFLPANEL", 1, len(payload), blake3(payload).digest(), bytes(16)) + payload
    return begin + bytes(max(0, num_bytes - len(begin)))


def refused(data: bytes, name: str | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(data, name)
    text = str(caught.value)
    assert "\n" not in text
    assert ".panels: " in text or (name and name in text)
    assert "`dflash-moe store verify`" in text
    return text


WHOLE = file_of(panel_file._payload(HEADER))


def test_a_header_is_read_as_it_was_written():
    name, begin = encode_header(HEADER)
    assert read(WHOLE, name) == HEADER
    assert WHOLE.startswith(begin)


def test_these_are_the_bytes_of_version_1():
    name, begin = encode_header(HEADER)
    assert begin[64:] == (
        b'{"experts":[[4096,6024,"0123456789abcdef",0,"' + b"0" * 64 + b'"],[12288,6024,"0123456789abcdf0",7,"' + b"0" * 63
        + b'1"]],"first":4,"layer":"' + b"ab" * 32 + b'","layout":{"bias_bytes":24,"down":"q6_k","expert_bytes":6000,'
        b'"gate_up":"q4_k","order":"plain","version":1,"width":16},"model":"model","shape":{"in_size":64,'
        b'"intermediate_size":32,"num_matrices":2,"out_size":64}}'
    )  # fmt: skip
    assert name == "41e7503dae58fcac45349d17590d998848f9629a3ec0d7e91bbf854677bde209.panels"
    assert begin[:64] == b"DFLPANEL" + bytes((1, 0, 0, 0, 0xFD, 1, 0, 0)) + bytes.fromhex(name[:64]) + bytes(16)


@pytest.mark.parametrize(
    ("at", "data", "words"),
    [
        (0, b"GGUF", "it begins with b'GGUFANEL'"),
        (8, b"\2", "its version is 2, this program reads 1"),
        (12, b"\1\0\x10\0", "its header has 1048577 bytes, at most 1048576 are read"),
        (12, b"\0\0\0\0", "its header's BLAKE3 is"),
        (16, b"\0\0", "its header's BLAKE3 is"),
        (48, b"\1", "it begins with"),
        (70, b"7", "its header's BLAKE3 is"),
    ],
)
def test_a_prefix_that_is_wrong_is_refused(at, data, words):
    assert words in refused(WHOLE[:at] + data + WHOLE[at + len(data) :])


def test_a_file_under_another_name_is_refused():
    assert "the name must be the same" in refused(WHOLE, "0" * 64 + ".panels")


@pytest.mark.parametrize("num_bytes", [0, 63, 64, 100, 4096, 20479, 20481, 24576])
def test_a_file_that_is_cut_or_goes_on_is_refused(num_bytes):
    refused((WHOLE + bytes(4096))[:num_bytes], encode_header(HEADER)[0])


def changed(*path: str | int, value: object) -> bytes:
    """Returns a payload in which one value is another."""
    whole: object = as_json()
    inner = whole
    for key in path[:-1]:
        inner = inner[key]  # type: ignore[index]
    inner[path[-1]] = value  # type: ignore[index]
    return closed_json.encode(whole)


WRONG = [
    *[((key,), value) for key in as_json() for value in (None, True, 1.5, "", [], {}, -1)],
    *[(("layout", key), value) for key in asdict(LAYOUT) for value in (None, True, -1, "NO", 1 << 62, [])],
    *[(("shape", key), value) for key in asdict(SHAPE) for value in (None, True, 0, "x", 1 << 62)],
    *[(("experts", 0, place), value) for place in range(5) for value in (None, True, -1, "x", 1 << 62)],
    (("layout", "extra"), 1),
    (("extra",), 1),
    (("experts", 0), [4096, 6024]),
    (("experts", 1, 0), 8192),
    (("experts", 1, 0), 12289),
    (("experts", 1, 0), 4096),
    (("experts", 1, 1), 6025),
    (("layer",), "AB" * 32),
    (("model",), "with space"),
    (("first",), (1 << 24) + 1),
    (("shape", "num_matrices"), 3),
]


@pytest.mark.parametrize(("path", "value"), WRONG, ids=str)
def test_a_field_that_is_wrong_is_refused(path, value):
    refused(file_of(changed(*path, value=value)))


@pytest.mark.parametrize("key", as_json())
def test_a_field_that_is_missing_is_refused(key):
    value = as_json()
    del value[key]
    assert "must have the keys experts, first, layer, layout, model, shape" in refused(file_of(closed_json.encode(value)))


def test_more_experts_than_any_layer_has_are_refused():
    value = as_json()
    value["experts"] = [[4096 + 8192 * n, 6024, "0" * 16, 0, "0" * 64] for n in range(panel_file.MAX_EXPERTS + 1)]
    assert "experts" in refused(file_of(closed_json.encode(value)))


@pytest.mark.parametrize(
    "payload", [b"", b"[" * 100_000, b"{}", b'{"a":1,"a":1}', b"NaN", b"1e999", b"9" * 5000, b'"\xff"', b" {}"]
)
def test_other_json_is_refused(payload):
    refused(file_of(payload))


def test_spaces_are_refused():
    assert "another form" in refused(file_of(panel_file._payload(HEADER).replace(b",", b", ")))


def test_a_piece_within_the_header_is_refused():
    experts = tuple(replace(EXPERTS[0], offset=4096 + 8192 * n) for n in range(40))
    assert "within the header" in refused(file_of(panel_file._payload(replace(HEADER, experts=experts)), 4096 + 40 * 8192))


@given(st.binary(max_size=300))
def test_any_bytes_are_refused(data):
    refused(data, "0" * 64 + ".panels")


@given(st.integers(0, len(panel_file._payload(HEADER)) - 1), st.binary(min_size=1, max_size=8))
def test_a_payload_with_other_bytes_gets_a_typed_error_or_is_a_header(at, data):
    payload = panel_file._payload(HEADER)
    other = payload[:at] + data + payload[at + len(data) :]
    try:
        found = read(file_of(other))
    except CheckpointError:
        return
    assert panel_file._payload(found) == other


def test_headers_end_before_the_first_piece():
    for count in (1, 3, 1024):
        group = replace(GROUP, count=count)
        begin = first_offset(group, MODEL)
        stored = tuple(
            StoredExpert(begin + n * group.stride_bytes, LAYOUT.piece_bytes, (1 << 64) - 1, (1 << 32) - 1, "f" * 64)
            for n in range(count)
        )
        header = PanelHeader(group.layout, group.shape, MODEL, group.layer, group.first, stored)
        assert len(encode_header(header)[1]) <= begin
        assert begin % 4096 == 0
        assert not header.difference(group, MODEL)


def test_each_difference_from_what_is_needed_is_named():
    header = PanelHeader(GROUP.layout, GROUP.shape, MODEL, GROUP.layer, GROUP.first, EXPERTS + EXPERTS[:1])
    assert header.difference(GROUP, MODEL) == ""
    assert header.difference(GROUP, "other").startswith("model is ")
    for name, value in {
        "layout": replace(LAYOUT, width=32), "shape": replace(SHAPE, num_matrices=1), "layer": "0" * 64, "first": 0, "count": 2,
    }.items():  # fmt: skip
        assert header.difference(replace(GROUP, **{name: value}), MODEL).startswith(f"{name} is ")


def test_files_are_cut_near_their_size():
    assert experts_per_file(1 << 20, 128) == 64
    assert experts_per_file((1 << 20) + 1, 128) == 63
    assert experts_per_file(1 << 30, 128) == 1
    assert experts_per_file(4096, 1 << 20) == 1024
    assert experts_per_file(4096, 60) == 60
