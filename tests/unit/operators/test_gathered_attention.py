"""Attention by torch over gathered keys: near float64 for every form of its arguments and every
mixture of sequences, and what its groups may hold.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dflash_moe.errors import EngineError, UnsupportedError
from dflash_moe.forward.blocks import BlockPool
from dflash_moe.forward.kv_budget import KvShape
from dflash_moe.forward.sequence import SequenceBlocks
from dflash_moe.forward.step_blocks import StepBlocks
from dflash_moe.forward.torch_cache import TorchCache
from dflash_moe.operators import gathered_attention
from dflash_moe.operators.gathered_attention import GatheredLayer, attach, attention_forward, layer_of
from dflash_moe.operators.row_groups import plan_groups
from dflash_moe.operators.step_context import StepContext, computing

NUM_HEADS, NUM_KV_HEADS, KEY_SIZE, VALUE_SIZE = 6, 2, 24, 20
NUM_BLOCKS, MAX_KEYS = 90, 700
CPU = torch.device("cpu")
# The tokens that each sequence has before the step, and those of the step.
STEPS = {
    "decode rows": [(5, 1), (60, 1), (61, 1), (300, 1), (290, 1), (0, 1)],
    "prefills": [(0, 40), (0, 40), (0, 3), (0, 3), (0, 200)],
    "chunks": [(100, 50), (17, 20), (3, 17)],
    "drafts": [(80, 4), (90, 4), (3, 1), (85, 4), (100, 2)],
    "a mixture": [(7, 1), (0, 90), (50, 3), (9, 1), (33, 30), (200, 1)],
}
FORMS: list[dict[str, Any]] = [
    {}, {"sliding_window": 13}, {"softcap": 2.0}, {"s_aux": True}, {"scaling": 0.7},
    {"sliding_window": 70, "softcap": 1.5, "s_aux": True, "scaling": 0.4},
]  # fmt: skip


@dataclass
class Step:
    """A step over one layer, with all that its sequences know."""

    cache: TorchCache
    context: StepContext
    module: nn.Module
    counts: list[tuple[int, int]]
    keys: list[torch.Tensor]  # [num_tokens, num_kv_heads, size] of each sequence
    values: list[torch.Tensor]
    queries: torch.Tensor  # [1, num_heads, num_rows, size]


def begun(counts: list[tuple[int, int]], dtype: torch.dtype = torch.float32, seed: int = 1) -> Step:
    """Stores what sequences have, as steps of their own, and begins the step of the rest."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    pool = BlockPool(NUM_BLOCKS)
    cache = TorchCache([KvShape(NUM_KV_HEADS, KEY_SIZE, VALUE_SIZE)], NUM_BLOCKS, MAX_KEYS, dtype, CPU)
    for pages in (cache.layer(0).keys, cache.layer(0).values):
        pages.fill_(torch.nan)
    module = nn.Module()
    attach(module, GatheredLayer(cache, 0, VALUE_SIZE, window=0, is_latent=False))
    sequences = [SequenceBlocks(pool) for _ in counts]
    keys = [normal(first + count, NUM_KV_HEADS, KEY_SIZE) for first, count in counts]
    values = [normal(first + count, NUM_KV_HEADS, VALUE_SIZE) for first, count in counts]

    def store(ends: list[int]) -> StepContext | None:
        planned, context = StepBlocks(), None
        parts = []
        for place, sequence in enumerate(sequences):
            if ends[place] > sequence.num_tokens:
                parts.append((place, slice(sequence.num_tokens, ends[place])))
                planned.append(sequence, ends[place] - sequence.num_tokens)
        if parts:
            step = planned.pack()
            context = StepContext(step.positions, cache.begin(step), step.sequences, ())
            stored = (torch.cat([rows[place][part] for place, part in parts]) for rows in (keys, values))
            with computing(context):
                cache.update(*(rows.transpose(0, 1)[None] for rows in stored), 0)
            planned.commit()
        return context

    store([first for first, _ in counts])
    context = store([first + count for first, count in counts])
    assert context is not None
    queries = normal(sum(count for _, count in counts), NUM_HEADS, KEY_SIZE)
    return Step(cache, context, module, counts, keys, values, queries.transpose(0, 1)[None])


def dense(step: Step, form: dict[str, Any]) -> torch.Tensor:
    """Returns [num_rows, num_heads, value_size] in float64."""
    found, at = [], 0
    window, repeats = form.get("sliding_window") or 10**6, NUM_HEADS // NUM_KV_HEADS
    for (first, count), keys, values in zip(step.counts, step.keys, step.values, strict=True):
        rows = step.queries[0, :, at : at + count].double()
        scores = rows @ keys.double().repeat_interleave(repeats, dim=1).permute(1, 2, 0)
        scores *= form.get("scaling") or KEY_SIZE**-0.5
        if form.get("softcap"):
            scores = form["softcap"] * torch.tanh(scores / form["softcap"])
        places, queries = torch.arange(first + count), torch.arange(first, first + count)[:, None]
        scores = scores.masked_fill((places > queries) | (places <= queries - window), -torch.inf)
        if form.get("s_aux") is not None:
            scores = torch.cat((scores, form["s_aux"].double()[:, None, None].expand(-1, count, 1)), dim=2)
        weights = torch.softmax(scores, dim=2)[..., : first + count]
        found.append((weights @ values.double().repeat_interleave(repeats, dim=1).transpose(0, 1)).transpose(0, 1))
        at += count
    return torch.cat(found)


def attended(step: Step, form: dict[str, Any]) -> torch.Tensor:
    if (layer := layer_of(step.module)) is not None:
        attach(step.module, replace(layer, window=form.get("sliding_window") or 0))
    with torch.inference_mode(), computing(step.context):
        out, _ = attention_forward(step.module, step.queries, step.queries, step.queries, **form)
    return out[0]


def form_of(named: dict[str, Any]) -> dict[str, Any]:
    sinks = torch.linspace(-2.0, 3.0, NUM_HEADS) if named.get("s_aux") else None
    return {**named, "s_aux": sinks}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form) or "plain")
@pytest.mark.parametrize("name", STEPS)
def test_every_form_is_near_float64_in_every_mixture(name, form):
    step, form = begun(STEPS[name]), form_of(form)
    torch.testing.assert_close(attended(step, form).double(), dense(step, form), rtol=0, atol=5e-6)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form) or "plain")
def test_long_chunks_are_computed_in_pieces(monkeypatch, form):
    step, form = begun(STEPS["a mixture"]), form_of(form)
    monkeypatch.setattr(gathered_attention, "_MAX_SCORES", 900)
    torch.testing.assert_close(attended(step, form).double(), dense(step, form), rtol=0, atol=5e-6)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form) or "plain")
def test_16_bits_are_rounded_at_the_end(form):
    step, form = begun(STEPS["a mixture"], torch.bfloat16), form_of(form)
    found = attended(step, form)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), dense(step, form), rtol=2**-6, atol=2**-6)


def test_a_step_is_few_calls_each_within_the_buffer():
    step = begun(STEPS["a mixture"])
    sizes = [(group.num_sequences, group.num_rows, group.num_keys) for group in step.cache.groups(step.context, 0)]
    # Rows of 201 and 8 keys would be mostly padding together.
    assert sorted(sizes) == [(1, 1, 201), (1, 3, 53), (1, 30, 63), (1, 90, 90), (2, 1, 10)]
    assert step.cache.groups(step.context, 0) is step.cache.groups(step.context, 0)
    many = begun([(40 + place, 1) for place in range(20)])
    assert [group.num_sequences for group in many.cache.groups(many.context, 0)] == [11, 9]
    assert all(group.num_sequences * group.num_keys <= MAX_KEYS for group in many.cache.groups(many.context, 0))
    # A group of all rows takes them as they lie, whatever the order of lengths.
    few = begun([(60, 1), (70, 1), (65, 1)])
    (group,) = few.cache.groups(few.context, 0)
    assert group.rows == slice(0, 3)


def test_groups_read_the_keys_of_their_window_from_their_own_slots():
    chance = np.random.default_rng(4)
    tables = [chance.permutation(NUM_BLOCKS)[:20].astype(np.int32) for _ in range(5)]
    sequences = [
        (table, first, count)
        for table, (first, count) in zip(tables, [(200, 1), (33, 1), (190, 2), (20, 70), (9, 2)], strict=True)
    ]
    for window in (0, 1, 16, 50):
        rows = []
        for group in plan_groups(sequences, window, MAX_KEYS, CPU):
            packed = torch.arange(300)[group.rows].view(group.num_sequences, -1)
            rows += packed.flatten().tolist()
            for own, slots in zip(packed.tolist(), group.slots.view(group.num_sequences, -1).tolist(), strict=True):
                table, first, count = sequences[[0, 1, 2, 4, 74].index(own[0])]
                start = max(0, first - window + 1) if window else 0
                expected = [table[place // 16] * 16 + place % 16 for place in range(start, first + count)]
                # What is behind them repeats the last.
                assert slots == expected + expected[-1:] * (group.num_keys - len(expected))
        assert sorted(rows) == list(range(76))


def test_more_keys_than_the_buffer_holds_are_never_gathered():
    step = begun(STEPS["prefills"])
    group = SimpleNamespace(num_sequences=2, num_keys=MAX_KEYS // 2 + 1)
    with pytest.raises(EngineError, match=f"702 keys .* room for {MAX_KEYS}"):
        step.cache.gather(0, group)


def test_what_it_does_not_compute_is_refused_by_name():
    step = begun(STEPS["drafts"])
    with pytest.raises(UnsupportedError, match="does not compute with position_bias"):
        attended(step, {"position_bias": torch.zeros(1)})
    with pytest.raises(UnsupportedError, match="is_causal=False"):
        attended(step, {"is_causal": False})
    assert layer_of(nn.Module()) is None
    step.module = nn.Module()
    with pytest.raises(UnsupportedError, match="has no pages"):
        attended(step, {})
