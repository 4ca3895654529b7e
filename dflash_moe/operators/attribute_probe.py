"""Finds the modules whose parameters others read past their forward, such as a block that asks for
`self.gate.weight.dtype`. They cannot be replaced by operators that have no parameters.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class _Watched(nn.Module):  # type: ignore[misc]
    """Stands in for a linear layer, and notes its name once somebody else reads what is its own."""

    def __init__(self, name: str, linear: nn.Linear, seen: set[str]) -> None:
        super().__init__()
        # Not a child: nobody is to find it in the tree.
        self.__dict__["_linear"] = linear
        self._name, self._seen = name, seen

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self._linear(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        # Python asks here for what this object does not have itself.
        if name in self._linear._parameters:
            self._seen.add(self._name)
        return getattr(self._linear, name)


@contextmanager
def read_parameters(model: nn.Module) -> Iterator[set[str]]:
    """Opens a block in which the model runs, and yields the names of those linear layers whose
    parameters were read otherwise than by calling them. Afterwards the tree is as before.
    """
    seen: set[str] = set()
    replaced = []
    try:
        for path, parent in list(model.named_modules()):
            for child, module in list(parent._modules.items()):
                if type(module) is nn.Linear:
                    name = f"{path}.{child}" if path else child
                    replaced.append((parent, child, module))
                    parent._modules[child] = _Watched(name, module, seen)
        yield seen
    finally:
        for parent, child, module in replaced:
            parent._modules[child] = module
