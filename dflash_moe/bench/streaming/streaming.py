"""`bench streaming` measures an OpenAI-compatible server as a client sees it: one row for each
number of requests that may be open, or for a schedule of arrivals.

Tokens are counted from the `usage` of the server, and never by events: an event may have several
tokens or a part of one. TTFT is from the submission to the first event that has a choice, TPOT the
time from there to the last token by the tokens behind the first. ITL has the gaps between events
that brought tokens as they were, each once for every token that the later event brought
(`Streamed.gaps_s`). The submit lag is by how much a request was sent after it was due.

A first token may have no text: a half letter, a special token that is skipped, an unused id of a
model with random weights. vLLM sends an event for each such token, llama-server for all but half
letters, and `dflash-moe serve` for the first alone; all of them say whose turn it is in a chat once
the first token is there, and not before. So the first event with a choice, and no text in it, means
the same of each; a server that says whose turn it is before it has computed anything would look too
fast. Where later tokens have no text, gaps are those of the events that came.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.results import BenchResult, percentile, timing_fields
from dflash_moe.bench.streaming.endpoint import Endpoint, endpoint_of
from dflash_moe.bench.streaming.load import ABSOLUTE, Load, Schedule, run_load
from dflash_moe.bench.streaming.prompts import CHAT, COMPLETIONS, Prompts
from dflash_moe.bench.streaming.served_model import ServedModel, served_model
from dflash_moe.bench.streaming.stream import Streamed
from dflash_moe.errors import ConfigError, DflashError

CONCURRENCY = (1, 4, 16)
# What a client beside a server may take without becoming part of what it measures.
CLIENT_US_PER_TOKEN = 100.0
# Up to so many tokens an event a server counts as one that sends each token by itself. It is more
# than 1, because a token that ends within a letter comes with the next one.
ONE_BY_ONE = 1.05


@dataclass(frozen=True, slots=True)
class StreamingParams:
    """What is measured: `requests` in each of `repeat` rounds for each number in `concurrency`,
    which is how many may be open; empty without a limit, which needs an interval. The server is the
    one at `url`, or is started for `model`, a path as `dflash-moe serve` takes it.
    """

    model: str | None = None
    topology: Path | None = None
    url: str | None = None
    api_key: str | None = None
    served_model: str | None = None
    endpoint: str = COMPLETIONS
    requests: int = 16
    interval_s: float = 0.0
    schedule: str = ABSOLUTE
    concurrency: tuple[int, ...] = CONCURRENCY
    prompt_tokens: int = 64
    new_tokens: int = 64
    is_pretok: bool = False
    stream_interval: int = 1
    temperature: float = 0.0
    seed: int = 0
    timeout_s: float = 600.0
    warmup: int = 1
    repeat: int = 3


@dataclass(slots=True)
class StreamingCase:
    """A number of requests that may be open: a `harness.Case`. `run` is given the number of the
    measurement, which decides the prompts.
    """

    name: str
    concurrency: int | None
    params: StreamingParams
    run: Callable[[int], Load]
    rounds: int | None = None
    loads: list[Load] = field(default_factory=list)
    num_measured: int = 0

    @property
    def label(self) -> str:
        """The name of the case in reports of progress."""
        return self.name

    def measure(self, *, keep: bool) -> None:
        """Sends the requests of one round. Raises DflashError where none of them is completed."""
        load = self.run(self.num_measured)
        self.num_measured += 1
        if not load.completed:
            raise DflashError(
                f"{self.name}: none of {len(load.streamed)} requests was completed: {_first_error(load.streamed)}"
            )
        if keep:
            self.loads.append(load)

    def row(self) -> dict[str, Any] | None:
        """Returns the result row. Its samples are the seconds of a round for each token that came,
        of all requests together; other times are those of all requests of all rounds.
        """
        if not self.loads:
            return None
        loads, params = self.loads, self.params
        asked = [one for load in loads for one in load.streamed]
        completed = [one for load in loads for one in load.completed]
        seconds = [load.wall_s / load.tokens for load in loads]
        came = sum(one.tokens for one in asked)
        queued = [one.queue_s for one in completed if one.queue_s is not None]
        return {
            "name": self.name,
            "concurrency": self.concurrency,
            "requests": params.requests,
            "prompt_tokens": params.prompt_tokens,
            "new_tokens": params.new_tokens,
            **timing_fields(seconds),
            "tokens_per_s": statistics.median(1 / one for one in seconds),
            "requests_per_s": statistics.median(len(load.completed) / load.wall_s for load in loads),
            "ttft_s": spread(one.ttft_s for one in completed),
            "tpot_s": spread(one.tpot_s for one in completed if one.tpot_s is not None),
            "itl_s": spread(gap for one in completed for gap in one.gaps_s()),
            "latency_s": spread(one.times[-1] - one.submitted for one in completed),
            "submit_lag_s": spread(one.submitted - one.due for one in asked if one.submitted),
            # None where the server does not tell it.
            "queue_s": spread(queued),
            "completed": len(completed),
            "refused": sum(one.is_refused for one in asked),
            "failed": sum(bool(one.error) and not one.is_refused for one in asked),
            "first_error": _first_error(asked),
            "retry_after_s": max((one.retry_after_s for one in asked if one.retry_after_s is not None), default=None),
            "tokens": sum(one.tokens for one in completed),
            "tokens_per_event": sum(one.tokens for one in completed) / sum(len(one.times) for one in completed),
            # What a gap between events counts for; its tokens, where they are known.
            "itl_weights": "tokens" if all(one.tells_counts for one in completed) else "events",
            "counted_prompt_tokens": statistics.fmean(one.prompt_tokens or 0 for one in completed),
            "cached_tokens": sum(one.cached_tokens for one in completed),
            "client_cpu_us_per_token": 1e6 * sum(load.client_cpu_s for load in loads) / came,
            "server_cpu_us_per_token": {
                name: 1e6 * sum(load.server_cpu_s.get(name, 0.0) for load in loads) / came for name in loads[-1].server_cpu_s
            },
        }  # fmt: skip


def spread(seconds: Iterable[float]) -> dict[str, Any] | None:
    """Returns percentiles and mean of times, with the samples or, where these are many, quantiles
    of them; None where there are none.
    """
    found = list(seconds)
    if not found:
        return None
    percentiles = {f"p{percent}": percentile(found, percent / 100) for percent in (50, 95, 99)}
    return {
        **percentiles,
        "mean": statistics.fmean(found),
        "samples_s": timing_fields(found, per_round=len(found))["samples_s"],
    }


def _first_error(streamed: Sequence[Streamed]) -> str:
    # Being refused is no error of a server that is asked for too much.
    errors = [one.error for one in streamed if one.error]
    return next((one.error for one in streamed if one.error and not one.is_refused), errors[0] if errors else "")


def run_streaming(params: StreamingParams, *, recorder: Recorder) -> BenchResult:
    """Measures all rows.

    Errors: ConfigError for parameters that do not go together, and for a server that is not there
    or does not take such requests; DflashError for one that fails all requests of a round, or that
    does not start.
    """
    _check(params)
    given = endpoint_of(params.url, params.api_key) if params.url is not None else None
    result = recorder.begin("streaming", {"model": params.served_model or params.model, "url": params.url})
    with recorder.recording():
        serving: Any = (
            nullcontext() if params.model is None else served_model(params.model, params.topology, recorder.reporter.say)
        )
        with serving as served:
            endpoint = given or endpoint_of(served.url)
            prompts = _prompts(params, endpoint)
            prompts.fit(params.timeout_s, recorder.reporter.say)
            result.params = _described(params, prompts)
            cases = _cases(params, endpoint, prompts, served)
            run_rounds(recorder, cases, rounds=params.repeat, warmup=params.warmup)
            _warn(params, result.rows, recorder)
    return result


def _check(params: StreamingParams) -> None:
    if (params.model is None) == (params.url is None):
        raise ConfigError("give --model PATH, which is then served, or --url URL of a server that runs")
    if params.topology is not None and params.model is None:
        raise ConfigError("--topology is for --model: the server at --url has its own")
    if params.api_key is not None and params.url is None:
        raise ConfigError("--api-key-file is for --url: the server of --model asks for no key")
    if params.is_pretok and params.endpoint == CHAT:
        raise ConfigError(f"--pretok: a conversation has no token ids; use --endpoint {COMPLETIONS}")
    if not params.concurrency and not params.interval_s:
        raise ConfigError("without --interval all requests would be sent at once; give --concurrency")


def _prompts(params: StreamingParams, endpoint: Endpoint) -> Prompts:
    return Prompts(
        endpoint, params.served_model or endpoint.first_model(), params.endpoint, params.prompt_tokens, params.new_tokens,
        params.temperature, params.seed, params.is_pretok, params.stream_interval,
    )  # fmt: skip


def _described(params: StreamingParams, prompts: Prompts) -> dict[str, Any]:
    found = dataclasses.asdict(params)
    for name in ("api_key", "served_model"):
        del found[name]
    found["topology"] = None if params.topology is None else params.topology.name
    found["concurrency"] = list(params.concurrency)
    return found | {
        "model": prompts.model,
        "tokens_per_word": prompts.tokens_per_word,
        "left_out": prompts.left_out,
    }


def _cases(
    params: StreamingParams, endpoint: Endpoint, prompts: Prompts, served: ServedModel | None
) -> list[StreamingCase]:  # fmt: skip
    def case(name: str, concurrency: int | None) -> StreamingCase:
        schedule = Schedule(params.interval_s, params.schedule, concurrency)

        def run(number: int) -> Load:
            requests = [prompts.request(name, number, place) for place in range(params.requests)]
            before = served.cpu_s() if served is not None else {}
            load = run_load(endpoint, requests, schedule, params.timeout_s)
            after = served.cpu_s() if served is not None else {}
            load.server_cpu_s = {process: taken - before.get(process, 0.0) for process, taken in after.items()}
            return load

        return StreamingCase(name, concurrency, params, run)

    if not params.concurrency:
        return [case("no-limit", None)]
    return [case(f"concurrency-{most}", most) for most in params.concurrency]


def _warn(params: StreamingParams, rows: Sequence[Mapping[str, Any]], recorder: Recorder) -> None:
    say = recorder.reporter.say
    for row in rows:
        name, client_us, each = row["name"], row["client_cpu_us_per_token"], row["tokens_per_event"]
        if client_us > CLIENT_US_PER_TOKEN:
            say(f"warning: {name}: this client took {client_us:.0f} us CPU a token, which a server on its cores lacks")
        if row["itl_weights"] == "events" and each >= ONE_BY_ONE:
            say(f"{name}: {each:.2f} tokens an event, which does not tell how many it has: ITL is that of events")
        if params.stream_interval > 1 and each < min(2, params.stream_interval):
            say(f"{name}: the server sends {each:.2f} tokens an event, whatever --stream-interval asks for")
        if row["tokens"] < (wanted := row["completed"] * params.new_tokens):
            say(f"{name}: {row['tokens']} tokens came of {wanted} that were asked for")
