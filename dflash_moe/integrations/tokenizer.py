"""Loads the tokenizer of a checkpoint, and calls it: transformers reads that of a directory, and
that of a GGUF file is built from the metadata.

A tokenizer's files come from whoever made the model. What the library below raises over them, a
panic of its Rust code included, becomes an error of ours here.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from dflash_moe.errors import ConfigError, DflashError, UnsupportedError, shown
from dflash_moe.model.checkpoint_files import find_gguf
from dflash_moe.model.formats.gguf_header import read_gguf_header
from dflash_moe.model.refusals import in_one_line

# A panic of Rust code arrives as this, which is no Exception. Each extension has a class of its
# own, so that it is told by its name.
_PANIC = "PanicException"
# What Rust writes of a panic begins so, and goes on for pages where RUST_BACKTRACE is set.
_PANICKED = b"\nthread '"
# Files of tokenizers have such names; some further ones only say how to use what is in these.
_TOKENIZER_FILE = re.compile(r"token|vocab|merges|sp(iece|m)|bpe|\.model$|\.txt$", re.IGNORECASE)
_ABOUT_TOKENS = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
_DAMAGED = "tokenizer.json, or what stands for it, is damaged: download the folder's tokenizer files again"
# What the kinds of tokenizers in GGUF files are built from, beside their tokens.
_NEEDED = {"gpt2": ("merges",), "t5": ("scores",)}
_SPECIAL = ("bos", "eos", "unknown", "padding")
_REMEDY = "the file was not converted whole: download another copy, or use the safetensors checkpoint"


def load_tokenizer(path: Path) -> Any:
    """Returns the tokenizer of the checkpoint at `path`. It never looks anything up on a network.
    Raises UnsupportedError for a tokenizer that is missing or damaged, or that transformers cannot
    build from a GGUF file.
    """
    from transformers import AutoTokenizer

    parts = find_gguf(path)
    if not parts:
        _check_files(path)
        with _panics_unsaid(), refusing_tokenizer(f"checkpoint {path}: its tokenizer cannot be read", _DAMAGED):
            found = _tried(AutoTokenizer.from_pretrained(path, local_files_only=True))
            is_empty = found.vocab_size <= len(set(found.all_special_ids))
        if is_empty:
            # For some architectures transformers makes one of nothing where the files say nothing.
            raise UnsupportedError(
                f"checkpoint {path}: it has no tokenizer, only special tokens; copy tokenizer.json, or what the model's maker "
                "has in its place, beside config.json"
            )
        return found
    _check_gguf_tokenizer(parts[0])
    with _panics_unsaid(), refusing_tokenizer(f"{parts[0]}: its tokenizer cannot be built from the metadata", _REMEDY):
        from transformers import PreTrainedTokenizerFast
        from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

        architecture, tokenizer, settings = get_gguf_tokenizer(str(parts[0]))
        backend, more = convert_gguf_tokenizer(architecture, tokenizer)
        return _tried(PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **more))


def _tried(tokenizer: Any) -> Any:
    """Returns a tokenizer that a panic does not end over its first text, such as one whose template
    names a token that is not there. Other errors are those of the text to come.
    """
    with suppress(Exception):
        tokenizer("a")
    return tokenizer


def _check_files(path: Path) -> None:
    """Raises UnsupportedError where a folder has no file that a tokenizer could be in: transformers
    then makes one that knows no token, or asks for further packages.
    """
    if not any(_TOKENIZER_FILE.search(name) for name in set(os.listdir(path)) - _ABOUT_TOKENS):
        raise UnsupportedError(
            f"checkpoint {path}: it has no tokenizer, such as tokenizer.json; download the whole folder again, the tokenizer's "
            "files included"
        )


@contextmanager
def _panics_unsaid() -> Iterator[None]:
    """Keeps back what Rust code writes to stderr of a panic in the block, whose error says it. What
    others write meanwhile appears at the block's end.
    """
    with ExitStack() as stack:
        try:
            said = stack.enter_context(tempfile.TemporaryFile())
            kept = os.dup(2)
        except OSError:
            # Without a file or a descriptor a panic says what it says.
            yield
            return
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            os.write(2, said.read().partition(_PANICKED)[0])


def _check_gguf_tokenizer(path: Path) -> None:
    """Raises UnsupportedError where the metadata lack what a tokenizer of their kind is built from,
    or its special tokens are none of its tokens: what transformers says of that helps nobody.
    """
    metadata = read_gguf_header(path, 0).metadata
    kind = metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str):
        raise UnsupportedError(f"{path}: it has no tokenizer (metadata tokenizer.ggml.model is missing); {_REMEDY}")
    for key in ("tokens", *_NEEDED.get(kind, ())):
        if f"tokenizer.ggml.{key}" not in metadata:
            raise UnsupportedError(
                f"{path}: its {kind} tokenizer has no {key} (metadata tokenizer.ggml.{key} is missing); {_REMEDY}"
            )
    num_tokens = _length(metadata["tokenizer.ggml.tokens"])
    for name in _SPECIAL:
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and not (type(token_id) is int and 0 <= token_id < num_tokens):
            raise UnsupportedError(
                f"{path}: tokenizer.ggml.{name}_token_id is {shown(token_id)}, and the tokenizer has {num_tokens} tokens; "
                f"{_REMEDY}"
            )


def _length(listed: Any) -> int:
    """Returns the length of a list, of which a header may have kept no more than that."""
    return listed if isinstance(listed, int) else len(listed)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Returns the ids of a text, with what the tokenizer puts before it. Raises UnsupportedError
    where the tokenizer fails, ConfigError for a text that is no Unicode.
    """
    with _encoding(text):
        return list(tokenizer(text)["input_ids"])


def encode_with_ends(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Returns the ids of a text that has its special tokens already, and for each token the
    character behind its last one. A tokenizer that does not know gives no ends. Errors are those of
    `encode`.
    """
    is_fast = bool(getattr(tokenizer, "is_fast", False))
    with _encoding(text):
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=is_fast)
        return list(found["input_ids"]), [end for _, end in found["offset_mapping"]] if is_fast else []


@contextmanager
def _encoding(text: str) -> Iterator[None]:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"the text to encode: character {error.start} is no Unicode text; write UTF-8") from None
    with refusing_tokenizer(f"the model's tokenizer fails over a text of {len(text)} characters; its files are damaged"):
        yield


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Returns the ids of special tokens of a tokenizer, one of transformers or a bare
    `tokenizers.Tokenizer`.
    """
    found = getattr(tokenizer, "all_special_ids", None)
    if found is None:
        found = [token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return frozenset(found)


def decode(tokenizer: Any, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Returns the text of ids, for a tokenizer of transformers or a bare `tokenizers.Tokenizer`.
    Raises UnsupportedError where the tokenizer fails.
    """
    # Not by `refusing_tokenizer`, which would take longer than the decoding of a token.
    try:
        return str(tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))
    except BaseException as error:
        if not _is_refused(error):
            raise
        what = f"the model's tokenizer cannot decode {len(token_ids)} token ids; its files are damaged"
        raise UnsupportedError(f"{what}: {in_one_line(error)}") from error


@contextmanager
def refusing_tokenizer(what: str, remedy: str = "") -> Iterator[None]:
    """Turns any exception in the block that is not ours, and a panic of Rust code, into an
    UnsupportedError, whose text begins with `what`, quotes it and ends with `remedy`.
    """
    try:
        yield
    except BaseException as error:
        if not _is_refused(error):
            raise
        raise UnsupportedError(f"{what}: {in_one_line(error)}{'; ' * bool(remedy)}{remedy}") from error


def _is_refused(error: BaseException) -> bool:
    """Says whether an error is one of a tokenizer, and none of ours nor an interrupt."""
    return not isinstance(error, DflashError) and (isinstance(error, Exception) or type(error).__name__ == _PANIC)
