"""The model's tokenizer without transformers: what `engine.text`, `integrations.tokenizer` and the
front ask of one, over the library that transformers uses itself.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_moe.errors import ConfigError

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# What transformers takes out of a decoded text where a tokenizer asks for that.
_CLEANED = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"),
            (" 've", "'ve"), (" 're", "'re"))  # fmt: skip


class FrontTokenizer:
    """A tokenizer of JSON. Threads may encode at the same time: it lets go of the interpreter."""

    is_fast = True

    def __init__(self, facts: Mapping[str, Any]) -> None:
        """`facts` are those of `server.model_facts`."""
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(facts["json"])
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = bool(facts["splits_special_tokens"])
        self._cleans_up = bool(facts["cleans_up"])
        # Each choice's text asks for them as such a set, and has this one.
        self.all_special_ids: frozenset[int] = frozenset(facts["special_ids"])
        self._has_byte_letters = bool(facts["has_byte_letters"])

    def __call__(
        self, text: str, add_special_tokens: bool = True, return_offsets_mapping: bool = False
    ) -> dict[str, Sequence[Any]]:
        """Returns ids, and where each token lies in the text where that is asked for."""
        # Of one text alone the library would not let go of the interpreter.
        if not return_offsets_mapping:
            return {"input_ids": self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids}
        found = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return {"input_ids": found.ids, "offset_mapping": found.offsets}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of ids."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        if self._cleans_up:
            for untidy, tidy in _CLEANED:
                text = text.replace(untidy, tidy)
        return text

    def keeping(self, marks: Sequence[str]) -> FrontTokenizer | MarkedTokenizer:
        """Returns what decodes as this does, and keeps special tokens that are in one of the
        marks.
        """
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        kept = {token_id for token_id, text in special.items() if any(text in mark for mark in marks)}
        return MarkedTokenizer(self, frozenset(special) - kept) if kept else self

    def check(self, token_ids: Sequence[int], vocab_size: int) -> None:
        """Raises ConfigError for ids that the model does not have."""
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise ConfigError(f"token id {str(token_id)[:40]} is not allowed; the model has the ids 0..{vocab_size - 1}")

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token, which may be a part of a character."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if found := _BYTE.fullmatch(token):
            return bytes.fromhex(found[1])
        if self._has_byte_letters and token_id not in self.all_special_ids and all(letter in _BYTE_LETTERS for letter in token):
            return bytes(_BYTE_LETTERS[letter] for letter in token)
        return self.decode([token_id]).encode("utf-8", "replace")


class MarkedTokenizer:
    """A tokenizer for text in which some special tokens are marks."""

    def __init__(self, tokenizer: FrontTokenizer, dropped: frozenset[int]) -> None:
        """`dropped` are the ids of the other special tokens."""
        self._tokenizer = tokenizer
        self.all_special_ids = dropped

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """As `FrontTokenizer.decode`."""
        if skip_special_tokens:
            token_ids = [token_id for token_id in token_ids if token_id not in self.all_special_ids]
        return self._tokenizer.decode(token_ids)


def _byte_letters() -> dict[str, int]:
    """Returns the byte behind each letter of a byte-level vocabulary: printable Latin letters stand
    for themselves, the others for those from 256 on (the encoder of GPT-2, bytes_to_unicode).
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_LETTERS = _byte_letters()
