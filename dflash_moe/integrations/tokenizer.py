"""The tokenizer of a checkpoint: of a directory as transformers reads it, of a GGUF file out of its
metadata.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_moe.errors import UnsupportedError
from dflash_moe.model.checkpoint_files import find_gguf


def load_tokenizer(path: Path) -> Any:
    """Never looks anything up on a network. UnsupportedError for a GGUF file whose tokenizer
    transformers cannot build.
    """
    from transformers import AutoTokenizer

    parts = find_gguf(path)
    if not parts:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    try:
        from transformers import PreTrainedTokenizerFast
        from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

        architecture, tokenizer, settings = get_gguf_tokenizer(str(parts[0]))
        backend, more = convert_gguf_tokenizer(architecture, tokenizer)
        return PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **more)
    except Exception as error:  # every tokenizer class refuses in its own way
        raise UnsupportedError(
            f"{parts[0]}: its tokenizer cannot be built from the metadata ({type(error).__name__}: {error}); "
            "use the safetensors checkpoint for text, or another version of transformers"
        ) from error
