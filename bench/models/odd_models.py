"""Makes tiny models with odd settings and values that hide nothing. Only tests use it.

Norms are not 1, sinks and correction biases not 0. Some tokens' embeddings lie along the longest
rows of the matrices behind them, so that a limit on what comes out is reached, as in a trained
model, although random rows stay far below it.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.models.families import tiny_options
from bench.models.odd_settings import usual_fields
from dflash_moe.errors import UnsupportedError
from dflash_moe.model.make import NUM_BYTES, build_model

# So many of the 256 tokens may have an embedding along a row of a matrix.
_ALONG_ROWS = 96
_SEED = 7


@cache
def default_text(arch: str) -> Any:
    """Returns the language model's part of a family's default configuration. Raises
    UnsupportedError where it has none.
    """
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[arch]().get_text_config()
    except Exception as error:
        raise UnsupportedError(f"{arch}: has no configuration to begin with: {error}") from error


def odd_model(arch: str, fields: Mapping[str, Any]) -> Any:
    """Builds a tiny float32 model with these fields beside the usual ones, its attention and
    experts its own eager code. Errors are those of `build_model`.
    """
    model = build_model(tiny_options(arch, "f32"), usual_fields(default_text(arch)) | dict(fields))
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.is_floating_point() and (("correction" in name) or (value.ndim == 1 and "inv_freq" not in name)):
                value += (1.0 if "sinks" in name else 0.1) * torch.randn(value.shape, generator=generator)
        _align_embeddings(model)
    return model


def _align_embeddings(model: Any) -> None:
    table = model.get_input_embeddings().weight
    if not isinstance(table, torch.Tensor) or table.ndim != 2:
        return
    rows = [row for _, row in zip(range(_ALONG_ROWS), _longest_rows(model, table), strict=False)]
    for place, row in enumerate(rows):
        table[NUM_BYTES - 1 - place] = row / row.norm() * table.shape[1] ** 0.5


def _longest_rows(model: Any, table: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields for each matrix that reads hidden states its longest row, for each expert's too."""
    width = table.shape[1]
    for module in model.modules():
        for value in module._parameters.values():
            if value is None or value.ndim < 2 or isinstance(module, nn.Embedding) or value.shape[0] == table.shape[0]:
                continue
            for matrix in value if value.ndim == 3 else value[None]:
                if matrix.ndim == 2 and getattr(module, "is_transposed", False):
                    matrix = matrix.T
                if matrix.ndim == 2 and matrix.shape[1] == width:
                    yield matrix[int(matrix.norm(dim=1).argmax())]


def source_of(model: Any) -> str:
    """Returns the code of a model's class and of its configuration."""
    names = {type(model).__module__, type(model.config).__module__, type(model.config.get_text_config()).__module__}
    return "\n".join(Path(str(sys.modules[name].__file__)).read_text(encoding="utf-8") for name in sorted(names))


def rotary_width(model: Any) -> int:
    """Returns the number of rotary frequencies of a model's text, 1 where it has none."""
    widths = [value.numel() for name, value in model.named_buffers() if name.endswith("inv_freq") and "vis" not in name]
    return widths[0] if widths else 1
