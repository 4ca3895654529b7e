"""Binds the port of the server before anything is loaded, so that a taken one ends the start at
once, and callers wait in the backlog while a front starts.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

from dflash_moe.errors import ConfigError
from dflash_moe.server.front.guard import is_loopback_name

# Callers that may wait for a front. The kernel takes the least of this and net.core.somaxconn.
BACKLOG = 1024
# What the kernel keeps for a reader that is behind. By itself it would take megabytes, and nobody
# would notice for minutes that nothing is read.
SEND_BUFFER_BYTES = 128 << 10
# A reader that acknowledges nothing for so long is gone, whatever the front has to send.
USER_TIMEOUT_MS = 60_000


@dataclass(frozen=True, slots=True)
class Bound:
    """A listening socket, which belongs to whoever has this, and how callers reach it."""

    sock: socket.socket
    host: str
    port: int
    is_loopback: bool

    def url(self, *, has_tls: bool) -> str:
        """Returns where the server is."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if has_tls else 'http'}://{host}:{self.port}"


def bind(host: str, port: int) -> Bound:
    """Listens at a name or address, and at a free port where that is 0. Raises ConfigError that
    names the flag for what cannot be.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--host {host}: {getattr(error, 'strerror', None) or error}; give an address of this machine"
        ) from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit these.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"--host {host} --port {port}: {error.strerror}; choose another port, or 0 for a free one") from None
    bound_address, bound_port = sock.getsockname()[:2]
    return Bound(sock, host, bound_port, is_loopback_name(bound_address))
