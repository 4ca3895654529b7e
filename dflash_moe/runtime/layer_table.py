"""Layers by what callers name them with: the index in the checkpoint's table of layers, or the
module's name.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from dflash_moe.errors import ConfigError, shown

if TYPE_CHECKING:
    from dflash_moe.model.spec import LayerSpec


_look_up = dict.__getitem__  # bound once: every call of experts() looks up its layer


class LayerTable(dict[object, tuple[int, int, int]]):
    """(index, in_size, out_size) of a layer by index or name; ConfigError for a dense or unknown
    one, and for what names nothing at all (a list, a tensor).
    """

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        self._layers = layers
        for layer in layers:
            self[layer.index] = self[layer.name] = (layer.index, layer.ffn.in_size, layer.ffn.out_size)

    def __getitem__(self, layer: object) -> tuple[int, int, int]:
        try:
            return _look_up(self, layer)
        except TypeError:  # a list, a map: nothing that a table can look up
            self.__missing__(layer)

    def __missing__(self, layer: object) -> NoReturn:
        known = [item.index for item in self._layers]
        raise ConfigError(
            f"layer {shown(layer)} has no routed experts; layers with experts: {known[0]}..{known[-1]} ({len(known)} of them), "
            f"named like {self._layers[0].name!r}"
        )
