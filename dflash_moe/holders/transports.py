"""Chooses the transport of a worker, which its address in the topology and the `transport` setting
decide together, and checks that the host has what reaching the worker takes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_moe.errors import ConfigError
from dflash_moe.protocol.encryption import require_library
from dflash_moe.protocol.keys import read_key_file
from dflash_moe.protocol.paths import TRANSPORTS
from dflash_moe.topology.addresses import Address

if TYPE_CHECKING:
    from dflash_moe.config import Settings
    from dflash_moe.topology import Topology

# Each transport lists in `reaches` the kinds of workers that it can reach (csrc/transport/kinds.h).
# These are the kinds of workers that the host starts itself, by the kind of their address.
_STARTED = {"shared": "started", "unix": "started, unix", "tcp": "started, tcp"}


def choose_transport(worker: str, address: Address, setting: str) -> str:
    """Returns the name of the transport that reaches `worker`. Of those that the table has for such
    an address it is the first that `setting` allows. Raises ConfigError where there is none.

    A worker at `loopback` has no process, so that the setting does not concern it.
    """
    if address.kind == "loopback":
        return "loopback"
    reach = _reach_of(address)
    for kind in TRANSPORTS.values():
        if reach in kind.reaches and setting in ("auto", kind.setting):
            return kind.name
    raise ConfigError(
        f"transport {setting}: worker {worker} is reached by {address}, which does not offer it; "
        "take transport auto or change the worker's address"
    )


def _reach_of(address: Address) -> str:
    if address.path:
        return "unix path"
    return "tcp host" if address.host else _STARTED[address.kind]


def check_paths(topology: Topology, settings: Settings) -> bytes | None:
    """Checks, before anything slow is done, that every worker can be reached. Returns the shared
    key, or None where no key file is named.

    Raises ConfigError for a transport that cannot be had, for a key file that cannot be read or is
    missing where a worker is reached over TCP, for connections that shall be encrypted where this
    machine has no libssl, and for a socket path that is something else.
    """
    key = read_key_file(Path(settings.key_file)) if settings.key_file else None
    for worker in topology.workers:
        address = worker.parsed_address
        choose_transport(worker.name, address, settings.transport)
        if address.host and key is None:
            raise ConfigError(f"worker {worker.name} at {address}: TCP needs the shared key; give --key-file FILE")
        require_library(settings.encryption, address, who=f"worker {worker.name}")
        if address.path and not _may_be_socket(Path(address.path)):
            raise ConfigError(f"worker {worker.name} at {address}: that path is no socket; give the one its worker listens on")
    return key


def _may_be_socket(path: Path) -> bool:
    """Says whether `path` is a socket or nothing yet, because its worker may still be starting."""
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return True
