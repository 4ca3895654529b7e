"""What a topology is made of: frozen records that placement, runtime and workers read.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash_moe.topology.addresses import Address, parse_address

# What a worker's inputs are rounded to before they meet the weights, and the numerics class that is
# (csrc/compute/numerics.h). The dot products of bf16's differ between kinds of processors, and so
# do their bits: `bf16` is the class of the kind this process runs on, and a topology for workers of
# another kind names theirs.
BF16_CLASS = "bf16-bfdot" if os.uname().machine in ("aarch64", "arm64") else "bf16-dot"
ACTIVATIONS = {
    "f32": "f32-canonical", "bf16": BF16_CLASS, "int8": "int8-groups", "bf16-dot": "bf16-dot", "bf16-bfdot": "bf16-bfdot",
    "bf16-mma": "bf16-mma", "bf16-mfma": "bf16-mfma", "bf16-wmma": "bf16-wmma",
    "f16": "f16-dot2", "f16-dot2": "f16-dot2",
}  # fmt: skip
# On a card bf16 is the class of its matrix units. AMD's are of two kinds, MFMA (Instinct) and WMMA
# (Radeon RX 7000 and 9000): which one it is, only the opened card says, in the answer to hello.
# Until then its class is BF16_OF_CARD.
BF16_OF_CARD = "bf16"
MATRIX_CLASSES = {"cuda": "bf16-mma", "hip": BF16_OF_CARD}
UNDECIDED = {BF16_OF_CARD: ("bf16-mfma", "bf16-wmma")}
DEFAULT_ACTIVATIONS = "f32"
DEFAULT_NUMERICS = ACTIVATIONS[DEFAULT_ACTIVATIONS]
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
    activations: str = DEFAULT_ACTIVATIONS  # a key of ACTIVATIONS
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


def possible_classes(numerics: str) -> tuple[str, ...]:
    """The class itself, or those that one which its card decides may turn out to be."""
    return UNDECIDED.get(numerics, (numerics,))
