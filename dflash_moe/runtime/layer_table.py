"""Layers by what callers name them with: the index in the checkpoint's table of layers, or the
module's name.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from dflash_moe.errors import ConfigError, shown

if TYPE_CHECKING:
    from dflash_moe.model.spec import LayerSpec


class LayerShape(NamedTuple):
    """What a call must know of its layer."""

    layer: int  # index in the layer table
    in_size: int  # width of a row of hidden_states
    out_size: int  # width of a row of the result


class LayerTable(dict[object, LayerShape]):
    """Layers by index and by name; ConfigError for a dense or unknown one."""

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        self._layers = layers
        for layer in layers:
            shape = LayerShape(layer.index, layer.ffn.in_size, layer.ffn.out_size)
            self[layer.index] = self[layer.name] = shape

    def of(self, layer: object) -> LayerShape:
        """The layer's shape. ConfigError also for what names nothing, such as a list."""
        try:
            return self[layer]
        except TypeError:
            self.__missing__(layer)  # a list, a map: nothing that a table can look up

    def __missing__(self, layer: object) -> NoReturn:
        known = [item.index for item in self._layers]
        raise ConfigError(
            f"layer {shown(layer)} has no routed experts; layers with experts: {known[0]}..{known[-1]} ({len(known)} of them), "
            f"named like {self._layers[0].name!r}"
        )
