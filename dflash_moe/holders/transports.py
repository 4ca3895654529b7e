"""Chooses the transport of a worker, which its address in the topology and the `transport` setting
decide together, and checks that the host has what reaching the worker takes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.protocol.encryption import SETTING, require_library
from dflash_moe.protocol.keys import read_key_file
from dflash_moe.protocol.paths import TRANSPORTS
from dflash_moe.topology.addresses import Address

if TYPE_CHECKING:
    from dflash_moe.config import Settings
    from dflash_moe.topology import Topology, WorkerSpec
    from dflash_moe.topology.registration import RegistrationSpec

log = logging.getLogger(__name__)

# Each transport lists in `reaches` the kinds of workers that it can reach (csrc/transport/kinds.h).
# These are the kinds of workers that the host starts itself, by the kind of their address. A worker
# that registers is reached as one behind a TCP address is.
_TCP = "tcp host"
_STARTED = {"shared": "started", "unix": "started, unix", "tcp": "started, tcp"}


def choose_transport(worker: str, address: Address, setting: str, *, fabric_clear: bool = False) -> str:
    """Returns the name of the transport that reaches `worker`. Of those that the table has for such
    an address it is the first that `setting` allows. Raises ConfigError where there is none, and
    where it carries calls in clear across a network without `fabric_clear`, the worker's word that
    it may.

    A worker at `loopback` has no process, so that the setting does not concern it.
    """
    if address.kind == "loopback":
        return "loopback"
    reach = _reach_of(address)
    for kind in TRANSPORTS.values():
        if reach not in kind.reaches or setting not in ("auto", kind.setting):
            continue
        if kind.is_clear and address.may_be_elsewhere and not fabric_clear:
            raise ConfigError(
                f"transport {setting}: worker {worker} is reached by {address}, and a fabric carries calls in clear: "
                "whoever shares that network can read and forge them; add fabric_clear: true to this worker where "
                "that is nobody, or take transport auto"
            )
        return kind.name
    raise ConfigError(
        f"transport {setting}: worker {worker} is reached by {address}, which does not offer it; "
        "take transport auto or change the worker's address"
    )


def may_take_fabric(worker: WorkerSpec | None, setting: str) -> bool:
    """Whether `auto` tries a fabric to this worker before what `choose_transport` said: its calls
    may travel in clear, and this host has a provider with hardware. The first look of a process
    at its providers takes 0.1 to 0.4 s.
    """
    if setting != "auto" or worker is None or not worker.fabric_clear or _reach_of(worker.parsed_address) != _TCP:
        return False
    try:
        return any(provider.is_fast for provider in _core.fabric_providers())
    except UnsupportedError as error:
        log.info("worker %s: no fabric: %s", worker.name, error)
        return False


def _reach_of(address: Address) -> str:
    if address.path:
        return "unix path"
    return _TCP if address.host or address.is_registered else _STARTED[address.kind]


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
        choose_transport(worker.name, address, settings.transport, fabric_clear=worker.fabric_clear)
        if address.host and key is None:
            raise ConfigError(f"worker {worker.name} at {address}: TCP needs the shared key; give --key-file FILE")
        if address.is_registered and topology.registration is None:
            raise ConfigError(f"worker {worker.name} has address: registered, and the topology has no registration")
        require_library(settings.encryption, address, who=f"worker {worker.name}")
        if address.path and not _may_be_socket(Path(address.path)):
            raise ConfigError(f"worker {worker.name} at {address}: that path is no socket; give the one its worker listens on")
    if topology.registration is not None:
        _check_registration(topology.registration, settings, key)
    return key


def _check_registration(registration: RegistrationSpec, settings: Settings, key: bytes | None) -> None:
    where = f"registration at {registration.listen}"
    if key is None:
        raise ConfigError(f"{where}: workers prove the group's key; give --key-file FILE")
    if settings.encryption == "off":
        raise ConfigError(f"{where}: {SETTING} is off, and connections of workers that register are always encrypted")
    require_library("on", registration.address, who="registration")


def _may_be_socket(path: Path) -> bool:
    """Says whether `path` is a socket or nothing yet, because its worker may still be starting."""
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return True
