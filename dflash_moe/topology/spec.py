"""The topology as data: frozen records that placement, runtime and workers read.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dflash_moe.errors import TopologyError
from dflash_moe.topology.addresses import Address, parse_address
from dflash_moe.topology.numerics import DEFAULT_ACTIVATIONS, class_on

CPUS_WORDS = ("auto", "none")
HOST = "host"  # the holder of shards that stay in the host process; no worker may have this name
EVERY_LAYER = "*"


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """An amount of memory: bytes, or a fraction of something the user of the budget names."""

    num_bytes: int = 0
    fraction: float | None = None

    def resolve(self, whole_bytes: int) -> int:
        """Bytes of the budget when the whole is `whole_bytes`."""
        return self.num_bytes if self.fraction is None else int(self.fraction * whole_bytes)


@dataclass(frozen=True, slots=True)
class HostSpec:
    """`threads` None: planned from the cores. A percentage of `experts_memory` is one of all routed
    experts' bytes.

    `device` auto is cpu; sim:N comes with `simulate`. `activations` None: what the workers have,
    where they agree.
    """

    device: str = "auto"
    threads: int | None = None
    experts_memory: MemoryBudget = field(default_factory=MemoryBudget)
    line: int = 0
    activations: str | None = None
    simulate: str | None = None


@dataclass(frozen=True, slots=True)
class PlacementSpec:
    """`policy`: even, memory or explicit."""

    policy: str = "even"
    line: int = 0


@dataclass(frozen=True, slots=True)
class Emulate:
    """A slower link or worker, for tests and benches. `mbit_s` 0: no limit."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    mbit_s: float = 0.0
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertSelection:
    """Expert ids by layer: a layer index, or EVERY_LAYER for the layers without an entry of their
    own.
    """

    ids_by_layer: Mapping[str, tuple[int, ...]]
    line: int = 0

    def for_layer(self, layer: int, num_experts: int) -> tuple[int, ...]:
        """Ascending ids of layer index `layer`; ValueError names an id that a layer of
        `num_experts` does not have.
        """
        ids = self.ids_by_layer.get(str(layer), self.ids_by_layer.get(EVERY_LAYER, ()))
        if ids and ids[-1] >= num_experts:
            raise ValueError(f"expert {ids[-1]} does not exist in layer {layer}, which has experts 0-{num_experts - 1}")
        return ids

    def named_layers(self) -> tuple[int, ...]:
        """Layer indices that have an entry of their own."""
        return tuple(int(key) for key in self.ids_by_layer if key != EVERY_LAYER)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker. `line` is where it stands in the topology (0: it was made in Python)."""

    name: str
    backend: str = "cpu"
    threads: int | None = None
    memory: int | None = None  # bytes
    device: int | None = None
    address: str | None = None
    experts: ExpertSelection | None = None
    emulate: Emulate | None = None
    simulate: str | None = None
    line: int = 0
    weights: str = "auto"  # what the worker keeps of float weights: auto (as stored), int8 or int4
    activations: str = DEFAULT_ACTIVATIONS  # a word of numerics.ACTIVATIONS
    # the cores its threads are pinned to: auto, none, or their numbers
    cpus: str | tuple[int, ...] = "auto"
    # packed, mapped (computed from the mapped checkpoint), or auto: packed where that fits memory
    weights_layout: str = "auto"

    @property
    def parsed_address(self) -> Address:
        """`address` taken apart; None there means shared memory."""
        return parse_address(self.address)

    @property
    def is_started_by_host(self) -> bool:
        """False when the worker is already running at its address."""
        return self.parsed_address.is_started_by_host


@dataclass(frozen=True, slots=True)
class Topology:
    """A checked topology. `ipc` holds the stated keys below `ipc:`, parsed; see
    `config.resolve_settings`.
    """

    workers: tuple[WorkerSpec, ...]
    host: HostSpec = field(default_factory=HostSpec)
    ipc: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    placement: PlacementSpec = field(default_factory=PlacementSpec)
    version: int = 1
    source: str = "<python>"

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Topology:
        """Reads a topology file. TopologyError starts with `file:line:`."""
        from dflash_moe.topology.parse import load_topology

        return load_topology(Path(path))

    @staticmethod
    def parse(text: str, source: str = "<string>") -> Topology:
        """Reads a topology from text; `source` is what errors call the file."""
        from dflash_moe.topology.parse import parse_topology

        return parse_topology(text, source)

    @staticmethod
    def local(
        num_workers: int = 1,
        threads: int | None = 1,
        *,
        address: str | None = None,
        memory: int | None = None,
        names: Sequence[str] | None = None,
    ) -> Topology:
        """CPU workers of this machine, started by the host: w0, w1, ... unless `names` says
        otherwise.

        `threads` None plans them from the cores; `address` is loopback, unix, tcp or None for
        shared memory.
        """
        from dflash_moe.topology.parse import check_local

        names = [f"w{index}" for index in range(num_workers)] if names is None else list(names)
        workers = tuple(WorkerSpec(name, threads=threads, memory=memory, address=address) for name in names)
        check_local(workers)
        return Topology(workers, source="<local>")

    def worker(self, name: str) -> WorkerSpec:
        """The worker of that name; TopologyError lists the names there are."""
        for worker in self.workers:
            if worker.name == name:
                return worker
        known = ", ".join(worker.name for worker in self.workers)
        raise TopologyError(f"{self.source}:1: no worker is named {name!r}; it has {known}")

    def activations_of(self, holder: str) -> str:
        """What a worker, or HOST, was asked to round inputs to: a word of numerics.ACTIVATIONS."""
        if holder != HOST:
            return self.worker(holder).activations
        asked = {worker.activations for worker in self.workers}
        return self.host.activations or (asked.pop() if len(asked) == 1 else DEFAULT_ACTIVATIONS)

    def numerics_of(self, holder: str) -> str:
        """The numerics class that a worker, or HOST, computes in, or the word for it where its card
        will say which (`numerics.class_on`).
        """
        if holder == HOST:
            device = "cpu" if self.host.device == "auto" else self.host.device
            backend, simulate = device.partition(":")[0], self.host.simulate
        else:
            backend, simulate = self.worker(holder).backend, self.worker(holder).simulate
        return class_on(self.activations_of(holder), simulate or backend)

    def local_workers(self) -> tuple[WorkerSpec, ...]:
        """The workers that the host starts on its own machine."""
        return tuple(worker for worker in self.workers if worker.is_started_by_host)
