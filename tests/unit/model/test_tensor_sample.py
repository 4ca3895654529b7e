"""The sample of a tensor: which pieces it takes, by hand and for any size, and what differs in it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_moe import _core
from dflash_moe.errors import CheckpointError
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.stub import write_stub
from dflash_moe.model.tensor_sample import piece_offsets, sample_of, tensor_sample
from tests.gguf_cases import write_experts

pytest.importorskip("gguf", reason="the gguf package is an extra of the tests")


@given(st.integers(1, 20000), st.data())
def test_a_byte_counts_exactly_where_it_lies_in_a_piece(num_bytes, data):
    content = bytearray(index * 7 % 251 for index in range(num_bytes))
    at = data.draw(st.integers(0, num_bytes - 1))

    def sample() -> int:
        return sample_of(num_bytes, lambda offset, count: bytes(content[offset : offset + count]))

    before = sample()
    content[at] ^= 0xFF
    begins = [(num_bytes - 256) * piece // 15 for piece in range(16)]
    is_in_piece = num_bytes <= 4096 or any(begin <= at < begin + 256 for begin in begins)
    assert (sample() != before) == is_in_piece


def test_the_pieces_reach_from_the_begin_to_the_end():
    assert piece_offsets(4097)[:3] == (0, 256, 512)
    assert piece_offsets(256 + 15_000_000) == tuple(range(0, 15_000_001, 1_000_000))


def test_the_sample_is_the_checksum_of_the_pieces_in_the_file(tmp_path):
    path = write_experts(tmp_path / "m.gguf", hidden_size=128)
    checkpoint = Checkpoint.open(path)
    info = checkpoint.stored["blk.1.ffn_down_exps.weight"]
    data = path.read_bytes()[info.offset : info.offset + info.num_bytes]
    pieces = b"".join(data[begin : begin + 256] for begin in ((len(data) - 256) * piece // 15 for piece in range(16)))
    assert tensor_sample(checkpoint, "blk.1.ffn_down_exps.weight") == _core.checksum(pieces)
    with pytest.raises(CheckpointError, match="tensor 'blk.9.x' is missing"):
        tensor_sample(checkpoint, "blk.9.x")


def test_a_stub_has_no_sample_and_a_file_that_was_cut_neither(tmp_path):
    path = write_experts(tmp_path / "m.gguf", hidden_size=128)
    write_stub(path, tmp_path / "s.gguf")
    with pytest.raises(CheckpointError, match="it holds no values of tensor 'blk.0.ffn_up_exps.weight'; use the full file"):
        tensor_sample(Checkpoint.open(tmp_path / "s.gguf"), "blk.0.ffn_up_exps.weight")
    checkpoint = Checkpoint.open(path)
    checkpoint.fingerprint()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="ends early"):
        tensor_sample(checkpoint, max(checkpoint.stored, key=lambda name: checkpoint.stored[name].offset))
