"""What a scrape of Prometheus reads: the front's own traffic, and the latest numbers of the engine
process, made into metrics when somebody asks. docs/howto/observe.md lists them.

Second halves of names are vLLM's where the thing is the same. No label is a layer: 94 layers of 64
workers would be a hundred thousand series.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString as bound_text

from dflash_moe.server.front import frames
from dflash_moe.server.front.engine_numbers import EngineNumbers
from dflash_moe.server.front.exchange import Traffic
from dflash_moe.server.front.request_log import RequestLog

PREFIX = "dflash_moe_"
NS = 1e-9
# Upper bounds of the buckets of steps by their sequences.
_BATCHES = tuple(1 << power for power in range(11))

# (name, entry of `engine`, meaning)
_ENGINE_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Tokens of prompts that were computed."),
    ("prompt_tokens_cached", "cached_tokens", "Tokens of prompts that the prefix cache had."),
    ("prompt_tokens_recomputed", "recomputed_tokens", "Tokens that were computed once more after a preemption."),
    ("generation_tokens", "generated_tokens", "Tokens that were written."),
    ("num_preemptions", "preemptions", "Requests that gave their blocks to others for a while."),
    ("spec_decode_num_draft_tokens", "drafted_tokens", "Tokens that speculation has proposed."),
    ("spec_decode_num_accepted_tokens", "accepted_tokens", "Proposed tokens that were the model's own."),
    ("engine_steps", "steps", "Steps of the engine."),
    ("engine_failed_steps", "failed_steps", "Steps of which nothing was kept."),
)
_PARTS = ("plan", "forward", "sample", "commit", "deliver")
_HISTOGRAMS = (
    ("request_queue_time_seconds", "queue_s", "From a request's submission to its first step."),
    ("time_to_first_token_seconds", "ttft_s", "From a request's submission to its first token."),
    ("inter_token_latency_seconds", "itl_s", "Between two tokens of a request."),
    ("e2e_request_latency_seconds", "request_s", "From a request's submission to its end."),
    ("engine_step_seconds", "step_s", "Of one step of the engine."),
)
# (name, entry of a worker, factor, meaning)
_WORKER_COUNTERS = (
    ("expert_calls", "calls", 1, "Calls of a worker's experts."),
    ("expert_rows", "rows", 1, "Rows of activations that a worker was sent."),
    ("wire_floor_bytes", "floor_bytes", 1, "What an ideal ragged call would have moved."),
    ("expert_wait_seconds", "wait_ns", NS, "The host's wait for a worker's replies."),
    ("worker_compute_seconds", "worker_compute_ns", NS, "A worker's own time to compute."),
    ("worker_queue_seconds", "worker_queue_ns", NS, "Time of requests in a worker's queue."),
    ("worker_lost", "deaths", 1, "How often a worker was lost."),
    ("hedges_won", "hedges_won", 1, "Rows asked once more of a worker, which was first to answer."),
)


class Metrics:
    """The metrics of one front."""

    def __init__(self, traffic: Traffic, numbers: EngineNumbers, request_log: RequestLog, state: Callable[[], str]) -> None:
        """`state` is what the server does with requests now (`frames`)."""
        self._traffic = traffic
        self._numbers = numbers
        self._request_log = request_log
        self._state = state
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(namespace=PREFIX + "front", registry=self._registry)
        engine = os.getppid()
        ProcessCollector(namespace=PREFIX + "engine", pid=lambda: engine, registry=self._registry)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Returns a scrape's body and type; `accept` is the header of its request."""
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind

    def collect(self) -> Iterator[Metric]:
        """Makes the metrics, for prometheus_client."""
        yield from _traffic(self._traffic)
        yield _counter("request_log_dropped_lines", "Lines of the request log that nobody took.", self._request_log.num_dropped)
        latest, is_ready = self._numbers.latest, self._state() == frames.READY and self._numbers.is_up
        yield _gauge("engine_up", "Whether the engine process has given its numbers for this scrape.", self._numbers.is_up)
        yield _gauge("engine_numbers_age_seconds", "How old the engine process's numbers are.", self._numbers.age_s)
        yield _gauge("ready", "Whether a request would be answered now.", is_ready and not latest.get("unready"))
        if latest:
            yield from _engine(latest["engine"])
            yield from _workers(latest["workers"])
            yield _counter("fallback_calls", "Calls that the host has computed for a worker.", latest["fallback_calls"])


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, meaning, value)


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, meaning, float(value))


def _labelled(family: Any, samples: Iterable[tuple[Sequence[str], float]]) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family  # type: ignore[no-any-return]


def _counters(name: str, meaning: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float]]) -> Metric:
    return _labelled(CounterMetricFamily(PREFIX + name, meaning, labels=labels), samples)


def _gauges(name: str, meaning: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float]]) -> Metric:
    return _labelled(GaugeMetricFamily(PREFIX + name, meaning, labels=labels), samples)


def _traffic(traffic: Traffic) -> Iterator[Metric]:
    requests = [((route, str(status)), value) for (route, status), value in traffic.requests.items()]
    yield _counters("http_requests", "Requests that have ended.", ("route", "status"), requests)
    yield _gauge("http_connections", "Open connections.", traffic.num_connections)
    yield _gauge("http_requests_open", "Requests that have not ended.", traffic.num_open)
    yield _gauge("http_streams_open", "Answers that are streamed now.", traffic.num_streams)
    sizes = [(("received",), traffic.received_bytes), (("sent",), traffic.sent_bytes)]
    yield _counters("http_body_bytes", "Bytes of bodies.", ("direction",), sizes)


def _engine(engine: Mapping[str, Any]) -> Iterator[Metric]:
    yield _gauge("num_requests_running", "Requests that are computed.", engine["running"])
    yield _gauge("num_requests_waiting", "Requests that wait.", engine["waiting"])
    for name, entry, meaning in _ENGINE_COUNTERS:
        yield _counter(name, meaning, engine[entry])
    finished = [((reason,), value) for reason, value in engine["finished"].items()]
    yield _counters("requests_finished", "Choices that have ended, by the reason.", ("reason",), finished)
    parts = [((part,), engine[f"{part}_s"]) for part in _PARTS]
    yield _counters("engine_seconds", "The engine thread's time by what it did.", ("part",), parts)
    yield from _blocks(engine["blocks"])
    histograms = engine["histograms"]
    for name, entry, meaning in _HISTOGRAMS:
        yield _histogram(name, meaning, histograms["bounds_s"], histograms[entry]["counts"], histograms[entry]["sum"])
    yield _batches(engine["batch_sizes"])


def _blocks(blocks: Mapping[str, int]) -> Iterator[Metric]:
    total = blocks["total"]
    yield _gauge(
        "kv_cache_usage_ratio", "Blocks of the KV cache that sequences hold.", 1 - blocks["free"] / total if total else 0
    )
    yield _gauge("kv_cache_blocks", "Blocks of the KV cache, of kv_cache_block_tokens each.", total)
    yield _gauge("kv_cache_blocks_cached", "Free blocks that have a prefix.", blocks["cached"])
    yield _gauge("kv_cache_block_tokens", "Tokens of a block.", blocks["tokens"])
    yield _counter("kv_cache_evicted_blocks", "Cached blocks that were given away.", blocks["evicted"])


def _histogram(name: str, meaning: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
    buckets = [*map(bound_text, bounds), "+Inf"]
    return HistogramMetricFamily(PREFIX + name, meaning, buckets=list(zip(buckets, counts, strict=True)), sum_value=total)


def _batches(sizes: Sequence[tuple[int, int]]) -> Metric:
    """Returns the steps by their number of sequences."""
    counts = [sum(count for size, count in sizes if size <= bound) for bound in _BATCHES]
    total = sum(count for _, count in sizes)
    meaning = "Sequences of one step."
    return _histogram("engine_step_sequences", meaning, _BATCHES, [*counts, total], sum(size * count for size, count in sizes))


def _workers(workers: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    # A worker that was removed keeps its counters, and is not down.
    up = [((name,), float(one["state"] == "ready")) for name, one in workers.items() if one.get("state") not in (None, "gone")]
    yield _gauges("worker_up", "Whether a worker is ready.", ("worker",), up)
    for name, entry, factor, meaning in _WORKER_COUNTERS:
        yield _counters(
            name, meaning, ("worker",), [((worker,), one.get(entry, 0) * factor) for worker, one in workers.items()]
        )
    sizes = [
        ((worker, direction), one[entry])
        for worker, one in workers.items()
        for direction, entry in (("request", "request_bytes"), ("reply", "reply_bytes"))
    ]
    yield _counters("wire_bytes", "Bytes to a worker and back.", ("worker", "direction"), sizes)
    choices = [
        ((worker, kind), one[entry])
        for worker, one in workers.items()
        for kind, entry in (("failover", "failovers"), ("hedge", "hedges"))
    ]
    meaning = "Slices that were sent to a worker after a loss elsewhere (failover), or beside a slow one (hedge)."
    yield _counters("holder_choices", meaning, ("worker", "kind"), choices)
    audits = [(worker, one["audit"]) for worker, one in workers.items() if "audit" in one]
    rows = [((worker,), one["audited_rows"]) for worker, one in audits]
    yield _counters("audited_rows", "Rows of a worker that were computed again.", ("worker",), rows)
    rows = [((worker,), one["mismatches"]) for worker, one in audits]
    yield _counters("audit_mismatches", "Rows that came out otherwise.", ("worker",), rows)
    errors = [
        ((worker, str(layer_class)), error)
        for worker, one in workers.items()
        for layer_class, error in one["prediction_errors"]
    ]
    meaning = "Median deviation of predicted from measured times of calls, by class of layers."
    yield _gauges("prediction_error_ratio", meaning, ("worker", "layer_class"), errors)
