"""Loads the tokenizer of a checkpoint: transformers reads that of a directory, and that of a GGUF
file is built from the metadata.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_moe.model.checkpoint_files import find_gguf
from dflash_moe.model.refusals import refusing


def load_tokenizer(path: Path) -> Any:
    """Returns the tokenizer of the checkpoint at `path`. It never looks anything up on a network.
    Raises UnsupportedError for a tokenizer that is missing or damaged, or that transformers cannot
    build from a GGUF file.
    """
    from transformers import AutoTokenizer

    parts = find_gguf(path)
    if not parts:
        with refusing(f"checkpoint {path}: its tokenizer cannot be read"):
            return AutoTokenizer.from_pretrained(path, local_files_only=True)
    with refusing(f"{parts[0]}: its tokenizer cannot be built from the metadata; use the safetensors checkpoint for text"):
        from transformers import PreTrainedTokenizerFast
        from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

        architecture, tokenizer, settings = get_gguf_tokenizer(str(parts[0]))
        backend, more = convert_gguf_tokenizer(architecture, tokenizer)
        return PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **more)
