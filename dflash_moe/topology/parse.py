"""Parses topology text into the checked parts of a topology. Every rule that a topology must obey
by itself is here. Placement checks the rules that also need the model.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from dflash_moe.config import (
    ACTIVATIONS,
    MAX_BYTES,
    MAX_THREADS,
    SIZE_FORMS,
    MemoryBudget,
    parse_budget,
    parse_bytes,
)
from dflash_moe.config.settings import FALLBACKS, OPERATORS, PRESETS
from dflash_moe.config.values import BUDGET_FORMS
from dflash_moe.errors import ConfigError, TopologyError, shown
from dflash_moe.named_files import read_named
from dflash_moe.topology.addresses import parse_address
from dflash_moe.topology.registration import RegistrationSpec, check_registration, parse_registration
from dflash_moe.topology.sections import parse_section
from dflash_moe.topology.spec import (
    BACKENDS,
    CPUS_WORDS,
    DEFAULT_SESSIONS,
    EVERY_LAYER,
    GPU_BACKENDS,
    MAX_CPU,
    MAX_DEVICE,
    MAX_SESSIONS,
    WEIGHTS,
    WEIGHTS_LAYOUTS,
    Emulate,
    ExpertSelection,
    FieldError,
    HostSpec,
    PlacementSpec,
    WorkerSpec,
)
from dflash_moe.topology.yaml_nodes import Value, compose

MAX_FILE_BYTES = 1 << 20
MAX_WORKERS = 256
# Local ids and counts of experts are u16 on the wire, so that a layer has at most 65,535 experts.
MAX_EXPERT_ID = 65_534
MAX_LAYER = 4095
MAX_DELAY_MS = 60_000.0
MAX_MBIT_S = 10_000_000.0
MAX_SLOWDOWN = 1000.0

POLICIES = ("even", "memory", "explicit")

ROOT_KEYS = (
    "version", "preset", "host", "ipc", "engine", "failure", "audit", "cache", "registration", "placement", "workers",
)  # fmt: skip
HOST_KEYS = ("device", "simulate", "threads", "experts", "activations", "operators", "fallback")
HOST_EXPERTS_KEYS = ("memory",)
PLACEMENT_KEYS = ("policy", "replicas")
WORKER_KEYS = (
    "name", "backend", "threads", "memory", "device", "address", "experts", "emulate", "simulate", "weights", "weights_layout",
    "activations", "cpus", "fabric_clear", "max_sessions",
)  # fmt: skip
# Below this rate one row takes seconds, and every call times out.
LEAST_MBIT_S = 0.01
EMULATE_LIMITS = {
    "delay_ms": (0.0, MAX_DELAY_MS),
    "jitter_ms": (0.0, MAX_DELAY_MS),
    "mbit_s": (0.0, MAX_MBIT_S),
    "slowdown": (1.0, MAX_SLOWDOWN),
}

_DEVICE = re.compile(r"(?:auto|cpu|(?:cuda|hip|sim):[0-9]{1,3})", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,6})(?:\s*-\s*([0-9]{1,6}))?", re.ASCII)


class TopologyParts(NamedTuple):
    """What a topology file states, in the order in which `Topology` takes it."""

    workers: tuple[WorkerSpec, ...]
    host: HostSpec
    ipc: Mapping[str, Any]
    placement: PlacementSpec
    version: int
    source: str
    engine: Mapping[str, Any]
    preset: str | None = None
    failure: Mapping[str, Any] = MappingProxyType({})
    audit: Mapping[str, Any] = MappingProxyType({})
    cache: Mapping[str, Any] = MappingProxyType({})
    registration: RegistrationSpec | None = None


def load_topology(path: Path) -> TopologyParts:
    """Reads and parses a file of at most 1 MiB of UTF-8 text. Raises TopologyError, whose text
    starts with `file:line:`.
    """
    try:
        content = read_named(path, MAX_FILE_BYTES)
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise TopologyError(f"{path}:1: the topology file {reason}; name a file of YAML") from None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        if len(content) <= MAX_FILE_BYTES:
            line = content.count(b"\n", 0, error.start) + 1
            raise TopologyError(f"{path}:{line}: the file is not UTF-8 text") from None
        # The file is too long for a topology whatever it says; the check below reports that.
        text = " " * len(content)
    return parse_topology(text, str(path))


def parse_topology(text: str, source: str) -> TopologyParts:
    """Parses and checks a topology. `source` is what errors call the file. TopologyError is the
    only error, whatever the text.
    """
    if len(text) > MAX_FILE_BYTES or len(text.encode("utf-8", "replace")) > MAX_FILE_BYTES:
        raise TopologyError(f"{source}:1: the file is larger than {MAX_FILE_BYTES} bytes; a topology fits easily in that")
    root = compose(text, source)
    fields = root.fields(ROOT_KEYS)
    _check_version(root, fields)
    placement = _placement(fields)
    if "workers" not in fields:
        raise root.error("the key 'workers' is missing; list at least one, such as {name: w0, backend: cpu}")
    workers = tuple(_worker(item, placement.policy) for item in fields["workers"].items(MAX_WORKERS))
    if not workers:
        raise fields["workers"].error("workers is empty; list at least one, such as {name: w0, backend: cpu}")
    _check_workers(workers, placement.policy, source)
    names = ("ipc", "engine", "failure", "audit", "cache")
    ipc, engine, failure, audit, cache = (parse_section(fields, name) for name in names)
    host = _host(fields["host"]) if "host" in fields else HostSpec()
    preset = fields["preset"].choice(PRESETS) if "preset" in fields else None
    registration = parse_registration(fields["registration"]) if "registration" in fields else None
    check_registration(registration, workers, source)
    return TopologyParts(workers, host, ipc, placement, 1, source, engine, preset, failure, audit, cache, registration)


def parse_worker(text: str, source: str) -> WorkerSpec:
    """Parses one worker of the list `workers`, written as there, which may list experts. Raises
    TopologyError.
    """
    return _worker(compose(text, source), "explicit")


def check_workers(workers: Sequence[WorkerSpec]) -> None:
    """Checks together workers that were made in Python, each of which has checked itself. Raises
    ConfigError.
    """
    if not 1 <= len(workers) <= MAX_WORKERS:
        raise ConfigError(f"{len(workers)} workers; allowed: 1..{MAX_WORKERS}")
    if len({worker.name for worker in workers}) < len(workers):
        raise ConfigError("two workers have the same name; give each its own")


def _check_version(root: Value, fields: dict[str, Value]) -> None:
    if "version" not in fields:
        raise root.error("the key 'version' is missing; write 'version: 1'")
    version = fields["version"].scalar()
    if isinstance(version, bool) or version != 1:
        raise fields["version"].error(f"version {shown(version)} is not supported; this dflash_moe reads version 1")


def _host(value: Value) -> HostSpec:
    fields = value.fields(HOST_KEYS)
    device = "auto"
    if "device" in fields:
        device = str(fields["device"].scalar()).lower()
        if not _DEVICE.fullmatch(device):
            raise fields["device"].error(
                f"host.device: {shown(device)} is not allowed; allowed: auto, cpu, cuda:N, hip:N, sim:N"
            )
    simulate = fields["simulate"].choice(GPU_BACKENDS) if "simulate" in fields else None
    if device.startswith("sim") != (simulate is not None):
        found = f"host: device {device!r} with simulate {simulate!r}"
        raise value.error(f"{found}; sim:N needs simulate: cuda or hip, others have none")
    threads = fields["threads"].whole(1, MAX_THREADS) if "threads" in fields else None
    budget = MemoryBudget()
    if "experts" in fields:
        experts = fields["experts"].fields(HOST_EXPERTS_KEYS)
        if "memory" in experts:
            budget = _budget(experts["memory"])
    activations = fields["activations"].choice(ACTIVATIONS) if "activations" in fields else None
    operators = fields["operators"].choice(OPERATORS) if "operators" in fields else None
    fallback = fields["fallback"].choice(FALLBACKS) if "fallback" in fields else None
    return HostSpec(device, threads, budget, value.line, activations, simulate, operators, fallback)


def _budget(value: Value) -> MemoryBudget:
    raw = value.scalar()
    try:
        return parse_budget(raw)
    except ValueError:
        raise value.error(f"{value.path}: {shown(raw)} is not allowed; allowed: {BUDGET_FORMS}, 0..{MAX_BYTES} bytes") from None


def _bytes(value: Value, least: int, allowed: str) -> int:
    raw = value.scalar()
    try:
        num_bytes = parse_bytes(raw)
    except ValueError:
        num_bytes = -1
    if num_bytes < least:
        raise value.error(f"{value.path}: {shown(raw)} is not allowed; allowed: {allowed}, {least}..{MAX_BYTES} bytes")
    return num_bytes


def _placement(fields: dict[str, Value]) -> PlacementSpec:
    if "placement" not in fields:
        return PlacementSpec()
    value = fields["placement"]
    inner = value.fields(PLACEMENT_KEYS)
    policy, line = PlacementSpec().policy, value.line
    if "policy" in inner:
        policy, line = inner["policy"].choice(POLICIES), inner["policy"].line
    replicas = inner["replicas"].whole(1, MAX_WORKERS) if "replicas" in inner else 1
    return PlacementSpec(policy, line, replicas=replicas)


def _worker(value: Value, policy: str) -> WorkerSpec:
    fields = value.fields(WORKER_KEYS)
    if "name" not in fields:
        raise value.error(f"{value.path} has no name; every worker needs one")
    name = fields["name"].word()
    try:
        return WorkerSpec(
            name,
            fields["backend"].choice(BACKENDS) if "backend" in fields else "cpu",
            fields["threads"].whole(1, MAX_THREADS) if "threads" in fields else None,
            _bytes(fields["memory"], 1, SIZE_FORMS) if "memory" in fields else None,
            fields["device"].whole(0, MAX_DEVICE) if "device" in fields else None,
            _address(fields["address"]) if "address" in fields else None,
            _experts(fields["experts"], policy, name) if "experts" in fields else None,
            _emulate(fields["emulate"]) if "emulate" in fields else None,
            fields["simulate"].choice(GPU_BACKENDS) if "simulate" in fields else None,
            value.line,
            fields["weights"].choice(WEIGHTS) if "weights" in fields else "auto",
            fields["activations"].choice(ACTIVATIONS) if "activations" in fields else None,
            _cpus(fields["cpus"], name) if "cpus" in fields else "auto",
            fields["weights_layout"].choice(WEIGHTS_LAYOUTS) if "weights_layout" in fields else "auto",
            fields["fabric_clear"].flag() if "fabric_clear" in fields else False,
            fields["max_sessions"].whole(1, MAX_SESSIONS) if "max_sessions" in fields else DEFAULT_SESSIONS,
        )
    except FieldError as error:
        raise fields[error.field].error(str(error)) from None


def _cpus(value: Value, name: str) -> str | tuple[int, ...]:
    raw = value.scalar()
    if isinstance(raw, str) and raw.strip().lower() in CPUS_WORDS:
        return raw.strip().lower()
    found: list[int] = []
    for part in str(raw).split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if isinstance(raw, bool) or not first <= last <= MAX_CPU or last - first >= MAX_THREADS:
            raise value.error(f"{value.path}: {str(raw)[:40]!r} names no CPUs; write auto, none, or for example '0-3,8'")
        found.extend(range(first, last + 1))
    if len(set(found)) < len(found):
        raise value.error(f"{value.path}: {str(raw)[:40]!r} lists a CPU of worker {name} twice")
    return tuple(found)


def _address(value: Value) -> str:
    text = value.text()
    try:
        address = parse_address(text)
    except ConfigError as error:
        raise value.error(str(error)) from None
    if address.host and address.port == 0:
        raise value.error(f"address {text!r}: port 0 names no port; write the one the worker listens on, 1..65535")
    return text


def _emulate(value: Value) -> Emulate:
    fields = value.fields(EMULATE_LIMITS)
    emulate = Emulate(**{key: field.number(*EMULATE_LIMITS[key]) for key, field in fields.items()})
    if 0 < emulate.mbit_s < LEAST_MBIT_S:
        raise fields["mbit_s"].error(
            f"{value.path}.mbit_s: {emulate.mbit_s:g} is not allowed; allowed: 0 (no limit) or at least {LEAST_MBIT_S:g}"
        )
    return emulate


def _experts(value: Value, policy: str, name: str) -> ExpertSelection:
    if policy != "explicit":
        raise value.error(f"worker {name} lists experts, but placement.policy is {policy!r}; write policy: explicit")
    ids_by_layer: dict[str, tuple[int, ...]] = {}
    for key, ids in value.entries():
        if key != EVERY_LAYER:
            if not re.fullmatch(r"[0-9]{1,4}", key, re.ASCII) or int(key) > MAX_LAYER:
                raise ids.error(f"{value.path}: {key[:40]!r} is no layer; write 0..{MAX_LAYER}, or '*' for all others")
            key = str(int(key))
        if key in ids_by_layer:
            raise ids.error(f"{value.path}: layer {key} is listed twice")
        ids_by_layer[key] = _ids(ids)
    if not ids_by_layer:
        raise value.error(f"{value.path} is empty; write for example {{'*': '0-15'}}")
    return ExpertSelection(MappingProxyType(ids_by_layer), value.line)


def _ids(value: Value) -> tuple[int, ...]:
    parts = [(item, str(item.scalar())) for item in value.items(MAX_EXPERT_ID + 1)] if value.is_list() else _split(value)
    found: set[int] = set()
    for where, part in parts:
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last <= MAX_EXPERT_ID:
            raise where.error(f"{where.path}: {part[:40]!r} names no experts; write for example '0-15', [1, 5], '0-3,8'")
        ids = range(first, last + 1)
        if twice := found.intersection(ids):
            raise where.error(f"{where.path}: expert {min(twice)} is listed twice")
        found.update(ids)
    return tuple(sorted(found))


def _split(value: Value) -> Iterable[tuple[Value, str]]:
    raw = value.scalar()
    if raw is None:
        return []
    return [(value, part) for part in str(raw).split(",")]


def _check_workers(workers: Sequence[WorkerSpec], policy: str, source: str) -> None:
    names: dict[str, int] = {}
    places: dict[str, WorkerSpec] = {}
    cpus: dict[int, str] = {}
    for worker in workers:
        if worker.name in names:
            raise TopologyError(f"{source}:{worker.line}: worker name {worker.name!r} is also on line {names[worker.name]}")
        names[worker.name] = worker.line
        address = worker.parsed_address
        is_elsewhere = not address.is_started_by_host and not address.is_registered
        if is_elsewhere and (other := places.setdefault(str(address), worker)) is not worker:
            raise TopologyError(f"{source}:{worker.line}: {other.name} and {worker.name} have the same address {address}")
        if address.is_started_by_host and isinstance(worker.cpus, tuple):
            _check_cpus(worker, cpus, source)
        needed = {"explicit": ("experts", worker.experts), "memory": ("memory", worker.memory)}.get(policy)
        if needed is not None and needed[1] is None:
            where = f"{source}:{worker.line}: worker {worker.name}"
            raise TopologyError(f"{where} has no {needed[0]}; placement.policy {policy} needs it for each worker")


def _check_cpus(worker: WorkerSpec, taken: dict[int, str], source: str) -> None:
    """Checks that no CPU of this machine belongs to two workers. `taken` collects the CPUs with the
    name of their worker.
    """
    for cpu in worker.cpus if isinstance(worker.cpus, tuple) else ():
        if (other := taken.setdefault(cpu, worker.name)) != worker.name:
            raise TopologyError(f"{source}:{worker.line}: CPU {cpu} belongs to both {other} and {worker.name}; list it once")
