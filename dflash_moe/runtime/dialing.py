"""Connections to workers that listen: the control one of a session, and over TCP its data and pulse
connections.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import socket
import time

from dflash_moe.errors import WorkerLost, WorkerTimeout
from dflash_moe.protocol.auth import HANDSHAKE_S, Peer, authenticate_to_worker
from dflash_moe.protocol.framing import Connection, require_same_user, size_buffers
from dflash_moe.protocol.messages import Role
from dflash_moe.topology.addresses import Address

CONNECT_S = 5.0


def dial(worker: str, address: Address, buffer_bytes: int = 0) -> socket.socket:
    """A connection to the listener at `address`; `buffer_bytes` as `size_buffers`, over TCP.

    Errors: WorkerLost, WorkerTimeout, ProtocolError (a Unix socket of another user).
    """
    try:
        if address.path:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(CONNECT_S)
            sock.connect(address.path)
            require_same_user(sock)
            return sock
        return _connect(address, buffer_bytes)
    except TimeoutError:
        raise WorkerTimeout(f"worker {worker} at {address} did not accept a connection within {CONNECT_S:g} s") from None
    except OSError as error:
        raise WorkerLost(
            f"worker {worker} at {address} cannot be reached: {error.strerror or error}; "
            f"start it there with `dflash-moe worker --name {worker} ...`"
        ) from None


def _connect(address: Address, buffer_bytes: int) -> socket.socket:
    """As socket.create_connection, with buffers sized before the handshake. OSError of the last
    address tried.
    """
    failed: OSError | None = None
    for family, kind, protocol, _, target in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            size_buffers(sock, buffer_bytes)
            sock.settimeout(CONNECT_S)
            sock.connect(target)
            return sock
        except OSError as error:
            sock.close()
            failed = error
    raise failed or OSError(f"{address.host} has no address")


def dial_role(worker: str, address: Address, role: Role, peer: Peer, generation: int, buffer_bytes: int = 0) -> int:
    """An authenticated data or pulse connection of `peer`'s session; the descriptor is the
    caller's. PeerGone, as `dial`.
    """
    connection = Connection(dial(worker, address, buffer_bytes))
    try:
        authenticate_to_worker(
            connection,
            worker=worker,
            role=role,
            key=peer.session_key,
            session_id=peer.session_id,
            generation=generation,
            deadline=time.monotonic() + HANDSHAKE_S,
        )
        return connection.detach()
    finally:
        connection.close()
