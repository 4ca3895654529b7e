"""Notes what a model's code looks at of positions and lengths beside cosines, sines and attention.
A host operator is told neither, so that it can stand in for no code that reads one of them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache

from dflash_moe.errors import UnsupportedError

# A tensor of positions may be asked for these: they are the same wherever a sequence stands.
_SHAPES = frozenset(
    {torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.device.__get__, torch.Tensor.ndim.__get__,
     torch.Tensor.size, torch.Tensor.dim, torch.Tensor.__len__}
)  # fmt: skip
# What makes masks asks for lengths, and pages need no mask (`attention_probe.py` compares it).
_MASKS = "transformers.masking_utils"


class StepCache(Cache):  # type: ignore[misc]
    """What the caches of packed steps share: the sequences of a step have a length each, so that a
    module that asks for one is answered by an error and never by a wrong number.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def length_asked(self, what: str) -> int:
        """Answers a question for a length; `what` is the method that was called."""
        raise UnsupportedError(
            f"a module of the model asks its cache for {what} in some steps, and a step has a length for each of its "
            "sequences; run this model by dflash_moe.offload and transformers' generate"
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Answers by `length_asked`, as all methods here do."""
        return self.length_asked("get_seq_length")

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """As `get_seq_length`."""
        return self.length_asked("get_query_offset")

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """As `get_seq_length`."""
        return self.length_asked("get_max_length")

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As `get_seq_length`."""
        return self.length_asked("get_mask_sizes") + query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """As `get_seq_length`."""
        return self.length_asked("has_previous_state") > 0


class LookingCache(StepCache):
    """Keeps nothing and gives back what a layer stores. Whoever asks for a length hears `length`,
    and `on_look` hears the name of the method, but for questions of what makes masks.
    """

    def __init__(self, length: int, on_look: Callable[[str], None]) -> None:
        super().__init__()
        self._length, self._on_look = length, on_look

    def length_asked(self, what: str) -> int:
        """As `StepCache.length_asked`."""
        # The caller of the method that called this.
        if sys._getframe(2).f_globals.get("__name__") != _MASKS:
            self._on_look(what)
        return self._length

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *_arguments: Any, **_options: Any) -> tuple[Any, Any]:
        """Returns keys and values as they are."""
        return key_states, value_states


def watched(positions: torch.Tensor, on_look: Callable[[], None]) -> torch.Tensor:
    """Returns a tensor with the values of `positions` that calls `on_look` whenever somebody uses
    more of it than its shape, also as an index. Passing it on is no use.
    """

    class Watched(torch.Tensor):  # type: ignore[misc]
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            if function not in _SHAPES:
                on_look()
            with torch._C.DisableTorchFunctionSubclass():
                return function(*arguments, **(options or {}))

    return positions.as_subclass(Watched)
