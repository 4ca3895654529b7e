"""The addresses of workers: the closed set of forms that a topology and the command line may use.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from dflash_moe.errors import ConfigError, shown

STARTED_WORDS = ("loopback", "unix", "tcp")
REGISTERED = "registered"
# Linux has 108 bytes for the path of a socket, with the zero that ends it.
MAX_UNIX_PATH_BYTES = 107
_FORMS = "loopback, unix, tcp, tcp://HOST:PORT, unix:///PATH or registered"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker is reached. `kind` is "shared", "loopback", "unix", "tcp" or "registered". A
    host or a path means that the worker is running there already, registered that it dials the
    host; any other the host starts.
    """

    kind: str
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_started_by_host(self) -> bool:
        """False when the worker is running somewhere already."""
        return not self.host and not self.path and not self.is_registered

    @property
    def is_registered(self) -> bool:
        """True for a worker that dials the host."""
        return self.kind == REGISTERED

    @property
    def may_be_elsewhere(self) -> bool:
        """False when whoever is reached so is on this machine for certain."""
        return self.is_registered or (bool(self.host) and not self.is_loopback)

    @property
    def is_loopback(self) -> bool:
        """True for a TCP host that only this machine can reach."""
        return self.host == "localhost" or is_loopback(self.host)

    def __str__(self) -> str:
        if self.host:
            return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"
        return f"unix://{self.path}" if self.path else self.kind


def is_loopback(host: str) -> bool:
    """Says whether `host` is a numeric address, maybe an IPv4 one within IPv6, that never leaves
    this machine.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def parse_address(text: str | None) -> Address:
    """Returns the address that `text` names. None means a worker that the host starts and reaches
    over shared memory. Raises ConfigError naming the text and the forms that are allowed.
    """
    if text is None:
        return Address("shared")
    if not isinstance(text, str):
        raise ConfigError(f"address {shown(text)} is not one of {_FORMS}")
    if text in (*STARTED_WORDS, REGISTERED):
        return Address(text)
    if text.startswith("unix://"):
        path = text.removeprefix("unix://")
        if not path.startswith("/") or len(path.encode()) > MAX_UNIX_PATH_BYTES or "\0" in path:
            raise ConfigError(f"address {text!r}: the path must be absolute and at most {MAX_UNIX_PATH_BYTES} bytes")
        return Address("unix", path=path)
    if text.startswith("tcp://"):
        return _parse_tcp(text)
    raise ConfigError(f"address {text!r} is not one of {_FORMS}")


def parse_dialled(text: str, *, what: str) -> Address:
    """Returns the address tcp://HOST:PORT at which a host takes workers that dial it. Raises
    ConfigError naming `what` it is for any other.
    """
    address = parse_address(text)
    if not address.host or not address.port:
        raise ConfigError(f"{what}: {shown(text)} is no tcp://HOST:PORT with a port of 1..65535")
    return address


def _parse_tcp(text: str) -> Address:
    host, separator, port = text.removeprefix("tcp://").rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"address {text!r}: write an IPv6 host in brackets, tcp://[::1]:7171")
    is_number = port.isascii() and port.isdigit() and int(port) <= 65535
    if not separator or not host or not is_number or any(char.isspace() or char == "/" for char in host):
        raise ConfigError(f"address {text!r} is not tcp://HOST:PORT with a port of 0..65535")
    return Address("tcp", host=host, port=int(port))
