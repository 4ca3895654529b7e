"""Records what each experts module of a model is given and what it returns.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dflash_moe.model.architecture import find_experts


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """One call of an experts module, as the model made it: hidden_states and output are
    [num_tokens, width], topk_ids and topk_weights are [num_tokens, top_k].
    """

    name: str
    hidden_states: Any
    topk_ids: Any
    topk_weights: Any
    output: Any


@contextmanager
def capture_calls(model: Any, receive: Callable[[ExpertsCall], None]) -> Iterator[None]:
    """Calls `receive` within the block with every call of every experts module, in the order of the
    forward pass.
    """

    def hook_for(name: str) -> Callable[..., None]:
        def hook(_module: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            # The interface passes three tensors, by position or by name, in this order.
            hidden, ids, weights = (*arguments, *options.values())
            receive(ExpertsCall(name, hidden, ids, weights, output))

        return hook

    handles = [module.register_forward_hook(hook_for(name), with_kwargs=True) for name, module in find_experts(model).items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
