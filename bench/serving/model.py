"""The models that the sides of serving_against_peers.py read: those of engine_against_peers.py,
in which every token of the vocabulary has a text. There most have none, so that an answer of them
has nothing to stream.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from bench.peers.model import Say, Shape, model_path

# GGUF's type of a token whose text is written as it is.
NORMAL = 1
TOKEN_TYPES = "tokenizer.ggml.token_type"


def served_model_path(folder: Path, shape: Shape, format_name: str, say: Say = lambda _line: None) -> Path:
    """Returns the model of this shape and form with a text for each token, which is made in
    `folder` when it is not there: `bf16` is a directory, `f16` and `q8_0` are GGUF files.
    """
    source = model_path(folder, shape, format_name, say)
    path = source.with_name(f"{source.stem}-texts{source.suffix}")
    if path.exists():
        return path
    say(f"making {path.name} (once)")
    # A model appears whole or not at all.
    with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=folder) as unfinished:
        made = Path(unfinished) / path.name
        if source.is_dir():
            # The weights stay one file with two names.
            shutil.copytree(source, made, copy_function=os.link)
            _name_tokens(made / "tokenizer.json", shape.vocab_size)
        else:
            shutil.copyfile(source, made)
            _let_tokens_be_read(made)
        shutil.move(made, path)
    return path


def _name_tokens(path: Path, vocab_size: int) -> None:
    """Gives every token that a tokenizer lacks the text that GGUF files have for it."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    # Tokens beside the vocabulary keep their ids only where they stand in it too.
    vocabulary |= {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    vocabulary |= {f"[unused{number}]": number for number in range(len(vocabulary), vocab_size)}
    path.unlink()
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


def _let_tokens_be_read(path: Path) -> None:
    """Makes the unused tokens of a GGUF file normal ones, in place."""
    import gguf

    field = gguf.GGUFReader(str(path), "r+").fields[TOKEN_TYPES]
    for part in field.data:
        if field.parts[part][0] == gguf.TokenType.UNUSED:
            field.parts[part][0] = NORMAL
