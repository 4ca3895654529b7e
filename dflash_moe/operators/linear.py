"""Linear layers and embeddings over packed weights, and the proof that they may stand in for those
of torch.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dflash_moe import _core
from dflash_moe.operators.addresses import DTYPE_NAMES, dense, rows_of
from dflash_moe.operators.bounds import distance_bound, excess, linear_bound
from dflash_moe.operators.probes import SCALES, SEED, probe_rows

# So many outputs of a layer are compared.
PROBED_OUTPUTS = 64
_ROWS_AT_ONCE = 4096

# A matrix as the core takes it: in memory or in a mapped file of a checkpoint.
Source = tuple[Any, ...]


def memory_source(weight: torch.Tensor) -> Source:
    """Returns a matrix [outputs, inputs] of any strides that lies in a tensor, which the caller
    keeps until it is packed.
    """
    outputs, inputs = weight.shape
    return weight.data_ptr(), DTYPE_NAMES[weight.dtype], outputs, inputs, weight.stride(0), weight.stride(1)


def bias_source(bias: torch.Tensor | None) -> Source | None:
    """Returns a vector that lies in a dense tensor, which the caller keeps until it is packed."""
    return None if bias is None else (bias.data_ptr(), DTYPE_NAMES[bias.dtype], bias.shape[0], 1)


class HostLinear(nn.Module):  # type: ignore[misc]
    """Stands in for an `nn.Linear`. Its weights are packed and belong to it alone."""

    def __init__(
        self,
        packed: _core.PackedLinear,
        out_dtype: torch.dtype | None = None,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Outputs are in `out_dtype`, or where that is None in the dtype of the rows. `bias` is the
        one that `packed` has too, and `dtype` that of the former module's weight.
        """
        super().__init__()
        self.packed = packed
        self.shift = None if bias is None else bias.detach().clone()
        self.in_features, self.out_features = packed.inputs, packed.outputs
        # A model's code may ask a layer for the dtype or shape of its weight, which has no values
        # any more.
        self.weight = torch.empty((packed.outputs, packed.inputs), dtype=out_dtype or dtype, device="meta")
        self.out_dtype = out_dtype

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns [..., outputs] for rows [..., inputs]."""
        rows = dense(rows)
        out = self.empty(rows)
        self.packed.run(*rows_of(rows), *rows_of(out)[:3])
        return out

    def empty(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns memory for what the layer gives for rows."""
        return rows.new_empty((*rows.shape[:-1], self.out_features), dtype=self.out_dtype or rows.dtype)

    def exact(self) -> nn.Module:
        """Returns a layer of torch in float64 with the weights that are packed, dequantised."""
        # Drawing values that are overwritten would take as long as the layer's proof.
        linear = nn.utils.skip_init(
            nn.Linear, self.in_features, self.out_features, bias=self.shift is not None, dtype=torch.float64
        )
        with torch.no_grad():
            linear.weight.copy_(weights_of(self.packed))
            if self.shift is not None:
                linear.bias.copy_(self.shift)
        return linear

    def extra_repr(self) -> str:
        """Names sizes and formats."""
        return f"{self.in_features} -> {self.out_features}, {', '.join(self.packed.formats)}"


def weights_of(packed: _core.PackedLinear) -> torch.Tensor:
    """Returns what is packed, widened exactly: float32 [outputs, inputs]."""
    ids = torch.arange(packed.outputs)
    weight = torch.empty((packed.outputs, packed.inputs), dtype=torch.float32)
    packed.gather(ids.data_ptr(), len(ids), *rows_of(weight)[:3])
    return weight


class HostEmbedding(nn.Module):  # type: ignore[misc]
    """Stands in for an `nn.Embedding` over a packed matrix, which may also be that of the head."""

    def __init__(self, packed: _core.PackedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed = packed
        self.embedding_dim, self.num_embeddings = packed.inputs, packed.outputs
        self.dtype = dtype

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns rows [..., embedding_dim] of ids [...] in int64."""
        ids = dense(input_ids)
        out = torch.empty((*ids.shape, self.embedding_dim), dtype=self.dtype)
        self.packed.gather(ids.data_ptr(), ids.numel(), *rows_of(out)[:3])
        return out


def linear_excess(ours: nn.Module, own: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None, numerics: str) -> float:
    """Returns how far a packed layer is from its module on the probe rows: at most 1 where it may
    stand in. `weight` [outputs, inputs] and `bias` are what it must compute with.

    Some outputs are compared with float64, and all of them with the module's own, which sees a
    panel that was packed to the wrong place.
    """
    rows = _probe(weight.shape[1], weight.dtype)
    found, expected = ours(rows).float(), own(rows)
    chosen = _some_outputs(weight.shape[0])
    some_weights = weight[chosen].double()
    exact = _exact_outputs(rows, some_weights, None if bias is None else bias[chosen])
    bound = linear_bound(numerics, rows.double(), some_weights)
    some = excess(found[:, chosen], expected[:, chosen], exact, bound)
    # In parts, because a copy of a whole matrix in float32 would be the largest tensor of all.
    parts = weight.split(_ROWS_AT_ONCE)
    lengths = torch.cat([torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts])
    lengths = lengths if bias is None else lengths + bias.float().abs()
    distance = distance_bound(numerics, weight.shape[1], weight.dtype)
    allowed = distance * rows.float().norm(dim=1, keepdim=True).clamp_min(1.0) * lengths
    ratio = (found - expected.float()).abs() / allowed.clamp_min(torch.finfo(torch.float32).tiny)
    return max(some, float(ratio.nan_to_num(nan=float("inf")).max()) if torch.isfinite(expected).all() else some)


def stored_excess(
    ours: HostLinear,
    rows_of_weight: Callable[[Sequence[int]], Any],
    bias: torch.Tensor | None,
    numerics: str,
    dtype: torch.dtype,
) -> float:
    """Returns how far a layer that is packed as a checkpoint stores it is from float64 on the probe
    rows, in `dtype`, at some outputs: at most 1 where it is right. `rows_of_weight` gives the
    weights of some outputs in float32, by other code than the kernels'.
    """
    rows = _probe(ours.in_features, dtype)
    chosen = _some_outputs(ours.out_features)
    found = ours(rows)[:, chosen]
    weight = torch.from_numpy(rows_of_weight(chosen)).double()
    exact = _exact_outputs(rows, weight, None if bias is None else bias[chosen])
    return excess(found, exact.to(found.dtype), exact, linear_bound(numerics, rows.double(), weight))


def _probe(width: int, dtype: torch.dtype) -> torch.Tensor:
    return probe_rows(width, dtype, scales=SCALES if dtype != torch.float16 else SCALES[:2])


def _exact_outputs(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns rows times `weight` [outputs, inputs] in float64, with the bias added."""
    exact = rows.double() @ weight.double().T
    return exact if bias is None else exact + bias.double()


def _some_outputs(count: int) -> Sequence[int]:
    if count <= PROBED_OUTPUTS:
        return range(count)
    generator = torch.Generator().manual_seed(SEED)
    return sorted(torch.randperm(count, generator=generator)[:PROBED_OUTPUTS].tolist())
