"""The rows of the serving campaigns: streams of a server, alone or with other requests beside them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.programs import Neighbours
from bench.peers.targets import QUIET_CORES
from bench.serving.company import ENDLESS, company
from bench.serving.servers import Server
from dflash_moe.bench.streaming.load import Load, Schedule, run_load
from dflash_moe.bench.streaming.prompts import COMPLETIONS, Prompts
from dflash_moe.bench.streaming.streaming import StreamingCase, StreamingParams

# Of a request; nobody waits longer for 128 tokens on two cores that others share.
TIMEOUT_S = 300.0
# A round during which others were busy is measured again so often.
MOST_TRIES = 3


def prompts_of(server: Server, prompt_tokens: int, new_tokens: int) -> Prompts:
    """Returns what makes the requests of a server. It asks the server how many tokens texts have,
    since tokenizers of GGUF files have a merge more.
    """
    found = Prompts(server.endpoint, server.endpoint.first_model(), COMPLETIONS, prompt_tokens, new_tokens, 0.0, seed=0)
    found.fit(TIMEOUT_S, print)
    return found


@dataclass(slots=True)
class StreamsCase:
    """Streams of one server in every round: a `harness.Case`. `beside` returns, for the number of a
    measurement, the files of requests that are sent meanwhile one after another, each once or, with
    ENDLESS, again and again.
    """

    name: str
    server: Server
    prompts: Prompts
    concurrency: int
    requests: int
    more: dict[str, Any]
    beside: Callable[[tuple[int, int]], Sequence[Path]] | None = None
    times: str = ENDLESS
    after: Callable[[Load], None] = lambda _load: None
    rounds: int | None = None
    others_cores: list[float] = field(default_factory=list)
    repeated: int = 0
    statuses: list[str] = field(default_factory=list)
    _case: StreamingCase | None = None

    @property
    def label(self) -> str:
        """The name of the row."""
        return self.name

    def measure(self, *, keep: bool) -> None:
        """Sends the requests of a round, again where others were busy meanwhile. Raises
        DflashError where none of them is completed.
        """
        if self._case is None:
            sizes = {"prompt_tokens": self.prompts.prompt_tokens, "new_tokens": self.prompts.new_tokens}
            self._case = StreamingCase(
                self.name, self.concurrency, StreamingParams(requests=self.requests, **sizes), self._quiet_run
            )
        self._case.measure(keep=keep)
        if not keep:
            self.others_cores, self.repeated, self.statuses = [], 0, []

    def row(self) -> dict[str, Any] | None:
        """Returns the row of `bench streaming` with how busy others were, and how often a round was
        measured again for that.
        """
        found = self._case.row() if self._case is not None else None
        if found is None:
            return None
        found |= {**self.more, "others_busy_cores": max(self.others_cores), "repeated": self.repeated}
        if self.beside is not None:
            found["beside"] = dict(Counter(self.statuses))
        return found

    def _quiet_run(self, number: int) -> Load:
        for attempt in range(MOST_TRIES):
            neighbours = Neighbours(self.server.tree)
            statuses: list[str] = []
            load = self._run((number, attempt), statuses)
            others = neighbours.busy_cores()
            if others <= QUIET_CORES:
                break
            self.repeated += int(attempt + 1 < MOST_TRIES)
        self.others_cores.append(others)
        self.statuses += statuses
        self.after(load)
        return load

    def _run(self, number: tuple[int, int], statuses: list[str]) -> Load:
        requests = [self.prompts.request(self.name, number, place) for place in range(self.requests)]
        files = self.beside(number) if self.beside is not None else ()
        beside: Any = company(self.server.endpoint.port, self.times, files, statuses) if files else nullcontext()
        before = self.server.cpu_s()
        with beside:
            load = run_load(self.server.endpoint, requests, Schedule(concurrency=self.concurrency), TIMEOUT_S)
        load.server_cpu_s = {process: taken - before.get(process, 0.0) for process, taken in self.server.cpu_s().items()}
        return load
