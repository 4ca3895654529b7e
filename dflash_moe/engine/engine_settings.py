"""What bounds an engine, and how it follows from a runtime.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_moe.experts.expert_runtime import ExpertRuntime


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What bounds an engine. The keys are those of the section `engine` of a topology."""

    max_batch_tokens: int = 1024
    max_requests: int = 64
    max_queue: int = 1024
    order: str = "fifo"
    speculate: str = "off"
    prefix_cache: bool = True
    # Most tokens of a request, its prompt included; None leaves that to the model.
    max_context: int | None = None
    # Whether the next step is planned while the device still computes, which it does on a card.
    plans_ahead: bool = False
    call_timeout_s: float = 30.0
    # The share of its layer's experts that a row reads, which prices drafts.
    expert_share: float = 1 / 16

    @classmethod
    def of(cls, runtime: ExpertRuntime) -> EngineSettings:
        """Returns those of a runtime and its model."""
        names = (
            "max_batch_tokens",
            "max_requests",
            "max_queue",
            "order",
            "speculate",
            "prefix_cache",
            "max_context",
            "call_timeout_s",
        )
        share = max(layer.top_k / layer.num_experts for layer in runtime.layers)
        return cls(
            **{name: getattr(runtime.settings, name) for name in names},
            plans_ahead=runtime.host_device != "cpu", expert_share=share,
        )  # fmt: skip
