"""TCP sockets of either end: one that listens, and one that dials, both with the buffers that their
settings ask for and within a bounded time.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import errno
import socket

from dflash_moe.errors import ConfigError
from dflash_moe.protocol.framing import size_buffers
from dflash_moe.topology.addresses import Address

# At most this many connections wait to be accepted; the kernel refuses more.
BACKLOG = 128
# A listener that is there accepts a connection within this time, even across a slow network.
CONNECT_S = 5.0
_TCP_REMEDIES = {
    errno.EADDRINUSE: "another program listens there; stop it or take another port",
    errno.EADDRNOTAVAIL: "this machine has no such address; take one of its own, or 0.0.0.0 for all of them",
    errno.EACCES: "ports below 1024 belong to root; take a higher one",
}
WORKERS_ADDRESS = "check the worker's address in the topology, or pass --listen"


def open_tcp_listener(host: str, port: int, buffer_bytes: int = 0, *, remedy: str = WORKERS_ADDRESS) -> socket.socket:
    """Returns a listening TCP socket, which the caller owns. Port 0 lets the system choose, and
    `buffer_bytes` sizes the buffers as `size_buffers` does. Raises ConfigError when the address
    cannot be had; `remedy` then says what to do where the system's error does not.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        size_buffers(sock, buffer_bytes)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        found = _TCP_REMEDIES.get(error.errno or 0, remedy)
        raise ConfigError(f"cannot listen on tcp://{host}:{port}: {error.strerror}; {found}") from None
    return sock


def connect_tcp(address: Address, buffer_bytes: int, seconds: float) -> socket.socket:
    """Does what socket.create_connection does, but sizes the buffers before TCP's handshake, in
    which the window is agreed. Returns the socket, which the caller owns. Raises the OSError of the
    last address tried, TimeoutError after `seconds` of one of them. A host name is looked up within
    the bounds that the system's resolver sets itself.
    """
    failed: OSError | None = None
    for family, kind, protocol, _, target in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            size_buffers(sock, buffer_bytes)
            sock.settimeout(seconds)
            sock.connect(target)
            return sock
        except OSError as error:
            sock.close()
            failed = error
    raise failed or OSError(f"{address.host} has no address")
