"""`dflash-moe serve` that can be looked into from outside:

    python -m bench.serving.watched_server OUT.json serve ARGUMENT...

SIGUSR1 has it write what its engine and its workers are at, and when the latest tokens were
computed: each as (number of the request, time of its step). The server itself is unchanged.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_moe.cli.main import run
from dflash_moe.engine.request import TokenDelta
from dflash_moe.server.llm_service import LLMService

# A run of 16 streams has fewer; more would grow the memory that is watched.
MOST_STEPS = 1 << 14


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    out = Path(sys.argv[1])
    # Full from the beginning, so that memory which grows is the server's.
    steps = deque(((place, float(place - MOST_STEPS)) for place in range(MOST_STEPS)), MOST_STEPS)
    llms: list[Any] = []
    begin, sink = LLMService.__init__, LLMService.sink

    def begin_noted(self: LLMService, llm: Any, *more: Any) -> None:
        llms.append(llm)
        begin(self, llm, *more)

    def sink_noted(self: LLMService, deliver: Callable[[list[tuple[int, TokenDelta]]], None]) -> Any:
        def noted(deltas: list[tuple[int, TokenDelta]]) -> None:
            steps.extend((number, delta.time_s) for number, delta in deltas if delta.token_ids)
            deliver(deltas)

        return sink(self, noted)

    def tell(_number: int, _frame: Any) -> None:
        llm = llms[-1]
        workers = {one.name: (one.state, one.deaths) for one in llm.runtime.workers()}
        partial = out.with_suffix(".partial")
        partial.write_text(json.dumps({"engine": llm.engine.stats(), "workers": workers, "steps": list(steps)}, default=str))
        os.replace(partial, out)

    LLMService.__init__, LLMService.sink = begin_noted, sink_noted  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, tell)
    return int(run(sys.argv[2:]))


if __name__ == "__main__":
    raise SystemExit(main())
