"""Seeded rows on which operators are compared with the modules that they stand in for.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from functools import lru_cache

import torch

SEED = 20
# So many rows of each kind.
NUM_EACH = 8
SCALES = (1.0, 1e-4, 1e4)
# So many times as large are the outputs of linear layers and experts made to pass limits that rows
# do not reach.
FACTOR = 1000.0


def probe_rows(width: int, dtype: torch.dtype, *, scales: tuple[float, ...] = SCALES) -> torch.Tensor:
    """Returns rows [num_rows, width] in `dtype`: normal ones, the same 1e-4 and 1e4 times as large,
    one-hot ones, pairs of near equals, and normal ones around 2, because the mean of a wide row is
    otherwise too near 0 to be seen. Values stay within the range of f16. They are the caller's.
    """
    return _drawn(width, dtype, scales).clone()  # since a model's module may write over its input


# A model has a handful of widths, and asks for the rows of each some hundred times.
@lru_cache(maxsize=16)
def _drawn(width: int, dtype: torch.dtype, scales: tuple[float, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    normal = torch.randn(NUM_EACH, width, generator=generator, dtype=torch.float64)
    kinds = [normal * scale for scale in scales]
    one_hot = torch.zeros(NUM_EACH, width, dtype=torch.float64)
    places = torch.randint(0, width, (NUM_EACH,), generator=generator)
    one_hot[torch.arange(NUM_EACH), places] = 1.0
    kinds.append(one_hot)
    near = normal[: NUM_EACH // 2].repeat_interleave(2, dim=0)
    near[1::2] *= 1.0 + 2.0**-10
    kinds.append(near)
    kinds.append(normal[: NUM_EACH // 2] + 2.0)
    return torch.cat(kinds).to(dtype)
