"""Mutual authentication of every connection: each end proves the shared key by HMAC-SHA256 over the
transcript of both opening messages.

The transcript holds versions, role, session id, generation and both nonces. So a proof cannot be
replayed, nor used for another role, session or generation, nor reflected, since each side signs
under its own label. On an encrypted connection it also holds what only the two ends of that very
connection know (RFC 9266) and the name that the host dialled, so that nobody between two
connections can pass proofs on. The key itself never travels. Both ends derive the session key,
which data and pulse connections prove, from the transcript of the control connection.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from dflash_moe.errors import ProtocolError
from dflash_moe.protocol.encryption import require_role
from dflash_moe.protocol.failures import to_error
from dflash_moe.protocol.framing import Connection
from dflash_moe.protocol.messages import (
    CODEC,
    NONCE_BYTES,
    PROTOCOL_MINOR,
    PROTOCOL_VERSION,
    Accepted,
    Challenge,
    Open,
    Proof,
    Refusal,
    Role,
)

# A handshake must be over after this time, so that a stranger holds its place no longer.
HANDSHAKE_S = 5.0
KEY_BYTES = 32
# Unix sockets without a key file use this key. SO_PEERCRED proves who is there, and the MACs only
# bind the versions and the session.
PEER_CREDENTIAL_KEY = bytes(KEY_BYTES)
_LABEL_HOST = b"dflash_moe host proof v1"
_LABEL_WORKER = b"dflash_moe worker proof v1"
_LABEL_SESSION = b"dflash_moe session key v1"


@dataclass(frozen=True, slots=True)
class Peer:
    """What the handshake of a connection has established, the same at both ends but for
    `protocol_minor`.
    """

    role: Role
    session_id: bytes
    generation: int
    protocol: int
    session_key: bytes
    # The other end announced this minor version, which tells the fields it understands.
    protocol_minor: int = 0


def _mac(key: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, label + transcript, "sha256")


def authenticate_to_worker(
    connection: Connection,
    *,
    worker: str,
    role: Role,
    key: bytes,
    session_id: bytes,
    generation: int,
    deadline: float,
    protocol_range: tuple[int, int] = (PROTOCOL_VERSION, PROTOCOL_VERSION),
) -> Peer:
    """Makes the host's half of the handshake, until `deadline` of the monotonic clock. The
    connection stays the caller's, also after an error.

    Errors: ProtocolError (version, wrong key), PeerGone, WorkerTimeout, or the worker's refusal as
    the error that it names.
    """
    opening = Open(
        protocol_min=protocol_range[0],
        protocol_max=protocol_range[1],
        protocol_minor=PROTOCOL_MINOR,
        role=int(role),
        session_id=session_id,
        generation=generation,
        nonce=secrets.token_bytes(NONCE_BYTES),
    )
    sent = CODEC.encode(opening)
    connection.send_payload(sent, deadline=deadline)
    received = connection.receive_payload(deadline=deadline, waiting_for=f"the handshake of worker {worker}")
    challenge = CODEC.decode(received)
    if isinstance(challenge, Refusal):
        raise to_error(challenge, worker=worker)
    if not isinstance(challenge, Challenge):
        raise ProtocolError(f"worker {worker}: expected Challenge, found {type(challenge).__name__}")
    if not protocol_range[0] <= challenge.protocol <= protocol_range[1]:
        raise ProtocolError(
            f"worker {worker}: protocol version: found {challenge.protocol}, allowed {protocol_range[0]}..{protocol_range[1]}"
        )
    transcript = hashlib.sha256(sent).digest() + hashlib.sha256(received).digest() + connection.binding
    proof = _mac(key, _LABEL_HOST, transcript)
    connection.send(Proof(mac=proof), deadline=deadline)
    answer = connection.receive(deadline=deadline, waiting_for=f"the proof of worker {worker}")
    if isinstance(answer, Refusal):
        raise to_error(answer, worker=worker)
    if not isinstance(answer, Accepted):
        raise ProtocolError(f"worker {worker}: expected Accepted, found {type(answer).__name__}")
    if not hmac.compare_digest(answer.mac, _mac(key, _LABEL_WORKER, transcript + proof)):
        raise ProtocolError(f"worker {worker}: key: the peer does not know the shared key; check the key file on both ends")
    connection.ignore_unknown = challenge.protocol_minor > PROTOCOL_MINOR
    session_key = _mac(key, _LABEL_SESSION, transcript)
    return Peer(role, session_id, generation, challenge.protocol, session_key, challenge.protocol_minor)


def authenticate_host(
    connection: Connection,
    *,
    key_for: Callable[[Open], bytes],
    deadline: float | None,
    protocol_range: tuple[int, int] = (PROTOCOL_VERSION, PROTOCOL_VERSION),
    worker: str = "",
) -> Peer:
    """Makes the worker's half of the handshake. `key_for` returns the key for an opening, or raises
    ProtocolError for a role or session that is not expected here. A `deadline` of None waits for
    the opening as long as the host lives, and gives what follows HANDSHAKE_S: a host at which
    `worker` registered speaks once it takes it, or refuses it in words.

    Errors: ProtocolError, PeerGone, WorkerTimeout, or the host's refusal as the error that it
    names. The caller sends the host a refusal made of a ProtocolError.
    """
    received = connection.receive_payload(deadline=deadline, waiting_for="the opening of a host")
    deadline = time.monotonic() + HANDSHAKE_S if deadline is None else deadline
    opening = CODEC.decode(received, ignore_unknown=True)
    if isinstance(opening, Refusal) and worker:
        raise to_error(opening, worker=worker)
    if not isinstance(opening, Open):
        raise ProtocolError(f"expected Open, found {type(opening).__name__}")
    version = min(protocol_range[1], opening.protocol_max)
    if version < max(protocol_range[0], opening.protocol_min):
        raise ProtocolError(
            f"protocol version: the host speaks {opening.protocol_min}..{opening.protocol_max}, "
            f"this worker speaks {protocol_range[0]}..{protocol_range[1]}; install the same dflash_moe on both ends"
        )
    if opening.role not in {int(role) for role in Role}:
        raise ProtocolError(f"role: found {opening.role}, known are {[int(role) for role in Role]}")
    require_role(connection.identity, Role(opening.role))
    key = key_for(opening)
    challenge = Challenge(protocol=version, protocol_minor=PROTOCOL_MINOR, nonce=secrets.token_bytes(NONCE_BYTES))
    sent = CODEC.encode(challenge)
    connection.send_payload(sent, deadline=deadline)
    answer = connection.receive(deadline=deadline, waiting_for="the proof of a host")
    if not isinstance(answer, Proof):
        raise ProtocolError(f"expected Proof, found {type(answer).__name__}")
    transcript = hashlib.sha256(received).digest() + hashlib.sha256(sent).digest() + connection.binding
    if not hmac.compare_digest(answer.mac, _mac(key, _LABEL_HOST, transcript)):
        raise ProtocolError("key: the host's proof does not match this worker's key; check the key file on both ends")
    connection.send(Accepted(mac=_mac(key, _LABEL_WORKER, transcript + answer.mac)), deadline=deadline)
    connection.ignore_unknown = opening.protocol_minor > PROTOCOL_MINOR
    session_key = _mac(key, _LABEL_SESSION, transcript)
    return Peer(Role(opening.role), opening.session_id, opening.generation, version, session_key, opening.protocol_minor)
