"""Which connections are encrypted, and with which keys.

A TCP connection beyond this machine carries TLS 1.3 with an external pre-shared key
(csrc/transport/secure), unless `ipc.encryption` is off. The key comes from the shared key, by role
of the connection and name of the worker, so that a connection made for one purpose is of no use
for another. The HMAC handshake (auth.py) follows inside and signs what only the two ends of that
very connection know, so that nobody can sit between two connections.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.errors import ConfigError, ProtocolError, UnsupportedError
from dflash_moe.protocol.messages import Role

if TYPE_CHECKING:
    from dflash_moe.protocol.framing import Connection
    from dflash_moe.topology.addresses import Address

SETTING = "ipc.encryption"
# What a key is for. The host dials in all of the first. A worker that dials a host to register
# itself has the others, so that its connection can never be turned round into one of the first.
LABELS = {Role.CONTROL: "control", Role.PULSE: "pulse", Role.DATA: "data"}
REGISTERED_LABELS = {role: f"registered-{label}" for role, label in LABELS.items()}
_PURPOSE = b"dflash_moe tls 1.3 psk v1"
# An identity says the version of this scheme first. It travels in clear.
_SCHEME = "dflash_moe-1"
# The first byte of a TLS record that opens a connection (RFC 8446, section 5.1). A frame of the
# plain protocol begins with the low byte of its length, and no Open has 22 bytes or 278.
_HANDSHAKE_RECORD = b"\x16"


def identity_of(label: str, worker: str) -> str:
    """Returns what the dialling end asks for: the role of the connection and the worker's name."""
    return f"{_SCHEME} {label} {worker}"


def psk_of(key: bytes, label: str, worker: str) -> bytes:
    """Returns the 32 bytes for the connections of `label` to `worker`: HKDF-SHA256 (RFC 5869) of
    the shared key, without salt, since that is random already.
    """
    return derive(key, _PURPOSE + b"\0" + identity_of(label, worker).encode())


def derive(key: bytes, purpose: bytes) -> bytes:
    """Returns 32 bytes for one purpose: HKDF-SHA256 (RFC 5869) of a random key, without salt, with
    `purpose` as its info.
    """
    extracted = hmac.digest(bytes(hashlib.sha256().digest_size), key, "sha256")
    return hmac.digest(extracted, purpose + b"\x01", "sha256")


def require_library(setting: str, address: Address, *, who: str) -> None:
    """Raises ConfigError where connections of `address` will be encrypted and this machine cannot:
    no libssl, or one of another major version. `who` is named first.
    """
    if not address.host or setting == "off" or (setting == "auto" and address.is_loopback):
        return
    try:
        _core.libssl_version()
    except UnsupportedError as error:
        raise ConfigError(f"{who} at {address}: {error}") from None


@dataclass(frozen=True, slots=True)
class Encryption:
    """One end's setting, and the shared key from which those of its connections come."""

    setting: str
    key: bytes = field(repr=False)

    def _is_due(self, connection: Connection) -> bool:
        return self.setting == "on" or (self.setting == "auto" and not connection.is_local)

    def dial(self, connection: Connection, *, worker: str, role: Role, deadline: float) -> None:
        """Puts a fresh connection of the host under TLS where the setting says so. Unix sockets
        stay as they are.

        Errors: ProtocolError for a worker with another key, name or setting; UnsupportedError
        without libssl; PeerGone, WorkerTimeout.
        """
        if not connection.is_tcp or not self._is_due(connection):
            return
        keys = self._keys([LABELS[role]], worker)
        try:
            connection.encrypt(keys, is_dialling=True, deadline=deadline, waiting_for=f"the TLS handshake of worker {worker}")
        except ProtocolError as error:
            raise ProtocolError(f"worker {worker}: {error}") from None

    def answer(self, connection: Connection, *, worker: str, takes_control: bool, deadline: float) -> None:
        """Does the same for a connection that came to the worker, which must have seen that a first
        byte is there. Where auto does not ask for encryption, the host decides.

        Errors: ProtocolError naming the setting where the host encrypts and this worker does not,
        or the other way round; those of `dial`.
        """
        if not connection.is_tcp:
            return
        if connection.peek() != _HANDSHAKE_RECORD:
            if self._is_due(connection):
                # A close with unread bytes would destroy the refusal on its way.
                connection.receive_payload(deadline=deadline, waiting_for="the opening of a host")
                raise ProtocolError(_differ(worker, "wants encrypted connections here", "does not encrypt", self.setting))
            return
        if self.setting == "off":
            connection.discard()
            raise ProtocolError(_differ(worker, "takes no encrypted connections", "encrypts", self.setting))
        labels = [label for role, label in LABELS.items() if takes_control or role != Role.CONTROL]
        keys = self._keys(labels, worker)
        connection.encrypt(keys, is_dialling=False, deadline=deadline, waiting_for="the TLS handshake of a host")

    def _keys(self, labels: Sequence[str], worker: str) -> list[tuple[str, bytes]]:
        return [(identity_of(label, worker), psk_of(self.key, label, worker)) for label in labels]


def _differ(worker: str, wants: str, does: str, setting: str) -> str:
    return (
        f"{SETTING}: worker {worker} {wants} ({SETTING}: {setting}), and the host {does}; "
        f"set {SETTING} alike at both ends (--encryption)"
    )


def require_role(identity: str, role: Role) -> None:
    """Raises ProtocolError where a connection was encrypted for another role than its opening
    names. `identity` is empty for one that is not encrypted.
    """
    if identity and identity.split(" ")[1] not in (LABELS[role], REGISTERED_LABELS[role]):
        raise ProtocolError(f"role: the connection was encrypted as {identity!r}, its opening says {LABELS[role]}")
