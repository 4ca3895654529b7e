"""Which transport a worker gets: its address in the topology and the `transport` setting together
decide. And whether the host has what reaching it takes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_moe.errors import ConfigError
from dflash_moe.protocol.keys import read_key_file
from dflash_moe.topology.addresses import Address

if TYPE_CHECKING:
    from dflash_moe.config import Settings
    from dflash_moe.topology import Topology

# (how the worker is reached, setting) -> channel kind; a named transport that cannot be had is an
# error.
_KINDS = {
    ("shared", "auto"): "shared",
    ("shared", "shared"): "shared",
    ("shared", "stream"): "unix",
    ("unix", "auto"): "unix",
    ("unix", "stream"): "unix",
    ("unix path", "auto"): "shared",
    ("unix path", "shared"): "shared",
    ("unix path", "stream"): "unix",
    ("tcp", "auto"): "tcp",
    ("tcp", "stream"): "tcp",
}


def choose_transport(worker: str, address: Address, setting: str) -> str:
    """Returns "loopback", "shared", "unix" or "tcp". ConfigError for a pair that cannot be.

    `loopback` is a worker without a process, so the setting does not concern it.
    """
    if address.kind == "loopback":
        return "loopback"
    kind = _KINDS.get(("unix path" if address.path else address.kind, setting))
    if kind is None:
        raise ConfigError(
            f"transport {setting}: worker {worker} is reached by {address}, which does not offer it; "
            "take transport auto or change the worker's address"
        )
    return kind


def check_paths(topology: Topology, settings: Settings) -> bytes | None:
    """Call before anything slow; returns the shared key, None where no file is named.

    Errors: ConfigError for a transport that cannot be had, a key file that cannot be read or is
    missing where a worker is reached over TCP, and a socket path that is something else.
    """
    key = read_key_file(Path(settings.key_file)) if settings.key_file else None
    for worker in topology.workers:
        address = worker.parsed_address
        choose_transport(worker.name, address, settings.transport)
        if address.host and key is None:
            raise ConfigError(f"worker {worker.name} at {address}: TCP needs the shared key; give --key-file FILE")
        if address.path and not _may_be_socket(Path(address.path)):
            raise ConfigError(f"worker {worker.name} at {address}: that path is no socket; give the one its worker listens on")
    return key


def _may_be_socket(path: Path) -> bool:
    """Also where nothing is yet: its worker may still be starting."""
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return True
