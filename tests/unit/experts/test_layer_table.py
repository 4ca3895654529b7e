"""The table of layers: what names one, and what is said of anything else.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_moe.errors import ConfigError
from dflash_moe.experts.layer_table import LayerTable
from dflash_moe.testing.tiny import layer_name, tiny_checkpoint


@pytest.fixture
def table(tmp_path: Path) -> LayerTable:
    return LayerTable(tiny_checkpoint(tmp_path, num_layers=2, hidden_size=64).layers)


def test_a_layer_is_found_by_index_and_by_name(table: LayerTable) -> None:
    assert table.of(1) == table.of(np.int64(1)) == table.of(layer_name(1)) == (1, 64, 64)


NO_LAYERS = [2, -1, "lm_head", None, 0.5, float("nan"), [0], {"layer": 0}, np.zeros(3), "x" * 5000, 10**5000]


@pytest.mark.parametrize("layer", NO_LAYERS, ids=range(len(NO_LAYERS)))
def test_anything_else_is_refused_with_the_layers_there_are(table: LayerTable, layer: object) -> None:
    with pytest.raises(ConfigError, match=r"has no routed experts; layers with experts: 0\.\.1 \(2 of them\)") as found:
        table.of(layer)
    assert len(str(found.value)) < 300
