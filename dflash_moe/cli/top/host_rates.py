"""Rates of a host between two of its snapshots (experts/snapshot.py), which another process sent.

Nothing that it sends is believed: a value of another kind or size is a ProtocolError that names it.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_moe.errors import ProtocolError, shown

# A runtime has at most 256 workers and as many stand-ins of its own.
MAX_WORKERS = 512
# Paths are the longest texts.
MAX_TEXT = 4096
NS = 1e-9
WORKER_COUNTED = ("rows", "request_bytes", "reply_bytes", "wait_ns", "worker_compute_ns", "worker_queue_ns")
ENGINE_COUNTED = ("steps", "prompt_tokens", "generated_tokens", "running", "waiting")


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """What one worker did: numbers per second, and shares of the time. `queued` is the mean number
    of slices that waited for it.
    """

    name: str
    state: str
    reason: str
    transport: str
    rows_per_s: float
    request_bytes_per_s: float
    reply_bytes_per_s: float
    wait_share: float
    busy_share: float
    queued: float
    memory_bytes: float | None
    model_error: float | None


@dataclass(frozen=True, slots=True)
class EngineRates:
    """What the engine over the runtime did, and how many requests and blocks it has."""

    running: int
    waiting: int
    steps_per_s: float
    prompt_per_s: float
    generated_per_s: float
    used_blocks: int
    total_blocks: int


@dataclass(frozen=True, slots=True)
class HostRates:
    """What a host did in `seconds`."""

    pid: int
    model: str
    mode: str
    memory_bytes: int
    seconds: float
    workers: tuple[WorkerRates, ...]
    engine: EngineRates | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot whose values are checked: `fields` of the host, those of `workers` by name, and of
    the `engine`, where there is one.
    """

    fields: Mapping[str, Any]
    workers: Mapping[str, Mapping[str, Any]]
    engine: Mapping[str, Any] | None


def read_snapshot(value: Any) -> Snapshot:
    """Checks what a host sent. Raises ProtocolError naming the field."""
    fields = _mapping(value, "answer")
    host: dict[str, Any] = {key: _number(fields, key) for key in ("time_ns", "pid", "memory_bytes")}
    host |= {key: _text(fields, key) for key in ("model", "mode")}
    rows = fields.get("workers")
    if not isinstance(rows, list) or len(rows) > MAX_WORKERS:
        raise ProtocolError(f"workers: expected a list of at most {MAX_WORKERS}, found {type(rows).__name__}")
    workers = {}
    for row in rows:
        found = _mapping(row, "workers")
        own: dict[str, Any] = {key: _text(found, key) for key in ("name", "state", "reason", "transport")}
        own |= {key: _number(found, key) for key in WORKER_COUNTED}
        own |= {key: None if found.get(key) is None else _number(found, key) for key in ("memory_bytes", "model_error")}
        workers[own["name"]] = own
    engine = fields.get("engine")
    return Snapshot(host, workers, None if engine is None else _engine(_mapping(engine, "engine")))


def rates(before: Snapshot, after: Snapshot) -> HostRates:
    """Returns what happened between two snapshots of a host. What counts anew since, as a worker
    does that was removed and came back, is 0.
    """
    seconds = max((after.fields["time_ns"] - before.fields["time_ns"]) * NS, NS)
    workers = [_worker(before.workers.get(name), own, seconds) for name, own in after.workers.items()]
    host = after.fields
    return HostRates(
        int(host["pid"]), host["model"], host["mode"], int(host["memory_bytes"]), seconds, tuple(workers),
        None if after.engine is None else _engine_rates(before.engine, after.engine, seconds),
    )  # fmt: skip


def _worker(before: Mapping[str, Any] | None, after: Mapping[str, Any], seconds: float) -> WorkerRates:
    rate = {key: _rate(before, after, key, seconds) for key in WORKER_COUNTED}
    return WorkerRates(
        **{key: after[key] for key in ("name", "state", "reason", "transport", "memory_bytes", "model_error")},
        rows_per_s=rate["rows"],
        request_bytes_per_s=rate["request_bytes"],
        reply_bytes_per_s=rate["reply_bytes"],
        wait_share=rate["wait_ns"] * NS,
        busy_share=rate["worker_compute_ns"] * NS,
        # By Little's law: the time that slices spent in the queue, per time.
        queued=rate["worker_queue_ns"] * NS,
    )


def _engine_rates(before: Mapping[str, Any] | None, after: Mapping[str, Any], seconds: float) -> EngineRates:
    return EngineRates(
        running=int(after["running"]),
        waiting=int(after["waiting"]),
        steps_per_s=_rate(before, after, "steps", seconds),
        prompt_per_s=_rate(before, after, "prompt_tokens", seconds),
        generated_per_s=_rate(before, after, "generated_tokens", seconds),
        used_blocks=int(after["total"] - after["free"]),
        total_blocks=int(after["total"]),
    )


def _rate(before: Mapping[str, Any] | None, after: Mapping[str, Any], key: str, seconds: float) -> float:
    return 0.0 if before is None else max(0.0, (after[key] - before[key]) / seconds)


def _engine(fields: Mapping[str, Any]) -> dict[str, float]:
    blocks = _mapping(fields.get("blocks"), "blocks")
    return {key: _number(fields, key) for key in ENGINE_COUNTED} | {key: _number(blocks, key) for key in ("total", "free")}


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ProtocolError(f"{what}: expected an object, found {type(value).__name__}")
    return value


def _number(fields: Mapping[str, Any], key: str) -> float:
    value = fields.get(key)
    # Larger ones are no counters, and would overflow in what is made of them.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63:
        raise ProtocolError(f"{key}: expected a number from 0 to 2**63, found {shown(value)}")
    return value


def _text(fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ProtocolError(f"{key}: expected a text of at most {MAX_TEXT} characters, found {shown(value)}")
    # A terminal would obey control characters, and a line break would break a table.
    return "".join(one if one.isprintable() else "?" for one in value)
