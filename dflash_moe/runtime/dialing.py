"""Connections to workers that listen: the control one of a session, and over TCP its data and pulse connections.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import socket
import time

from dflash_moe.errors import WorkerLost, WorkerTimeout
from dflash_moe.protocol.auth import HANDSHAKE_S, Peer, authenticate_to_worker
from dflash_moe.protocol.framing import Connection, require_same_user
from dflash_moe.protocol.messages import Role
from dflash_moe.topology.addresses import Address

CONNECT_S = 5.0


def dial(worker: str, address: Address) -> socket.socket:
    """A connection to the listener at `address`. WorkerLost, WorkerTimeout, ProtocolError (a Unix socket of another user)."""
    try:
        if address.path:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(CONNECT_S)
            sock.connect(address.path)
            require_same_user(sock)
            return sock
        return socket.create_connection((address.host, address.port), timeout=CONNECT_S)
    except TimeoutError:
        raise WorkerTimeout(f"worker {worker} at {address} did not accept a connection within {CONNECT_S:g} s") from None
    except OSError as error:
        raise WorkerLost(
            f"worker {worker} at {address} cannot be reached: {error.strerror or error}; "
            f"start it there with `dflash-moe worker --name {worker} ...`"
        ) from None


def dial_role(worker: str, address: Address, role: Role, peer: Peer, generation: int) -> int:
    """An authenticated data or pulse connection of `peer`'s session; the descriptor is the caller's. PeerGone, as `dial`."""
    connection = Connection(dial(worker, address))
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
