"""TLS of the connections that a worker dials to register at a host. It is never left out, because
its identity says who calls.

The labels are none of those in encryption.LABELS, so that no connection can be turned round: what a
worker dials is of no use as what a host dials, nor the other way round.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_moe.errors import ProtocolError
from dflash_moe.protocol.client_hello import RECORD_HEADER_BYTES, first_identity, record_bytes
from dflash_moe.protocol.encryption import REGISTERED_LABELS, identity_of, psk_of
from dflash_moe.protocol.keys import FileKey, worker_key
from dflash_moe.topology.spec import is_worker_name

if TYPE_CHECKING:
    from dflash_moe.protocol.framing import Connection
    from dflash_moe.protocol.messages import Role

# Stands behind the name where the key is the worker's own, and not the group's.
_OWN = " own"


@dataclass(frozen=True, slots=True)
class Claim:
    """Who registered a connection, for which role, and which kind of key it has proved."""

    worker: str
    role: Role
    has_own_key: bool


def dial_registered(connection: Connection, key: FileKey, *, worker: str, role: Role, deadline: float) -> None:
    """Puts a fresh connection of `worker` to its host under TLS.

    Errors: ProtocolError for a host with another key; UnsupportedError without libssl; PeerGone,
    WorkerTimeout.
    """
    label = REGISTERED_LABELS[role]
    identity = identity_of(label, worker) + (_OWN if key.worker else "")
    keys = [(identity, psk_of(key.key, label, worker))]
    connection.encrypt(keys, is_dialling=True, deadline=deadline, waiting_for="the TLS handshake of the host")


def answer_registered(connection: Connection, group_key: bytes, *, deadline: float) -> Claim:
    """Does the same at the host, and returns who has proved to know a key of the group.

    Errors: ProtocolError for what is no worker of the group; those of `dial_registered`.
    """
    header = connection.peek_bytes(RECORD_HEADER_BYTES, deadline=deadline, waiting_for="the opening of a worker")
    record = connection.peek_bytes(record_bytes(header), deadline=deadline, waiting_for="the opening of a worker")
    identity = first_identity(record)
    claim = _claim_of(identity)
    key = key_of(claim, group_key)
    keys = [(identity, psk_of(key, REGISTERED_LABELS[claim.role], claim.worker))]
    connection.encrypt(keys, is_dialling=False, deadline=deadline, waiting_for="the TLS handshake of a worker")
    return claim


def key_of(claim: Claim, group_key: bytes) -> bytes:
    """Returns the key from which those of a claim's connections come."""
    return worker_key(group_key, claim.worker) if claim.has_own_key else group_key


def _claim_of(identity: str) -> Claim:
    for role, label in REGISTERED_LABELS.items():
        prefix = identity_of(label, "")
        if identity.startswith(prefix):
            worker = identity.removeprefix(prefix).removesuffix(_OWN)
            if is_worker_name(worker):
                return Claim(worker, role, identity.endswith(_OWN))
    raise ProtocolError("encryption: the opening names no worker that registers; is that a host, or another program?")
