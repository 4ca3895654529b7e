"""Layers that stand where vLLM builds its routed experts. They have no parameters, and their calls
go to the workers.

What they use of vLLM is compared with its source (tests/contracts/vllm.py).
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from dflash_moe.integrations.expert_route import call_experts
from dflash_moe.integrations.vllm.refusals import refuse_layer

if TYPE_CHECKING:
    from dflash_moe.integrations.engine_experts import EngineExperts
    from dflash_moe.integrations.expert_route import ExpertRoute


def remote_layer(kind: type, experts_of: Callable[[Any], EngineExperts]) -> type:
    """Returns a subclass of `kind`, which is vLLM's `RoutedExperts` or derived from it.
    `experts_of` gives the experts of the engine with a certain `VllmConfig`.
    """

    class RemoteExperts(kind):  # type: ignore[misc,valid-type]
        """Routed experts without parameters, which workers compute."""

        def __init__(self, layer_name: str, params_dtype: Any, moe_config: Any, *arguments: Any, **options: Any) -> None:
            engine = experts_of(get_current_vllm_config())
            layer = engine.layer(layer_name)
            refuse_layer(layer_name, layer, moe_config, options)
            assert layer is not None
            # torch.nn.Module takes attributes only once it is made, and the call below asks for the
            # method of computing.
            method = RemoteMethod(moe_config, engine.route(layer_name, layer), layer.ffn.out_size)
            self.__dict__["remote_method"] = method
            super().__init__(layer_name, params_dtype, moe_config, *arguments, **options)

        def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> FusedMoEMethodBase:
            return self.__dict__["remote_method"]

        def load_weights(self, weights: Iterable[tuple[str, Any]]) -> Iterator[str]:
            # The loader leaves the experts' tensors out, and what else a checkpoint has below this
            # layer's name is nothing that a worker needs.
            for _name_and_tensor in weights:
                yield from ()

    RemoteExperts.__name__ = f"Remote{kind.__name__}"
    RemoteExperts.__qualname__ = RemoteExperts.__name__
    return RemoteExperts


class RemoteMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """How such a layer computes. `moe_kernel` stays None: vLLM then takes what comes back for one
    rank's part of the sum, and adds it up over the ranks together with the shared experts. The
    workers' result is whole, so that rank 0 gives it and the others give zeros.
    """

    def __init__(self, moe_config: Any, route: ExpertRoute | None, out_size: int) -> None:
        super().__init__(moe_config)
        self.route = route
        self._out_size = out_size

    def create_weights(self, *_arguments: Any, **_options: Any) -> None:
        """Creates none."""

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Returns None, as nothing is quantised here."""

    def apply(
        self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, shared_experts: Any, shared_experts_input: Any
    ) -> Any:
        """Returns [num_tokens, out_size] in the dtype of `x`. Raises the errors of
        `ExpertRuntime.experts`, which end vLLM's engine.
        """
        if self.route is None:
            return torch.zeros((x.shape[0], self._out_size), dtype=x.dtype, device=x.device)
        return call_experts(self.route, x, topk_ids, topk_weights)
