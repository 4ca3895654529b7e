"""The parts of a topology: frozen records that placement, runtime and workers read.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash_moe.config import MemoryBudget
from dflash_moe.topology.addresses import Address, parse_address
from dflash_moe.topology.numerics import DEFAULT_NUMERICS

CPUS_WORDS = ("auto", "none")
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


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker. `line` is where it stands in the topology, 0 if it was made in Python."""

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
    # Weights are packed in memory, or computed from the mapped checkpoint (mapped). With auto they
    # are packed where that fits `memory`.
    weights_layout: str = "auto"

    @property
    def parsed_address(self) -> Address:
        """The parsed `address`, where None means shared memory."""
        return parse_address(self.address)

    @property
    def is_started_by_host(self) -> bool:
        """False when the worker is running at its address already."""
        return self.parsed_address.is_started_by_host
