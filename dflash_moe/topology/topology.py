"""`Topology` says what runs where. It is read from a file or from text, or made in Python.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dflash_moe.config import Settings
from dflash_moe.errors import ConfigError, TopologyError
from dflash_moe.topology.numerics import DEFAULT_ACTIVATIONS, class_on
from dflash_moe.topology.parse import check_workers, load_topology, parse_topology
from dflash_moe.topology.registration import RegistrationSpec
from dflash_moe.topology.spec import HOST, HostSpec, PlacementSpec, WorkerSpec

# The source of a topology that was fitted to the machine (placement/fit.py) and that nobody wrote.
FITTED = "<fit>"


@dataclass(frozen=True, slots=True)
class Topology:
    """A checked topology. `ipc`, `engine`, `failure`, `audit` and `cache` hold the parsed settings
    that the file states below these keys; `config.resolve_settings` makes all settings of
    `stated_settings`.
    `preset` is None where the file has none.
    """

    workers: tuple[WorkerSpec, ...]
    host: HostSpec = field(default_factory=HostSpec)
    ipc: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    placement: PlacementSpec = field(default_factory=PlacementSpec)
    version: int = 1
    source: str = "<python>"
    engine: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    preset: str | None = None
    failure: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    audit: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    cache: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    # None where no worker may register.
    registration: RegistrationSpec | None = None

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Topology:
        """Reads a topology file. Raises TopologyError, whose text starts with `file:line:`."""
        return Topology(*load_topology(Path(path)))

    @staticmethod
    def parse(text: str, source: str = "<string>") -> Topology:
        """Reads a topology from text. `source` is what errors call the file. Raises
        TopologyError.
        """
        return Topology(*parse_topology(text, source))

    @staticmethod
    def local(
        num_workers: int = 1,
        threads: int | None = 1,
        *,
        address: str | None = None,
        memory: int | None = None,
        names: Sequence[str] | None = None,
    ) -> Topology:
        """Makes a topology of CPU workers on this machine that the host starts. They are named w0,
        w1, ... unless `names` says otherwise.

        `threads` are those of each worker; None plans them from the cores. `address` is loopback,
        unix, tcp, or None for shared memory. `memory` is in bytes. Raises ConfigError.
        """
        names = [f"w{index}" for index in range(num_workers)] if names is None else list(names)
        workers = tuple(WorkerSpec(name, threads=threads, memory=memory, address=address) for name in names)
        check_workers(workers)
        return Topology(workers, source="<local>")

    def worker(self, name: str) -> WorkerSpec:
        """Returns the worker of that name. Raises TopologyError that lists the names there are."""
        for worker in self.workers:
            if worker.name == name:
                return worker
        known = ", ".join(worker.name for worker in self.workers)
        raise TopologyError(f"{self.source}:1: no worker is named {name!r}; it has {known}")

    @property
    def stated_settings(self) -> Mapping[str, Any]:
        """What the topology says about settings, by dotted key ("ipc.mode")."""
        host = {
            "preset": self.preset, "host.operators": self.host.operators, "host.activations": self.host.activations,
            "host.fallback": self.host.fallback,
        }  # fmt: skip
        sections = {
            "ipc": self.ipc, "engine": self.engine, "failure": self.failure, "audit": self.audit, "cache": self.cache,
        }  # fmt: skip
        stated = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
        return stated | {key: value for key, value in host.items() if value is not None}

    def with_settings(self, settings: Settings) -> Topology:
        """Returns the topology as `settings` have it, in which flags and environment have won:
        what the host computes its own part in follows them, and so does the preset. Raises
        ConfigError for a setting that fits experts to cards, unless the topology comes of such a
        fit.
        """
        if settings.experts_on_card is not None and self.source != FITTED:
            raise ConfigError(
                f"--experts-on-card {settings.experts_on_card} beside the topology {self.source}: a topology says itself who "
                "holds which experts and is never fitted again; leave out one of the two"
            )
        host = replace(
            self.host, operators=settings.host_operators, activations=settings.host_activations, fallback=settings.host_fallback
        )
        return replace(self, host=host, preset=settings.preset)

    def activations_of(self, holder: str) -> str:
        """Returns what a worker, or HOST, was asked to round inputs to: a word of
        numerics.ACTIVATIONS.
        """
        if holder != HOST:
            return self.worker(holder).activations or DEFAULT_ACTIVATIONS
        asked = {worker.activations or DEFAULT_ACTIVATIONS for worker in self.workers}
        return self.host.activations or (asked.pop() if len(asked) == 1 else DEFAULT_ACTIVATIONS)

    def numerics_of(self, holder: str) -> str:
        """Returns the numerics class that a worker, or HOST, computes in, or the word for it where
        its card will say which (`numerics.class_on`).
        """
        if holder == HOST:
            device = "cpu" if self.host.device == "auto" else self.host.device
            backend, simulate = device.partition(":")[0], self.host.simulate
        else:
            backend, simulate = self.worker(holder).backend, self.worker(holder).simulate
        return class_on(self.activations_of(holder), simulate or backend)

    def registered_workers(self) -> tuple[WorkerSpec, ...]:
        """Returns the workers that dial the host."""
        return tuple(worker for worker in self.workers if worker.parsed_address.is_registered)

    def local_workers(self) -> tuple[WorkerSpec, ...]:
        """Returns the workers that the host starts on its own machine."""
        return tuple(worker for worker in self.workers if worker.is_started_by_host)
