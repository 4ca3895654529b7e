"""`bench scheduler` measures the engine alone, without a server: so many requests that are
submitted together, one row for each number of them.

Rounds interleave the numbers of requests. Every round completes the same random prompts, request i
of a row the i-th of them, so that all rows must agree in its tokens. The cache of prefixes is
emptied before each measurement.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_moe.bench.engine_runs import ENGINE_PARTS, RunSample, run_engine, run_loop
from dflash_moe.bench.forward import random_prompt
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.model_host import MeasuredHost, describe_topology, open_hosts
from dflash_moe.bench.results import BenchResult, described, timing_fields
from dflash_moe.errors import ConfigError
from dflash_moe.topology import Topology

if TYPE_CHECKING:
    from dflash_moe.engine.engine_settings import EngineSettings
    from dflash_moe.forward.forward import Forward

LOOP = "loop"


@dataclass(frozen=True, slots=True)
class SchedulerParams:
    """What is measured: in each of `repeat` rounds, for each number of requests in `batch`, prompts
    of `prompt_tokens` random ids are completed with `new_tokens` each, at least 2. `with_loop` adds
    a row for one request without an engine, which needs a row of one request.
    """

    model: Path
    batch: tuple[int, ...] = (1, 4, 16)
    prompt_tokens: int = 64
    new_tokens: int = 64
    warmup: int = 1
    repeat: int = 3
    with_loop: bool = False
    seed: int = 0


@dataclass(slots=True)
class SchedulerCase:
    """Some requests at a time: a `harness.Case`. `run` completes them once."""

    name: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    run: Callable[[], RunSample]
    rounds: int | None = None
    samples: list[RunSample] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name of the case in reports of progress."""
        return self.name

    def measure(self, *, keep: bool) -> None:
        """Completes all requests once."""
        sample = self.run()
        if keep:
            self.samples.append(sample)

    def row(self) -> dict[str, Any] | None:
        """Returns the result row. Times of requests are those of all rounds, and counts those of
        one round.
        """
        if not self.samples:
            return None
        samples, last = self.samples, self.samples[-1]
        requests = [one for sample in samples for one in sample.arrivals]
        moved = last.moved["request_bytes"] + last.moved["reply_bytes"]
        completed = self.batch * self.new_tokens
        row: dict[str, Any] = {
            "name": self.name,
            "batch": self.batch,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            **timing_fields([sample.decode_s for sample in samples]),
            "prefill_tokens_per_s": statistics.median(self.batch * self.prompt_tokens / sample.prefill_s for sample in samples),
            "decode_tokens_per_s": statistics.median(sample.decode_tokens / sample.decode_s for sample in samples),
            "total_tokens_per_s": statistics.median(completed / (sample.prefill_s + sample.decode_s) for sample in samples),
            "decode_tokens": last.decode_tokens,
            "prefill_s": _p50_and_mean([sample.prefill_s for sample in samples]),
            "decode_s": _p50_and_mean([sample.decode_s for sample in samples]),
            "total_s": _p50_and_mean([sample.prefill_s + sample.decode_s for sample in samples]),
            "ttft_s": _p50_and_mean([one.first - one.submitted for one in requests]),
            "tpot_s": _p50_and_mean([one.tpot_s for one in requests]),
            "latency_s": _p50_and_mean([one.last - one.submitted for one in requests]),
            **last.moved,
            "wire_efficiency": last.moved["floor_bytes"] / moved if moved else None,
            "tokens_digests": sorted({" ".join(sample.digests) for sample in samples}),
        }
        return row | (self._engine_fields() if last.engine else {})

    def _engine_fields(self) -> dict[str, Any]:
        """Returns what the engine counted. Times of a step are means over all steps."""
        last = self.samples[-1]
        totals = {key: sum(sample.engine[key] for sample in self.samples) for key in last.engine}
        own = sum(totals[key] for key in ENGINE_PARTS)
        return {
            "batch_sizes": {str(size): count for size, count in sorted(last.batch_sizes.items())},
            **{key: last.engine[key] for key in ("steps", "preemptions", "recomputed_tokens", "cached_tokens")},
            "per_step_s": {key: totals[key] / totals["steps"] for key in (*ENGINE_PARTS, "forward_s")},
            "engine_share": own / (own + totals["forward_s"]),
        }


def _p50_and_mean(seconds: Sequence[float]) -> dict[str, float]:
    return {"p50": statistics.median(seconds), "mean": statistics.fmean(seconds)}


def run_scheduler(
    params: SchedulerParams,
    topology: Topology,
    *,
    recorder: Recorder,
    overrides: Mapping[str, Any],
) -> BenchResult:
    """Measures a row "batch-N" for each number of requests, behind a row "loop" where one is
    wanted.

    Errors: ConfigError for requests that the model, the KV cache or the engine's settings have no
    room for, and those of `ExpertRuntime.start` and of the calls.
    """
    _check(params)
    result = recorder.begin("scheduler", described(params))
    result.params |= describe_topology(topology, overrides, recorder)
    with (
        recorder.recording(),
        open_hosts(params.model, topology, overrides, recorder, with_local=False, micro_batches=None) as (host, _),
    ):
        from dflash_moe.engine.engine import Engine
        from dflash_moe.engine.engine_settings import EngineSettings

        settings = EngineSettings.of(host.runtime)
        forward = host.model.engine_forward(host.runtime.settings.kv_memory)
        _check_room(params, settings, forward, recorder)
        result.params["engine"] = dataclasses.asdict(settings) | {"cuts_prompts": forward.cuts_prompts}
        result.params["kv_tokens"] = forward.blocks.num_blocks * forward.blocks.block_tokens
        together = threading.RLock()
        with Engine(forward, settings, lock=together) as engine:
            complete = partial(run_engine, engine, together, host.runtime, new_tokens=params.new_tokens)
            cases = _cases(params, host, complete)
            run_rounds(recorder, cases, rounds=params.repeat, warmup=params.warmup)
        result.summary = summarise(cases)
    return result


def _cases(
    params: SchedulerParams, host: MeasuredHost, complete: Callable[[Sequence[Sequence[int]]], RunSample]
) -> list[SchedulerCase]:
    ids = random_prompt(host.model, max(params.batch) * params.prompt_tokens, params.seed)[0].tolist()
    prompts = [ids[at : at + params.prompt_tokens] for at in range(0, len(ids), params.prompt_tokens)]
    sizes = params.prompt_tokens, params.new_tokens
    cases = []
    if params.with_loop:
        run = partial(run_loop, host.model, host.runtime, prompts[0], params.new_tokens)
        cases.append(SchedulerCase(LOOP, 1, *sizes, run))
    cases += [SchedulerCase(f"batch-{batch}", batch, *sizes, partial(complete, prompts[:batch])) for batch in params.batch]
    return cases


def summarise(cases: Sequence[SchedulerCase]) -> list[dict[str, Any]]:
    """Compares each row with that of one request, or where there is none with the first: the ratios
    of TPOT and of decode tokens a second, taken round by round, and whether the requests that both
    have got the same tokens in every round.
    """
    base = next((case for case in cases if case.batch == 1 and case.name != LOOP), cases[0])
    expected = max((case.samples[0].digests for case in cases), key=len)
    return [
        {
            "name": case.name,
            "against": base.name,
            "tpot_ratio": statistics.median(
                _tpot(one) / _tpot(other) for one, other in zip(case.samples, base.samples, strict=True)
            ),
            "throughput_ratio": statistics.median(
                _speed(one) / _speed(other) for one, other in zip(case.samples, base.samples, strict=True)
            ),
            "same_tokens": all(sample.digests == expected[: case.batch] for sample in case.samples),
        }
        for case in cases
    ]  # fmt: skip


def _tpot(sample: RunSample) -> float:
    return statistics.median(one.tpot_s for one in sample.arrivals)


def _speed(sample: RunSample) -> float:
    return sample.decode_tokens / sample.decode_s


def _check(params: SchedulerParams) -> None:
    if params.new_tokens < 2:
        raise ConfigError(f"new_tokens={params.new_tokens} is not allowed; allowed: at least 2, because the first is no decode")
    if params.with_loop and 1 not in params.batch:
        raise ConfigError(f"batch {list(params.batch)} has no 1, with which the plain loop is compared; add it")


def _check_room(params: SchedulerParams, settings: EngineSettings, forward: Forward, recorder: Recorder) -> None:
    """Raises ConfigError where the largest batch cannot run as one, and warns where it will be
    preempted.
    """
    most, length = max(params.batch), params.prompt_tokens + params.new_tokens
    forward.check_length(length)
    for name in ("max_requests", "max_batch_tokens", "max_queue"):
        if most > getattr(settings, name):
            raise ConfigError(
                f"a batch of {most} requests was asked for, and engine.{name} is {getattr(settings, name)}; raise it"
            )
    blocks = forward.blocks
    # The key and the value of the last token are never stored.
    needed = most * -(-(length - 1) // blocks.block_tokens)
    if needed > blocks.num_blocks:
        recorder.reporter.say(
            f"warning: {most} requests of {length} tokens need {needed} blocks of the KV cache, and it has "
            f"{blocks.num_blocks}: some will be preempted and computed again; raise engine.kv_memory"
        )
