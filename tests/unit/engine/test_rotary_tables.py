"""Rotary tables per sequence: what the cosines and sines depend on is found out, not assumed.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dflash_moe.engine.rotary_tables import CHUNK, RotaryTables  # noqa: E402


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
    tables = RotaryTables(_PerLayerType())
    tables.begin([(8, 2, 3)])
    assert tables(torch.zeros(1, 1, 1), None, layer_type="ab").tolist() == [[4.0, 6.0, 8.0]]


def test_each_sequence_is_on_its_own_where_a_module_looks_at_the_largest_position():
    tables = RotaryTables(_LooksAtLargest())
    tables.begin([(5, 3, 2), (5 * CHUNK, 3, 2)])
    assert tables(torch.zeros(1, 1, 1)).tolist() == [[3.0, 4.0, 6.0, 8.0]]
