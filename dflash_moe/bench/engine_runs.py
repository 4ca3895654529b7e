"""Measures one run of requests that are submitted together: through the engine, or a single one
through the plain loop. A token's time is when its step was committed.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dflash_moe.bench.forward import COUNTED, counted
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.experts.expert_runtime import ExpertRuntime

if TYPE_CHECKING:
    from dflash_moe.engine.engine import Engine
    from dflash_moe.forward.host_model import HostModel

# What a step takes beside the forward pass, by the engine's own clock.
ENGINE_PARTS = ("plan_s", "sample_s", "commit_s", "deliver_s")
COUNTERS = (*ENGINE_PARTS, "forward_s", "steps", "preemptions", "recomputed_tokens", "cached_tokens")


@dataclass(slots=True)
class Arrivals:
    """When the tokens of one request came, in seconds of time.monotonic."""

    submitted: float
    token_ids: list[int] = field(default_factory=list)
    # As many as there are tokens.
    times: list[float] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], now: float) -> None:
        """Notes tokens that came at once."""
        self.token_ids += token_ids
        self.times += [now] * len(token_ids)

    @property
    def first(self) -> float:
        """When the first token came; there must be one."""
        return self.times[0]

    @property
    def last(self) -> float:
        """When the last token came."""
        return self.times[-1]

    @property
    def tpot_s(self) -> float:
        """The time of a token behind the first one; there must be one."""
        return (self.last - self.first) / (len(self.token_ids) - 1)


@dataclass(slots=True)
class RunSample:
    """What was measured of one run."""

    arrivals: list[Arrivals]
    # Differences of the runtime's counters (`forward.COUNTED`), prefill and decode together.
    moved: dict[str, int]
    # Differences of the engine's counters (COUNTERS), nothing for the plain loop.
    engine: dict[str, float] = field(default_factory=dict)
    # How many steps had so many sequences.
    batch_sizes: dict[int, int] = field(default_factory=dict)

    @property
    def _decode_began(self) -> float:
        return max(one.first for one in self.arrivals)

    @property
    def prefill_s(self) -> float:
        """From the first submission until every request has its first token."""
        return self._decode_began - self.arrivals[0].submitted

    @property
    def decode_s(self) -> float:
        """From then on until the last token of all."""
        return max(one.last for one in self.arrivals) - self._decode_began

    @property
    def decode_tokens(self) -> int:
        """The tokens of this time: those that came after every request had its first one."""
        return sum(moment > self._decode_began for one in self.arrivals for moment in one.times)

    @property
    def digests(self) -> list[str]:
        """A digest of each request's tokens."""
        return [hashlib.sha256(repr(one.token_ids).encode()).hexdigest() for one in self.arrivals]


def run_engine(
    engine: Engine, together: AbstractContextManager[Any], runtime: ExpertRuntime, prompts: Sequence[Sequence[int]],
    new_tokens: int,
) -> RunSample:  # fmt: skip
    """Completes `prompts` with `new_tokens` each at temperature 0. While `together`, the engine's
    lock, is held, no step begins, so that the first one finds all requests.

    The cache of prefixes is emptied first. Raises the error of a request that fails.
    """
    engine.drop_prefix_cache()
    before, moved = engine.stats(), counted(runtime)
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    arrivals, streams = [], []
    with together:
        for prompt in prompts:
            arrivals.append(Arrivals(time.monotonic()))
            streams.append(engine.submit(prompt, params))
    for stream, arrival in zip(streams, arrivals, strict=True):
        for delta in stream:
            if delta.error is not None:
                raise delta.error
            arrival.add(delta.token_ids, delta.time_s)
    # The engine thread has then ended its last step, and counted it.
    engine.drop_prefix_cache()
    after = engine.stats()
    return RunSample(
        arrivals, _difference(moved, counted(runtime)), _difference(before, after, COUNTERS),
        _difference(before["batch_sizes"], after["batch_sizes"], after["batch_sizes"]),
    )  # fmt: skip


def run_loop(host: HostModel, runtime: ExpertRuntime, prompt: Sequence[int], new_tokens: int) -> RunSample:
    """Completes one prompt through engine/generation.py. The engine over the same model must be
    idle meanwhile.
    """
    from dflash_moe.engine.generation import generate_tokens

    moved = counted(runtime)
    arrival = Arrivals(time.monotonic())
    for step in generate_tokens(host, prompt, max_new_tokens=new_tokens):
        arrival.add((step.token_id,), time.monotonic())
    return RunSample([arrival], _difference(moved, counted(runtime)))


def _difference(before: Mapping[Any, Any], after: Mapping[Any, Any], keys: Sequence[Any] | Mapping[Any, Any] = COUNTED) -> Any:
    found = {key: after[key] - before.get(key, 0) for key in keys}
    return {key: value for key, value in found.items() if value or isinstance(key, str)}
