"""Puts packed operators in the place of modules whose weights were not loaded, because they are
packed as a quantised checkpoint stores them: nothing is dequantised, and nothing is there twice.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dflash_moe import _core
from dflash_moe.errors import CheckpointError
from dflash_moe.operators.linear import HostEmbedding, HostLinear, bias_source, stored_excess
from dflash_moe.operators.report import Finding

if TYPE_CHECKING:
    from dflash_moe.model.dense_tensors import StoredMatrix

# So many outputs of each matrix are compared bit by bit: one for each place of the widest panel.
_COMPARED_OUTPUTS = 32


@torch.no_grad()  # type: ignore[untyped-decorator]
def place_stored(
    model: Any, pool: _core.HostPool, numerics_of: Callable[[str], str], stored: Mapping[str, StoredMatrix],
    dtype: torch.dtype,
) -> list[Finding]:  # fmt: skip
    """Packs each matrix once, for all modules of `model` that share it, and returns what was put
    there. `model` was loaded without these parameters and computes in `dtype`. `numerics_of` is
    asked for the class of each format.

    Of the linear layers that differ in nothing but their values one is compared by what it computes
    of rows, since kernels know no more of a matrix than its sizes, format and class; each other one
    by what some of its outputs weigh, which finds panels that were packed to the wrong place.

    Raises CheckpointError naming the tensor where values are damaged, or where a packed layer does
    not compute what the checkpoint's own values say.
    """
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    output_name = _name_of(model, output)
    is_tied = output is not None and output.weight is None and f"{output_name}.weight" not in stored
    names = [parameter.rpartition(".")[0] for parameter in stored]
    biases = [model.get_submodule(name)._parameters.get("bias") for name in names]
    findings, excess_of = [], dict[tuple[Any, ...], float]()
    for name, matrix, bias, packed in zip(
        names, stored.values(), biases, _packed(pool, numerics_of, list(stored.values()), biases), strict=True
    ):
        module = model.get_submodule(name)
        places = {name: module}
        if is_tied and module is model.get_input_embeddings():
            places[output_name] = output
        for at, place in places.items():
            ours: HostEmbedding | HostLinear
            if isinstance(place, nn.Embedding):
                ours = HostEmbedding(packed, dtype)
                found = 0.0 if _has_rows(ours, matrix) else float("inf")
            else:
                ours = HostLinear(packed, torch.float32 if place is output else None, bias, dtype)
                kind = (packed.inputs, packed.outputs, matrix.format_name, packed.numerics[0], bias is None)
                if kind not in excess_of:
                    excess_of[kind] = stored_excess(ours, matrix.rows, bias, packed.numerics[0], dtype)
                found = excess_of[kind] if _has_rows(HostEmbedding(packed, torch.float32), matrix) else float("inf")
            if not found <= 1.0:
                raise CheckpointError(f"tensor {matrix.name!r}: packed, it is {found:.3g} times as far off as it may be")
            operator = "embedding" if isinstance(place, nn.Embedding) else "linear"
            findings.append(
                Finding(at, type(place).__name__, operator, f"{packed.formats[0]}, {packed.numerics[0]}", excess=found)
            )
            parent, _, child = at.rpartition(".")
            setattr(model.get_submodule(parent) if parent else model, child, ours.eval())
    return findings


def _packed(
    pool: _core.HostPool, numerics_of: Callable[[str], str], matrices: Sequence[StoredMatrix],
    biases: Sequence[torch.Tensor | None],
) -> Iterator[_core.PackedLinear]:  # fmt: skip
    """Packs matrices on as many threads as compute later, and yields them in their order while the
    next are packed. torch has one thread meanwhile: with more, each waits for cores that pack.
    """

    def pack(matrix: StoredMatrix, bias: torch.Tensor | None) -> _core.PackedLinear:
        part = matrix.source, bias_source(bias), 0
        return _core.PackedLinear(pool, [part], numerics=numerics_of(matrix.format_name))

    torch_threads = torch.get_num_threads()
    threads = ThreadPoolExecutor(max_workers=pool.threads, thread_name_prefix="dflash-pack")
    try:
        torch.set_num_threads(1)
        yield from threads.map(pack, matrices, biases)
    finally:
        threads.shutdown(cancel_futures=True)
        torch.set_num_threads(torch_threads)


def _has_rows(ours: HostEmbedding, matrix: StoredMatrix) -> bool:
    # The distance of two is odd, so that they are in all places of panels, whose widths are even.
    ids = list(range(0, matrix.outputs, max(1, matrix.outputs // _COMPARED_OUTPUTS) | 1))
    return bool(torch.equal(ours(torch.tensor(ids)), torch.from_numpy(matrix.rows(ids)).to(ours.dtype)))


def _name_of(model: Any, module: Any) -> str:
    return next((name for name, found in model.named_modules() if found is module), "")
