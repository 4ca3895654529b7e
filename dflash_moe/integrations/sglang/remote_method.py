"""How a layer of SGLang computes its routed experts where workers have them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase

from dflash_moe.integrations.expert_route import call_experts

if TYPE_CHECKING:
    from dflash_moe.integrations.expert_route import ExpertRoute


class RemoteMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Creates no weights and calls the workers. Rank 0 gives their whole result and the others
    zeros, which SGLang adds up.
    """

    def __init__(self, route: ExpertRoute | None, num_experts: int, out_size: int) -> None:
        self.route = route
        self._num_experts, self._out_size = num_experts, out_size

    def create_weights(self, *_arguments: Any, **_options: Any) -> None:
        """Creates none; SGLang's models pass over tensors that have no parameter."""

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """Makes none: a layer without a runner gets the router's choice in the standard form."""

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Returns the sums of [num_tokens, out_size] in the dtype of the rows, as SGLang combines
        them. Raises the errors of `ExpertRuntime.experts`.
        """
        rows, chosen = dispatch_output.hidden_states, dispatch_output.topk_output
        if TopKOutputChecker.format_is_bypassed(chosen):
            chosen = chosen.to_standard()
        if self.route is None:
            return StandardCombineInput(torch.zeros((rows.shape[0], self._out_size), dtype=rows.dtype, device=rows.device))
        # Rows that only fill a batch up choose expert -1, which is nobody's.
        topk_ids = chosen.topk_ids.masked_fill(chosen.topk_ids < 0, self._num_experts)
        return StandardCombineInput(call_experts(self.route, rows, topk_ids, chosen.topk_weights))
