"""The table in which callers look up a layer, by its index in the checkpoint's table of layers or
by its module's name.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from dflash_moe.errors import ConfigError, shown

if TYPE_CHECKING:
    from dflash_moe.model.spec import LayerSpec


class LayerShape(NamedTuple):
    """What a call must know of its layer: the index in the layer table, the width of a row of
    hidden_states, and the width of a row of the result, in elements.
    """

    layer: int
    in_size: int
    out_size: int


class LayerTable(dict[object, LayerShape]):
    """The layers with routed experts by index and by name. Looking up a dense or unknown layer
    raises ConfigError. A dict keeps the lookup of the hot path in C.
    """

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        self._layers = layers
        for layer in layers:
            shape = LayerShape(layer.index, layer.ffn.in_size, layer.ffn.out_size)
            self[layer.index] = self[layer.name] = shape

    def of(self, layer: object) -> LayerShape:
        """Returns the layer's shape. Raises ConfigError also for what cannot name anything, such as
        a list.
        """
        try:
            return self[layer]
        except TypeError:
            # A list or a map cannot be looked up, because it has no hash.
            self.__missing__(layer)

    def __missing__(self, layer: object) -> NoReturn:
        known = [item.index for item in self._layers]
        raise ConfigError(
            f"layer {shown(layer)} has no routed experts; layers with experts: {known[0]}..{known[-1]} ({len(known)} of them), "
            f"named like {self._layers[0].name!r}"
        )
