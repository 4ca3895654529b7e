"""Reads off the opening of a TLS connection which pre-shared key its dialler means, before libssl
takes it. A host at which workers register has a key for each name, and learns here which is meant.

The opening is a stranger's. What is not in the form that libssl writes is refused; what is, libssl
reads again by its own rules.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dflash_moe.errors import ProtocolError

# A record's header has its kind, version and length (RFC 8446, section 5.1).
RECORD_HEADER_BYTES = 5
# libssl writes less than 2 KiB, with the largest key exchange that it knows.
MAX_HELLO_BYTES = 4096
_HANDSHAKE, _CLIENT_HELLO, _PRE_SHARED_KEY = 22, 1, 41
_VERSION_AND_RANDOM_BYTES = 34


def record_bytes(header: bytes) -> int:
    """Returns the bytes of the first record, its header included. Raises ProtocolError for what
    opens no TLS connection.
    """
    if len(header) < RECORD_HEADER_BYTES or header[0] != _HANDSHAKE:
        raise ProtocolError("encryption: the connection does not begin with TLS, which a worker that registers speaks")
    num_bytes = RECORD_HEADER_BYTES + int.from_bytes(header[3:5], "big")
    if num_bytes > MAX_HELLO_BYTES:
        raise ProtocolError(f"encryption: an opening of {num_bytes} bytes; allowed are {MAX_HELLO_BYTES}")
    return num_bytes


def first_identity(record: bytes) -> str:
    """Returns the first identity that a whole record with a ClientHello offers. Raises
    ProtocolError where there is none.
    """
    hello = _Reader(record[RECORD_HEADER_BYTES:])
    if hello.number(1) != _CLIENT_HELLO:
        raise ProtocolError("encryption: the opening is no ClientHello")
    hello = _Reader(hello.vector(3))
    hello.take(_VERSION_AND_RANDOM_BYTES)
    for length_bytes in (1, 2, 1):  # session id, cipher suites, compression
        hello.vector(length_bytes)
    extensions = _Reader(hello.vector(2))
    while extensions:
        kind, content = extensions.number(2), extensions.vector(2)
        if kind == _PRE_SHARED_KEY:
            identity = _Reader(_Reader(content).vector(2)).vector(2)
            return identity.decode("ascii", "replace")
    raise ProtocolError("encryption: the opening offers no pre-shared key, which a worker that registers does")


class _Reader:
    """Takes fields off the front of bytes; ProtocolError where they end too early."""

    def __init__(self, content: bytes) -> None:
        self._rest = content

    def __bool__(self) -> bool:
        return bool(self._rest)

    def take(self, count: int) -> bytes:
        if count > len(self._rest):
            raise ProtocolError("encryption: the opening ends within a field")
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "big")

    def vector(self, length_bytes: int) -> bytes:
        """Takes bytes with their length before them."""
        return self.take(self.number(length_bytes))
