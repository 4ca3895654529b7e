"""Writes a topology as the YAML that the parser reads, so that what was planned can be kept and
edited.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import yaml

from dflash_moe.config import MemoryBudget
from dflash_moe.config.values import runs_of
from dflash_moe.topology.registration import ANY, RegistrationSpec
from dflash_moe.topology.sections import nested
from dflash_moe.topology.spec import Emulate, ExpertSelection, HostSpec, PlacementSpec, WorkerSpec
from dflash_moe.topology.topology import Topology

# A line per worker and per layer of its experts is easier to edit than one of a thousand columns.
_WIDTH = 4096


def to_yaml(topology: Topology) -> str:
    """Returns the text of a topology file. `Topology.parse` makes an equal topology of it, but for
    lines and source; what is at its default is left out.
    """
    root: dict[str, Any] = {"version": topology.version}
    if topology.preset is not None:
        root["preset"] = topology.preset
    sections = {
        "host": _host(topology.host), "ipc": _values(topology.ipc), "engine": _values(topology.engine),
        "failure": nested({key: list(v) if isinstance(v, tuple) else _value(v) for key, v in topology.failure.items()}),
        "audit": {key: f"{100 * v:g}%" if key == "cpu" else v for key, v in topology.audit.items()},
        "cache": _values(topology.cache),
    }  # fmt: skip
    root |= {name: section for name, section in sections.items() if section}
    if topology.registration is not None:
        root["registration"] = _registration(topology.registration)
    placement, default = topology.placement, PlacementSpec()
    stated: dict[str, Any] = {"policy": placement.policy} if placement.policy != default.policy else {}
    if placement.replicas != default.replicas:
        stated["replicas"] = placement.replicas
    if stated:
        root["placement"] = stated
    root["workers"] = [_worker(worker) for worker in topology.workers]
    return yaml.safe_dump(root, sort_keys=False, width=_WIDTH, allow_unicode=True)


def _registration(registration: RegistrationSpec) -> dict[str, Any]:
    found = _changed(registration, RegistrationSpec(""), skipped=("line", "names"))
    if registration.names is not None:
        found["names"] = ANY if registration.names == (ANY,) else list(registration.names)
    return found


def _host(host: HostSpec) -> dict[str, Any]:
    found = _changed(host, HostSpec(), skipped=("line", "experts_memory"))
    if host.experts_memory != MemoryBudget():
        found["experts"] = {"memory": _value(host.experts_memory)}
    return found


def _worker(worker: WorkerSpec) -> dict[str, Any]:
    found = {"name": worker.name, **_changed(worker, WorkerSpec(worker.name), skipped=("line", "name", "experts", "emulate"))}
    if worker.emulate is not None:
        found["emulate"] = _changed(worker.emulate, Emulate(), skipped=()) or {"delay_ms": 0.0}
    if worker.experts is not None:
        found["experts"] = _experts(worker.experts)
    return found


def _experts(experts: ExpertSelection) -> dict[str, str]:
    return {layer: _ids(ids) for layer, ids in experts.ids_by_layer.items()}


def _ids(ids: Sequence[int]) -> Any:
    """Returns ascending ids as ranges: 0-15, 20."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs_of(ids)) or []


def _changed(record: Any, default: Any, *, skipped: Sequence[str]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(record) if field.name not in skipped]
    return {name: _value(getattr(record, name)) for name in names if getattr(record, name) != getattr(default, name)}


def _values(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _value(value) for key, value in section.items()}


def _value(value: Any) -> Any:
    if isinstance(value, MemoryBudget):
        return value.num_bytes if value.fraction is None else f"{100 * value.fraction:.6f}%"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value) if isinstance(value, PathLike) else value
