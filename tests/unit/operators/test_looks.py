"""Whoever uses more of positions than their shape, or asks a cache for a length, is seen.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dflash_moe.errors import UnsupportedError
from dflash_moe.forward.kv_budget import KvShape
from dflash_moe.forward.torch_cache import TorchCache
from dflash_moe.operators.looks import LookingCache, watched

pytestmark = pytest.mark.transformers

TABLE = torch.rand(9, 3)
USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda positions: positions / 128,
    "on the other side": lambda positions: 1 + positions,
    "an index": lambda positions: TABLE[positions],
    "an embedding": lambda positions: torch.nn.functional.embedding(positions, TABLE),
    "the largest": lambda positions: int(positions.max()),
    "another dtype": lambda positions: positions.float(),
    "values": lambda positions: positions.tolist(),
    "a part of a list": lambda positions: torch.cat([positions, positions]),
}
NO_USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda positions: (positions.shape, positions.size(1), positions.ndim, len(positions)),
    "device": lambda positions: (positions.device, positions.dtype),
    "being there": lambda positions: positions is not None,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_use_of_positions_is_seen_and_gives_what_they_are(use):
    seen = []
    positions = torch.tensor([[3, 5]])
    found = use(watched(positions, lambda: seen.append(1)))
    assert seen
    expected = use(positions)
    assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected


@pytest.mark.parametrize("use", NO_USES.values(), ids=NO_USES)
def test_their_shape_tells_nothing(use):
    seen: list[int] = []
    use(watched(torch.tensor([[3, 5]]), lambda: seen.append(1)))
    assert not seen


ASKED: dict[str, Callable[[Any], Any]] = {
    "get_seq_length": lambda cache: cache.get_seq_length(),
    "get_query_offset": lambda cache: cache.get_query_offset(0),
    "get_max_length": lambda cache: cache.get_max_length(),
    "get_mask_sizes": lambda cache: cache.get_mask_sizes(1, 0),
    "has_previous_state": lambda cache: cache.has_previous_state(0),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_cache_of_several_sequences_tells_no_length(name):
    cache = TorchCache([KvShape(1, 8, 8)], 2, 32, torch.float32, torch.device("cpu"))
    with pytest.raises(UnsupportedError, match=name):
        ASKED[name](cache)
    seen: list[str] = []
    ASKED[name](LookingCache(7, seen.append))
    assert seen == [name]


def test_masks_may_ask_for_lengths():
    from transformers import AutoConfig
    from transformers.masking_utils import create_causal_mask

    seen: list[str] = []
    config = AutoConfig.for_model("qwen3_moe", attn_implementation="eager")
    mask = create_causal_mask(config, torch.zeros(1, 4, 8), None, LookingCache(0, seen.append), torch.arange(4)[None])
    assert mask.shape[-2:] == (4, 4)
    assert not seen
