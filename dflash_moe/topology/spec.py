"""The parts of a topology: frozen records that placement, runtime and workers read. A worker's
record checks itself, whether a file or a program states it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from dflash_moe.config import ACTIVATIONS, MAX_BYTES, MAX_THREADS, MemoryBudget
from dflash_moe.errors import ConfigError, shown
from dflash_moe.topology.addresses import Address, parse_address
from dflash_moe.topology.numerics import DEFAULT_NUMERICS

BACKENDS = ("cpu", "cuda", "hip", "sim")
GPU_BACKENDS = ("cuda", "hip")
WEIGHTS = ("auto", "int8", "int4")
WEIGHTS_LAYOUTS = ("auto", "packed", "mapped", "stored")
CPUS_WORDS = ("auto", "none")
MAX_DEVICE = 255
# A worker holds one store for all its hosts; each session takes two threads and a few connections.
DEFAULT_SESSIONS, MAX_SESSIONS = 8, 64
MAX_CPU = 65_535
NAME_FORM = "1..63 letters, digits, '_', '-', '.', the first a letter or digit"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", re.ASCII)
# The holder of the shards that stay in the host process has this name, and no worker may have it.
HOST = "host"
EVERY_LAYER = "*"


@dataclass(frozen=True, slots=True)
class HostSpec:
    """The host process. `threads` None has them planned from the cores. A fraction in
    `experts_memory` is one of the bytes of all routed experts.

    `device` auto means cpu, and sim:N comes with `simulate`. `activations` None means those of the
    workers where they agree, else the default. `operators` None means that the topology does not
    say who computes the host's part of the model, and `fallback` None that it does not say
    whether the host computes a lost worker's experts. `line` is where it stands in the file.
    """

    device: str = "auto"
    threads: int | None = None
    experts_memory: MemoryBudget = field(default_factory=MemoryBudget)
    line: int = 0
    activations: str | None = None
    simulate: str | None = None
    operators: str | None = None
    fallback: str | None = None


@dataclass(frozen=True, slots=True)
class ShardTerms:
    """A shard that has no holder yet: experts of one layer, in ascending order, and what decides
    the bits of their sum. `weights` and `numerics` are as in placement.Shard, and no class means
    its holder's own; `architecture` is that of the card whose bits the class has, empty where every
    machine computes the same.
    """

    experts: tuple[int, ...]
    weights: str = "auto"
    numerics: str = DEFAULT_NUMERICS
    architecture: str = ""


# The shards of every layer with routed experts, in ascending order of their ids.
ShardMap = tuple[tuple[ShardTerms, ...], ...]


@dataclass(frozen=True, slots=True)
class PlacementSpec:
    """How experts are placed: `policy` is even, memory or explicit. Where `imposed` is given, which
    no file can say, the shards are those, and the policy does not count: a holder may get several
    shards of a layer. `dense` then gives the class of the host's own matrices by format.

    Every shard of a worker has `replicas` holders, its own worker counted.
    """

    policy: str = "even"
    line: int = 0
    imposed: ShardMap | None = None
    dense: Mapping[str, str] | None = None
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Emulate:
    """A slower link or worker, for tests and benches. `mbit_s` 0 sets no limit, and `slowdown` says
    how many times as long computing takes.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    mbit_s: float = 0.0
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertSelection:
    """The expert ids that a worker lists, by layer. A key is a layer index as text, or EVERY_LAYER
    for the layers without an entry of their own. Ids ascend.
    """

    ids_by_layer: Mapping[str, tuple[int, ...]]
    line: int = 0

    def for_layer(self, layer: int, num_experts: int) -> tuple[int, ...]:
        """Returns the ascending ids for the layer of index `layer`. Raises ValueError naming an id
        that a layer of `num_experts` does not have.
        """
        ids = self.ids_by_layer.get(str(layer), self.ids_by_layer.get(EVERY_LAYER, ()))
        if ids and ids[-1] >= num_experts:
            raise ValueError(f"expert {ids[-1]} does not exist in layer {layer}, which has experts 0-{num_experts - 1}")
        return ids

    def named_layers(self) -> tuple[int, ...]:
        """Returns the layer indices that have an entry of their own."""
        return tuple(int(key) for key in self.ids_by_layer if key != EVERY_LAYER)


class FieldError(ConfigError):
    """A field of a worker may not be what it is. `field` is its name."""

    def __init__(self, field_name: str, text: str) -> None:
        super().__init__(text)
        self.field = field_name


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker. `line` is where it stands in the topology, 0 if it was made in Python. Making one
    whose fields are not allowed raises FieldError, or ConfigError for its address.
    """

    name: str
    backend: str = "cpu"
    # None has the threads planned from the cores.
    threads: int | None = None
    # The weights of its experts may take so many bytes; None sets no limit.
    memory: int | None = None
    device: int | None = None
    address: str | None = None
    experts: ExpertSelection | None = None
    emulate: Emulate | None = None
    simulate: str | None = None
    line: int = 0
    # The worker keeps float weights as they are stored (auto), or makes int8 or int4 of them.
    weights: str = "auto"
    # This is a word of numerics.ACTIVATIONS: how inputs are rounded before they are multiplied.
    # None leaves it to the preset.
    activations: str | None = None
    # Its threads are pinned to these CPUs, to CPUs that the host chooses (auto), or to none.
    cpus: str | tuple[int, ...] = "auto"
    # Weights are packed in memory, or computed from the mapped checkpoint (mapped), or packed and
    # mapped from files that this machine keeps of them, which are written where they are missing
    # (stored). With auto they are packed where that fits `memory`, and such files are used as the
    # settings `cache` say.
    weights_layout: str = "auto"
    # Its calls may cross a network over libfabric, which carries them in clear.
    fabric_clear: bool = False
    # A worker that somebody starts serves so many hosts at once.
    max_sessions: int = DEFAULT_SESSIONS

    def __post_init__(self) -> None:
        for name, text in _problems(self):
            raise FieldError(name, text)
        parse_address(self.address)

    @property
    def parsed_address(self) -> Address:
        """The parsed `address`, where None means shared memory."""
        return parse_address(self.address)

    @property
    def is_started_by_host(self) -> bool:
        """False when the worker is running at its address already."""
        return self.parsed_address.is_started_by_host


def is_worker_name(name: object) -> bool:
    """Says whether a worker may have this name."""
    return isinstance(name, str) and bool(_NAME.fullmatch(name)) and not _is_host(name)


def _is_host(name: object) -> bool:
    return isinstance(name, str) and name.lower() == HOST


def _problems(worker: WorkerSpec) -> Iterator[tuple[str, str]]:
    """Yields the field and a sentence for all that a worker may not be."""
    name = worker.name
    if not is_worker_name(name) and not _is_host(name):
        yield "name", f"worker name {shown(name)} is not allowed; allowed: {NAME_FORM}"
    elif _is_host(name):
        yield "name", f"worker name {name!r} is reserved for the host process; choose another"
    words: Mapping[str, tuple[object, ...]] = {
        "backend": BACKENDS, "simulate": (None, *GPU_BACKENDS), "weights": WEIGHTS, "weights_layout": WEIGHTS_LAYOUTS,
        "activations": (None, *ACTIVATIONS),
    }  # fmt: skip
    for key, allowed in words.items():
        if not _is_among(getattr(worker, key), allowed):
            yield key, _not_allowed(worker, key, ", ".join(map(str, allowed)))
    bounds = {"threads": (1, MAX_THREADS), "memory": (1, MAX_BYTES), "device": (0, MAX_DEVICE)}
    if not _is_whole(worker.max_sessions, 1, MAX_SESSIONS):
        yield "max_sessions", _not_allowed(worker, "max_sessions", f"a whole number, 1..{MAX_SESSIONS}")
    for key, (low, high) in bounds.items():
        value = getattr(worker, key)
        if value is not None and not _is_whole(value, low, high):
            unit = " of bytes" if key == "memory" else ""
            yield key, _not_allowed(worker, key, f"None, or a whole number{unit}, {low}..{high}")
    if not _names_cpus(worker.cpus):
        yield "cpus", _not_allowed(worker, "cpus", "auto, none, or a tuple of different CPUs, such as (0, 1)")
    if not isinstance(worker.fabric_clear, bool):
        yield "fabric_clear", _not_allowed(worker, "fabric_clear", "true, false")
    for key, kind in (("experts", ExpertSelection), ("emulate", Emulate)):
        if not isinstance(getattr(worker, key), kind | None):
            yield key, _not_allowed(worker, key, f"None, or an object of class {kind.__name__}")
    yield from _contradictions(worker)


def _contradictions(worker: WorkerSpec) -> Iterator[tuple[str, str]]:
    """Yields the fields that do not fit others."""
    who, backend = f"worker {worker.name}", worker.backend
    if worker.device is not None and backend not in GPU_BACKENDS:
        yield "device", f"{who} has a device, but backend {backend!r}; devices belong to cuda and hip"
    if worker.simulate is None and backend == "sim":
        yield "backend", f"{who} has backend 'sim' and no simulate; add simulate: cuda or simulate: hip"
    if worker.simulate is not None and backend != "sim":
        yield "simulate", f"{who} has simulate, but its backend is {backend!r}; simulate belongs to sim"
    if worker.weights_layout == "mapped" and backend != "cpu":
        yield "weights_layout", f"{who} has backend {backend}; only cpu computes from the mapped checkpoint"
    if worker.weights_layout == "mapped" and worker.weights != "auto":
        yield "weights_layout", f"{who} keeps weights made at load; mapped needs weights: auto"
    if worker.weights_layout == "stored" and backend != "cpu":
        yield "weights_layout", f"{who} has backend {backend}; only cpu computes from stored panels; write weights_layout: auto"


def _not_allowed(worker: WorkerSpec, key: str, allowed: str) -> str:
    return f"worker {worker.name}: {key} {shown(getattr(worker, key))} is not allowed; allowed: {allowed}"


def _is_among(value: object, allowed: Collection[object]) -> bool:
    return (value is None or isinstance(value, str)) and value in allowed


def _is_whole(value: object, low: int, high: int) -> bool:
    try:
        # Integers of NumPy count as integers here.
        return not isinstance(value, bool) and low <= operator.index(value) <= high  # type: ignore[arg-type]
    except TypeError:
        return False


def _names_cpus(value: object) -> bool:
    if isinstance(value, str):
        return value in CPUS_WORDS
    return (
        isinstance(value, tuple) and bool(value) and all(_is_whole(cpu, 0, MAX_CPU) for cpu in value)
        and len(set(value)) == len(value)
    )  # fmt: skip
