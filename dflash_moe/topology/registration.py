"""The section `registration` of a topology: where workers register, and which of them may.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_moe.errors import ConfigError, TopologyError, shown
from dflash_moe.topology.addresses import Address, parse_address, parse_dialled
from dflash_moe.topology.spec import NAME_FORM, WorkerSpec, is_worker_name

if TYPE_CHECKING:
    from dflash_moe.topology.yaml_nodes import Value

REGISTRATION_KEYS = ("listen", "expect", "names", "require_key_per_worker", "max_pending", "handshake_s")
ANY = "any"
MAX_NAMES = 256
# Fewer connections would let two strangers keep a worker out, and more cost a thread each.
PENDING_LIMITS = (2, 1024)
HANDSHAKE_LIMITS = (0.1, 60.0)


@dataclass(frozen=True, slots=True)
class RegistrationSpec:
    """Where the host listens for workers that register. `names` None means those of the topology's
    registered workers, and ("any",) all; `expect` 0 means as many as the topology lists. `line` is
    where it stands in the file.
    """

    listen: str
    expect: int = 0
    names: tuple[str, ...] | None = None
    require_key_per_worker: bool = False
    max_pending: int = 64
    handshake_s: float = 5.0
    line: int = 0

    @property
    def address(self) -> Address:
        """The parsed `listen`."""
        return parse_address(self.listen)

    def allows(self, worker: str) -> bool:
        """Whether one of this name may register that the topology does not list."""
        return self.names is not None and (self.names == (ANY,) or worker in self.names)


def parse_registration(value: Value) -> RegistrationSpec:
    """Parses the section. Raises TopologyError."""
    fields = value.fields(REGISTRATION_KEYS)
    if "listen" not in fields:
        raise value.error("registration has no listen; write the address that workers dial, such as tcp://0.0.0.0:7170")
    given: dict[str, Any] = {"listen": _listen(fields["listen"]), "line": value.line}
    if "names" in fields:
        given["names"] = _names(fields["names"])
    if "expect" in fields:
        given["expect"] = fields["expect"].whole(1, MAX_NAMES)
    if "require_key_per_worker" in fields:
        given["require_key_per_worker"] = fields["require_key_per_worker"].flag()
    if "max_pending" in fields:
        given["max_pending"] = fields["max_pending"].whole(*PENDING_LIMITS)
    if "handshake_s" in fields:
        given["handshake_s"] = fields["handshake_s"].number(*HANDSHAKE_LIMITS)
    return RegistrationSpec(**given)


def _listen(value: Value) -> str:
    text = value.text()
    try:
        parse_dialled(text, what="registration.listen")
    except ConfigError as error:
        raise value.error(str(error)) from None
    return text


def _names(value: Value) -> tuple[str, ...]:
    if not value.is_list():
        return (value.choice((ANY,)),)
    names = [item.word() for item in value.items(MAX_NAMES)]
    for name in names:
        if not is_worker_name(name):
            raise value.error(f"registration.names: {shown(name)} is no name of a worker; allowed: {NAME_FORM}")
    if not names or len(set(names)) < len(names):
        raise value.error("registration.names must list different names, at least one; or write names: any")
    return tuple(names)


def check_registration(found: RegistrationSpec | None, workers: Sequence[WorkerSpec], source: str) -> None:
    """Checks that the section fits the workers. Raises TopologyError naming the line."""
    listed = [worker for worker in workers if worker.parsed_address.is_registered]
    if found is None:
        for worker in listed:
            raise TopologyError(
                f"{source}:{worker.line or 1}: worker {worker.name} has address: registered, and there is no "
                "registration; write registration: {listen: tcp://0.0.0.0:7170}"
            )
        return
    where = f"{source}:{found.line or 1}: registration"
    if not listed and found.names is None:
        raise TopologyError(f"{where}: no worker has address: registered, and there are no names; nobody could register")
    if found.names in (None, (ANY,)):
        allowed = MAX_NAMES if found.names else len(listed)
    else:
        allowed = len(found.names or ())
        for worker in listed:
            if not found.allows(worker.name):
                raise TopologyError(f"{where}.names: worker {worker.name} has address: registered and is not among them")
        for worker in workers:
            if worker not in listed and found.allows(worker.name):
                raise TopologyError(f"{where}.names: worker {worker.name} is among them, and its address is {worker.address}")
    if found.expect > allowed:
        raise TopologyError(f"{where}.expect: {found.expect} workers are expected and {allowed} names may register")
    if found.expect and found.expect < len(listed):
        raise TopologyError(
            f"{where}.expect: {found.expect} workers are expected, and the topology lists {len(listed)} that "
            "register, all of which a start waits for; write at least as many, or leave expect out"
        )
