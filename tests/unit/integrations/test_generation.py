"""Text from token ids as they come: together it is what the tokenizer makes of all of them, and
nothing that is given is ever half a character.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_moe.integrations.generation import TextStream, stop_token_ids

pytestmark = pytest.mark.transformers
END = 256
NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
TEXT = "héllo 👩\N{ZERO WIDTH JOINER}👧 日本語\n\n  x"


@functools.cache
def byte_level() -> Any:
    """A tokenizer as GPT-2's: tokens are bytes, of any text and of none."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Bytes that are no visible character stand as those from 256 on.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    signs = {byte: chr(byte) for byte in visible} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={sign: byte for byte, sign in signs.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@functools.cache
def sentence_pieces() -> Any:
    """A tokenizer as Llama's: a word has its space before it, but for the first, and what is no
    word is bytes.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["▁", "▁hello", "▁world", "a", ",", "▁a"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(1, 256)), "</s>", *words]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(spaces)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def streamed(tokenizer: Any, token_ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(token) for token in token_ids), stream.finish()]


def decoded(tokenizer: Any, token_ids: list[int]) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))


def test_a_character_comes_with_its_last_byte():
    parts = streamed(byte_level(), list(TEXT.encode()))
    assert "".join(parts) == TEXT
    ends = [len(character.encode()) for character in TEXT]
    assert [part for part in parts if part] == list(TEXT)
    assert [len(part) for part in parts[:-1]] == [int(place + 1 == count) for count in ends for place in range(count)]


# Bytes that begin a character and do not go on, that go on where nothing began, and whole ones.
pieces = st.one_of(
    st.lists(st.integers(0, 255), min_size=1, max_size=12),
    st.lists(st.integers(0x80, 0xFF), min_size=1, max_size=30),
    st.sampled_from([*"aé日👩"]).map(lambda character: list(character.encode())),
    st.integers(1, 12).map(lambda count: [END] * count),
)


@given(st.lists(pieces, max_size=8).map(lambda parts: [token for part in parts for token in part]))
def test_all_parts_together_are_what_decoding_everything_gives(token_ids):
    parts = streamed(byte_level(), token_ids)
    assert "".join(parts) == decoded(byte_level(), token_ids)
    assert streamed(byte_level().backend_tokenizer, token_ids) == parts


@given(st.lists(st.one_of(
    st.integers(257, 261).map(lambda word: [word]), st.sampled_from([*"é日👩"]).map(lambda one: list(one.encode())),
    st.integers(1, 12).map(lambda count: [END] * count),
), max_size=12).map(lambda parts: [token for part in parts for token in part]))  # fmt: skip
def test_words_keep_the_space_before_them(token_ids):
    parts = streamed(sentence_pieces(), token_ids)
    assert "".join(parts) == decoded(sentence_pieces(), token_ids)
    assert streamed(sentence_pieces().backend_tokenizer, token_ids) == parts


def test_a_space_before_the_first_word_goes_and_the_others_stay_behind_special_tokens_too():
    hello, world = 258, 259
    assert decoded(sentence_pieces(), [hello, world]) == "hello world"
    assert streamed(sentence_pieces(), [hello, *[END] * 20, world]) == ["hello", *[""] * 20, " world", ""]


def test_bytes_that_are_no_character_come_after_some_tokens_and_in_the_end():
    parts = streamed(byte_level(), [0xFF] * 20)
    assert "".join(parts) == NO_CHARACTER * 20
    assert any(parts[:10]), "nothing came while bytes went on"
    assert streamed(byte_level(), list("é".encode())[:1]) == ["", NO_CHARACTER]


class Counting:
    """A tokenizer that counts what it is asked to decode."""

    all_special_ids = (END,)

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.num_decoded += len(token_ids)
        return str(byte_level().decode(token_ids, **options))


@pytest.mark.parametrize("token", [ord("a"), 0xFF, END])
def test_a_long_text_costs_no_more_a_token_than_a_short_one(token):
    tokenizer = Counting()
    streamed(tokenizer, [token] * 2000)
    assert tokenizer.num_decoded <= 2000 * 20


def test_stop_ids_are_those_of_all_three_sources():
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=[5, 7]), config=SimpleNamespace(eos_token_id=5, other=1)
    )
    assert stop_token_ids(model, SimpleNamespace(eos_token_id=9)) == {5, 7, 9}
    assert stop_token_ids(SimpleNamespace(config=SimpleNamespace()), SimpleNamespace(eos_token_id=None)) == frozenset()
