"""Rotary tables per sequence: what the cosines and sines depend on is found out, not assumed.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dflash_moe.forward.rotary_tables import CHUNK, RotaryTables, stand_in  # noqa: E402
from dflash_moe.operators.step_context import StepContext, computing  # noqa: E402


def step_of(*lengths):
    """A step of sequences, each as (length at most, position of its first row, number of rows)."""
    positions = [position for _, first, count in lengths for position in range(first, first + count)]
    return StepContext(np.array(positions, np.int64), torch.empty(0), (), lengths)


class _Plain(torch.nn.Module):
    def forward(self, x, position_ids):
        return position_ids.to(x.dtype)


class _LooksAtLargest(torch.nn.Module):
    def forward(self, x, position_ids):
        scale = 2 if int(position_ids.max()) >= 4 * CHUNK else 1
        return scale * position_ids.to(x.dtype)


class _PerLayerType(torch.nn.Module):
    def forward(self, x, position_ids, layer_type):
        return position_ids.to(x.dtype) * len(layer_type)


@pytest.mark.parametrize(("module", "wants"), [(_Plain, False), (_LooksAtLargest, False), (_PerLayerType, True)])
def test_a_module_that_wants_a_layer_type_is_told_apart(module, wants):
    assert RotaryTables(module()).wants_arguments is wants


def test_a_module_with_arguments_is_called_with_them():
    module = _PerLayerType()
    stand_in(module, RotaryTables(module))
    with computing(step_of((8, 2, 3))):
        assert module(torch.zeros(1, 1, 1), None, layer_type="ab").tolist() == [[4.0, 6.0, 8.0]]


def test_each_sequence_is_on_its_own_where_a_module_looks_at_the_largest_position():
    step = step_of((5, 3, 2), (5 * CHUNK, 3, 2))
    assert RotaryTables(_LooksAtLargest()).of(step, torch.zeros(1, 1, 1)).tolist() == [[3.0, 4.0, 6.0, 8.0]]


class _Wide(torch.nn.Module):
    """Cosines and sines as most models have them."""

    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() / torch.tensor([1.0, 3.0, 9.0])
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@pytest.mark.parametrize("module", [_Wide, _Plain])
def test_rows_of_many_sequences_have_the_bits_of_each_sequence_alone(module):
    x = torch.zeros(1, 1, 1, dtype=torch.bfloat16)
    many, alone = RotaryTables(module()), RotaryTables(module())
    steps = [[(9, 3, 2)], [(2000, 1200, 3), (9, 0, 1), (600, 5, 590)], [(CHUNK, CHUNK - 1, 1), (3 * CHUNK, CHUNK - 1, 2)]]
    for step in steps:
        expected = []
        for sequence in step:
            tables = alone.of(step_of(sequence), x)
            expected.append(tables if isinstance(tables, tuple) else (tables,))
        found = many.of(step_of(*step), x)
        joined = [torch.cat(column, dim=1) for column in zip(*expected, strict=True)]
        for table, want in zip(found if isinstance(found, tuple) else (found,), joined, strict=True):
            assert table.dtype == torch.bfloat16
            assert torch.equal(table, want)


def test_tables_made_in_inference_mode_grow_outside_of_it():
    tables = RotaryTables(_Wide())
    with torch.inference_mode():
        few, _ = tables.cos_sin(step_of((5, 0, 5), (5, 0, 1)))
    for first in (2 * CHUNK, 5 * CHUNK):
        cos, sin = tables.cos_sin(step_of((6 * CHUNK, 0, 5), (6 * CHUNK, first, 1)))
        assert torch.equal(cos[:5], few[:5])
        torch.testing.assert_close(cos[5], torch.cos(torch.tensor(float(first)) / torch.tensor([1.0, 3.0, 9.0])))
        assert cos.shape == sin.shape == (6, 3)


def test_a_step_without_rows_has_tables_without_rows():
    tables = RotaryTables(_Wide())
    assert [table.shape for table in tables.cos_sin(step_of())] == [(0, 3), (0, 3)]


class _Typed(torch.nn.Module):
    """Tables for types of layers, of which those of "long" look at the largest position."""

    def __init__(self, layer_types=("short", "long")):
        super().__init__()
        self.layer_types = layer_types
        self.original_max_seq_len = 40

    def forward(self, x, position_ids, layer_type):
        scale = {"short": 1, "long": 3 if int(position_ids.max()) >= 40 else 2}[layer_type]
        return scale * position_ids[..., None].to(x.dtype), position_ids[..., None].to(x.dtype)


def digests(tables, length, num_blocks=4):
    return [tables.block_digest(length, block, 16) for block in range(num_blocks)]


def test_a_module_is_asked_with_each_type_that_layers_pass():
    short, both = RotaryTables(_Typed(("short",))), RotaryTables(_Typed())
    assert (short.wants_arguments, short.depends_on_length) == (True, False)
    assert (both.wants_arguments, both.depends_on_length) == (True, True)
    assert short.are_alike(4, 400)
    assert [both.are_alike(4, length) for length in (5, 40, 41, 400)] == [True, True, False, False]
    # What is clamped at the end of a sequence is in none of its full blocks.
    assert digests(both, 32, 2) == digests(both, 40, 2)
    assert digests(both, 70) == digests(both, 500)
    assert not set(digests(both, 40, 2)) & set(digests(both, 41, 2))
    assert len(set(digests(both, 70))) == 4


def test_types_that_nobody_named_make_each_length_another():
    tables = RotaryTables(_Typed(("short",)))
    x, step = torch.zeros(1, 1, 1), step_of((30, 2, 1))
    assert tables.of(step, x, layer_type="short")[0].flatten().tolist() == [2.0]
    assert not tables.depends_on_length
    assert tables.of(step, x, "long")[0].flatten().tolist() == [4.0]
    assert tables.of(step_of((41, 2, 1)), x, "long")[0].flatten().tolist() == [6.0]
    assert tables.depends_on_length
    assert not set(digests(tables, 30, 1)) & set(digests(tables, 31, 1))


def test_a_digest_names_every_bit_of_a_blocks_rows():
    class Far(_Typed):
        def forward(self, x, position_ids, layer_type):
            tables = list(super().forward(x, position_ids, layer_type))
            tables[1] = tables[1] + (position_ids[..., None] == 300) * 2.0**-10
            return tuple(tables)

    one, other = RotaryTables(_Typed()), RotaryTables(Far())
    assert [a == b for a, b in zip(digests(one, 400, 25), digests(other, 400, 25), strict=True)] == [
        block != 300 // 16 for block in range(25)
    ]
