"""An `LLM` as the relay asks an engine.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash_moe.engine.delivery import Outbox
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.integrations.grammars import GrammarMask, Grammars
from dflash_moe.server.snapshot import snapshot

if TYPE_CHECKING:
    from dflash_moe.engine.llm import LLM
    from dflash_moe.server.relay import Deliver


class LLMService:
    """An `LLM` as the relay asks it. Close it after the last request."""

    def __init__(self, llm: LLM, facts: Mapping[str, Any]) -> None:
        """`facts` are those of `model_facts`."""
        self._llm = llm
        self._grammars = Grammars(
            vocab_size=facts["vocab_size"], end_ids=facts["end_ids"], special=facts["tokenizer"]["special"],
            tokenizer=facts["tokenizer"]["json"],
        )  # fmt: skip
        self._is_draining = False

    def sink(self, deliver: Deliver) -> Outbox:
        """As `Service.sink`."""
        return Outbox(deliver)

    def submit(self, token_ids: Sequence[int], params: SamplingParams, sink: Outbox, salt: bytes) -> int:
        """As `Service.submit`."""
        return self._llm.engine.submit(token_ids, params, outbox=sink, cache_salt=salt)

    def cancel(self, request_id: int, choice: int | None) -> None:
        """As `Service.cancel`."""
        self._llm.cancel(request_id, choice)

    def mask(self, grammar: str) -> GrammarMask:
        """As `Service.mask`."""
        return self._grammars.mask(grammar)

    def is_alive(self) -> bool:
        """As `Service.is_alive`."""
        return self._is_draining or not self._llm.engine.refusal()

    def unready_reason(self) -> str:
        """As `Service.unready_reason`. What is drained says so to each request by itself."""
        return "" if self._is_draining else self._llm.unready_reason()

    def snapshot(self) -> dict[str, Any]:
        """As `Service.snapshot`."""
        return snapshot(self._llm)

    def drain(self, deadline_s: float) -> bool:
        """As `Service.drain`."""
        self._is_draining = True
        return self._llm.engine.drain(deadline_s)

    def close(self) -> None:
        """Ends what follows grammars."""
        self._grammars.close()
