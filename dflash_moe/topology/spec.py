"""What a topology is made of: frozen records that placement, runtime and workers read.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash_moe.topology.addresses import Address, parse_address
from dflash_moe.topology.numerics import DEFAULT_ACTIVATIONS

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
