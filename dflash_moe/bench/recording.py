"""Records what one request does on both sides: its steps in the engine, and the slices of all its
expert calls with the times that their replies carry.

All times of a recording are nanoseconds of the host's CLOCK_MONOTONIC, which time.monotonic and
time.perf_counter read too on Linux.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_moe.bench.forward import SETTLE_TOKENS
from dflash_moe.bench.timeline import WORKER_TIMES, clock_offset, clock_uncertainty, layer_timeline
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.errors import ConfigError

if TYPE_CHECKING:
    from dflash_moe.engine.engine_stats import StepTimes
    from dflash_moe.engine.llm import LLM
    from dflash_moe.topology import Topology

# The client keeps so many slices (csrc/client/calls.h).
MAX_TRACES = 65536
# A step of a request is a chunk of its prompt or a token.
MAX_STEPS = 65536


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """When a request was submitted, first scheduled, and had each of its tokens."""

    num_prompt: int
    submitted_ns: int
    scheduled_ns: int
    token_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordedWorker:
    """A holder of experts. Its clock was `offset_ns` ahead of the host's, which is known to within
    `uncertainty_ns`; both are 0 for a process of the host's machine that the host started.
    """

    name: str
    transport: str
    offset_ns: int
    uncertainty_ns: int


@dataclass(frozen=True, slots=True)
class Recording:
    """What was recorded. `slices` are those of `ExpertRuntime.take_traces`, all their times on the
    host's clock, and `worker` of each is a place in `workers`.
    """

    model: str
    mode: str
    dtype: str
    request: RecordedRequest
    steps: tuple[StepTimes, ...]
    workers: tuple[RecordedWorker, ...]
    slices: tuple[Mapping[str, int], ...]
    # Whether there were more slices than are kept.
    is_cut: bool

    def prefill_timeline(self) -> dict[str, Any]:
        """Returns the middle layer's slices until the first token, as `bench plot --timeline` draws
        them.
        """
        first = self.request.token_ns[0]
        own = [one for one in self.slices if one["combined_ns"] <= first]
        layers = sorted({one["layer"] for one in own})
        layer = layers[len(layers) // 2]
        found = layer_timeline([one for one in own if one["layer"] == layer], [one.name for one in self.workers], ())
        found["clock_offsets_ns"] = {one.name: one.offset_ns for one in self.workers}
        prompt = {"prompt_tokens": self.request.num_prompt, "prefill_s": (first - self.request.submitted_ns) * 1e-9}
        return {"mode": self.mode, "dtype": self.dtype, "layer": layer, **prompt, **found}


def record(llm: LLM, topology: Topology, token_ids: Sequence[int], max_tokens: int) -> Recording:
    """Completes a prompt greedily over the runtime of `topology`, which was started with `profile`,
    and records it. A part of the prompt runs before, so that threads and paths are warm, and is
    forgotten.

    Raises ConfigError where no slice was recorded; other errors are those of `LLM.generate`.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    llm.generate([list(token_ids[:SETTLE_TOKENS])], dataclasses.replace(params, max_tokens=min(2, max_tokens)))
    llm.engine.drop_prefix_cache()
    llm.runtime.take_traces()
    steps: deque[StepTimes] = deque(maxlen=MAX_STEPS)
    llm.engine.record_steps(steps)
    try:
        request = _run(llm, token_ids, params)
    finally:
        llm.engine.record_steps(None)
    traces = llm.runtime.take_traces()
    if not traces:
        raise ConfigError(
            "no slice was recorded: a timeline needs a runtime started with profile=1, and a host whose device is a processor"
        )
    counted = llm.runtime.stats()
    far = {worker.name for worker in topology.workers if not worker.is_started_by_host}
    workers = _workers(counted["workers"], traces, far)
    return Recording(
        llm.runtime.spec.path, counted["mode"], llm.runtime.wire_dtypes[0], request, tuple(steps), workers,
        tuple(_on_host_clock(one, workers[one["worker"]].offset_ns) for one in traces), len(traces) >= MAX_TRACES,
    )  # fmt: skip


def _run(llm: LLM, token_ids: Sequence[int], params: SamplingParams) -> RecordedRequest:
    submitted = time.monotonic()
    queue_s, tokens = 0.0, list[float]()
    for delta in llm.submit(list(token_ids), params):
        if delta.error is not None:
            raise delta.error
        tokens += [delta.time_s] * len(delta.token_ids)
        queue_s = delta.queue_s or queue_s
    scheduled = min(submitted + queue_s, tokens[0])
    return RecordedRequest(len(token_ids), _ns(submitted), _ns(scheduled), tuple(map(_ns, tokens)))


def _workers(
    counted: Mapping[str, Mapping[str, Any]], traces: Sequence[Mapping[str, int]], far: Collection[str]
) -> tuple[RecordedWorker, ...]:
    """Returns the workers in the order of the numbers that traces have for them. Only those that
    were dialled may be on another machine; all others share the host's clock.
    """
    found = []
    for place, (name, worker) in enumerate(counted.items()):
        own = [one for one in traces if one["worker"] == place]
        offset, uncertainty = (clock_offset(own), clock_uncertainty(own)) if own and name in far else (0, 0)
        found.append(RecordedWorker(name, worker["transport"], offset, uncertainty))
    return tuple(found)


def _on_host_clock(trace: Mapping[str, int], offset_ns: int) -> dict[str, int]:
    return {key: value - offset_ns if key in WORKER_TIMES else value for key, value in trace.items()}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
