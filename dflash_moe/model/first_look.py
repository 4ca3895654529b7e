"""Looks at a checkpoint before a model's code is imported or a weight is read: what no command can
run is refused at once and in words of ours.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_moe.errors import UnsupportedError, shown
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.gguf_architectures.reading import refuse_dense

# Tensors and fields of models with experts have one of these words in their names.
_OF_EXPERTS = re.compile("expert|moe|router", re.IGNORECASE)
# Configurations have parts, such as one for text, but no deeper ones that matter here.
_MAX_DEPTH = 4


def refuse_unusable(path: Path) -> None:
    """Raises CheckpointError where files are missing or damaged, and UnsupportedError where the
    model has no experts.
    """
    checkpoint = Checkpoint.open(path)
    if checkpoint.metadata is not None:
        refuse_dense(checkpoint)
        return
    config = checkpoint.config()
    names = (*checkpoint.tensors, *_fields(config, _MAX_DEPTH))
    if not any(_OF_EXPERTS.search(name) for name in names):
        raise UnsupportedError(
            f"checkpoint {path}: this {shown(config.get('model_type', 'unnamed'))} model is dense: it has no experts that "
            "workers could compute; transformers alone runs it, and llama.cpp alone runs a GGUF file of it"
        )


def _fields(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, dict) and depth:
        for key, inner in value.items():
            yield str(key)
            yield from _fields(inner, depth - 1)
    elif isinstance(value, list):
        # Names of classes count too.
        yield from (item for item in value if isinstance(item, str))
