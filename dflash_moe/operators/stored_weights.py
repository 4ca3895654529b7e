"""Puts packed operators in the place of modules whose weights were not loaded, because they are
packed as a quantised checkpoint stores them: nothing is dequantised, and nothing is there twice.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dflash_moe import _core
from dflash_moe.errors import CheckpointError
from dflash_moe.operators.linear import HostEmbedding, HostLinear, bias_source, stored_excess
from dflash_moe.operators.report import Finding

if TYPE_CHECKING:
    from dflash_moe.model.dense_tensors import StoredMatrix


@torch.no_grad()  # type: ignore[untyped-decorator]
def place_stored(
    model: Any, pool: _core.HostPool, numerics_of: Callable[[str], str], stored: Mapping[str, StoredMatrix],
    dtype: torch.dtype,
) -> list[Finding]:  # fmt: skip
    """Packs each matrix once, for all modules of `model` that share it, and returns what was put
    there. `model` was loaded without these parameters and computes in `dtype`. `numerics_of` is
    asked for the class of each format.

    Raises CheckpointError naming the tensor where values are damaged, or where a packed layer does
    not compute what the checkpoint's own values say.
    """
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    output_name = _name_of(model, output)
    is_tied = output is not None and output.weight is None and f"{output_name}.weight" not in stored
    findings = []
    for parameter, matrix in stored.items():
        name = parameter.rpartition(".")[0]
        module = model.get_submodule(name)
        bias = module._parameters.get("bias")
        packed = _core.PackedLinear(pool, [(matrix.source, bias_source(bias), 0)], numerics=numerics_of(matrix.format_name))
        places = {name: module}
        if is_tied and module is model.get_input_embeddings():
            places[output_name] = output
        for at, place in places.items():
            ours: HostEmbedding | HostLinear
            if isinstance(place, nn.Embedding):
                ours = HostEmbedding(packed, dtype)
                found = 0.0 if _has_rows(ours, matrix, dtype) else float("inf")
            else:
                ours = HostLinear(packed, torch.float32 if place is output else None, bias, dtype)
                found = stored_excess(ours, matrix.rows, bias, packed.numerics[0], dtype)
            if not found <= 1.0:
                raise CheckpointError(f"tensor {matrix.name!r}: packed, it is {found:.3g} times as far off as it may be")
            operator = "embedding" if isinstance(place, nn.Embedding) else "linear"
            findings.append(
                Finding(at, type(place).__name__, operator, f"{packed.formats[0]}, {packed.numerics[0]}", excess=found)
            )
            parent, _, child = at.rpartition(".")
            setattr(model.get_submodule(parent) if parent else model, child, ours.eval())
    return findings


def _has_rows(ours: HostEmbedding, matrix: StoredMatrix, dtype: torch.dtype) -> bool:
    ids = list(range(0, matrix.outputs, max(1, matrix.outputs // 64)))
    return bool(torch.equal(ours(torch.tensor(ids)), torch.from_numpy(matrix.rows(ids)).to(dtype)))


def _name_of(model: Any, module: Any) -> str:
    return next((name for name, found in model.named_modules() if found is module), "")
