"""The hashes of full blocks: what they name, in which bytes, and that they grow with a sequence.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import struct
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_moe.errors import EngineError
from dflash_moe.forward.block_hashes import HASH_BYTES, BlockHashes


def hashes_of(token_ids: list[int], seed: bytes = b"seed", block_tokens: int = 4) -> list[bytes]:
    hashes = BlockHashes(seed, block_tokens)
    hashes.extend(token_ids)
    assert hashes.num_tokens == len(token_ids)
    return list(hashes.hashes)


def test_a_hash_is_blake2b_over_the_one_before_and_the_tokens_as_little_endian_int32():
    first = blake2b(blake2b(b"seed", digest_size=16).digest() + struct.pack("<4i", 1, 2, 3, -4), digest_size=16).digest()
    second = blake2b(first + struct.pack("<4i", 5, 6, 7, 2**31 - 1), digest_size=16).digest()
    assert hashes_of([1, 2, 3, -4, 5, 6, 7, 2**31 - 1, 9]) == [first, second]
    assert len(first) == HASH_BYTES


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.lists(st.integers(0, 9), max_size=20))
def test_pieces_give_the_hashes_of_the_whole(token_ids, cuts):
    hashes, at = BlockHashes(b"seed", 4), 0
    for size in [*cuts, len(token_ids)]:
        hashes.extend(token_ids[at : at + size])
        at += len(token_ids[at : at + size])
    assert hashes.hashes == hashes_of(token_ids)
    assert len(hashes.hashes) == len(token_ids) // 4


def test_a_hash_names_all_tokens_before_its_block_and_the_seed():
    whole = hashes_of(list(range(12)))
    assert hashes_of([*range(8), 99, 9, 10, 11])[:2] == whole[:2]
    assert not set(hashes_of([99, *range(1, 12)])) & set(whole)
    assert not set(hashes_of(list(range(12)), seed=b"other")) & set(whole)
    assert len(set(hashes_of([7] * 12))) == 3, "equal blocks at other places are other content"
    assert hashes_of([], seed=b"seed") == hashes_of([1, 2, 3]) == []


def test_what_a_blocks_positions_are_rotated_by_stands_before_its_tokens():
    def rotated(rotation: list[bytes]) -> list[bytes]:
        hashes = BlockHashes(b"seed", 4, rotation.__getitem__)
        hashes.extend(range(6))
        fork = hashes.fork()
        for one in (hashes, fork):
            one.extend(range(6, 13))
        assert fork.hashes == hashes.hashes
        return list(hashes.hashes)

    whole = rotated([b"a", b"b", b"c"])
    assert rotated([b"a", b"b", b"x"])[:2] == whole[:2]
    assert rotated([b"a", b"x", b"c"])[0] == whole[0]
    assert not set(rotated([b"a", b"x", b"c"])[1:]) & set(whole)
    assert (
        whole[0]
        == blake2b(blake2b(b"seed", digest_size=16).digest() + b"a" + struct.pack("<4i", 0, 1, 2, 3), digest_size=16).digest()
    )


@given(st.binary(max_size=40), st.binary(max_size=40), st.lists(st.integers(0, 9), min_size=4, max_size=16))
def test_only_the_same_salt_finds_a_block_and_an_empty_one_is_none(salt, other, token_ids):
    def salted(by: bytes, rotation: bytes = b"") -> list[bytes]:
        hashes = BlockHashes(b"seed", 4, lambda _block: rotation).salted(by)
        hashes.extend(token_ids)
        return list(hashes.hashes)

    assert salted(b"") == hashes_of(token_ids)
    assert salted(salt) == salted(salt)
    if salt != other:
        assert not set(salted(salt)) & set(salted(other))
        assert not set(salted(salt, other)) & set(salted(other, salt))


def test_no_salt_stands_for_tokens():
    tokens = [1, 2, 3, 4]
    hashes = BlockHashes(b"seed", 4).salted(struct.pack("<4i", *tokens))
    hashes.extend([5, 6, 7, 8])
    assert hashes.hashes[0] != hashes_of([*tokens, 5, 6, 7, 8])[1]
    with pytest.raises(EngineError, match="salt comes before the first"):
        hashes.salted(b"late")


def test_a_fork_goes_on_from_the_same_tokens_by_itself():
    one = BlockHashes(b"seed", 4)
    one.extend([1, 2, 3, 4, 5])
    two = one.fork()
    one.extend([6, 7, 8])
    two.extend([9, 9, 9])
    assert (one.hashes, two.hashes) == (hashes_of([1, 2, 3, 4, 5, 6, 7, 8]), hashes_of([1, 2, 3, 4, 5, 9, 9, 9]))


def test_a_token_that_is_no_int32_is_refused_and_nothing_is_appended():
    hashes = BlockHashes(b"seed", 4)
    hashes.extend([1, 2])
    with pytest.raises(EngineError, match="one is no int32"):
        hashes.extend([3, 2**31])
    assert (hashes.num_tokens, hashes.hashes) == (2, [])
    hashes.extend([3, 4])
    assert hashes.hashes == hashes_of([1, 2, 3, 4])
