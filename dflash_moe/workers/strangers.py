"""The connections of a worker's listener that have not proved the key yet: how many there may be,
from where, and who has to go when there are more.

Nobody can tell a host from a stranger before the proof, and strangers cost nothing to make. So the
newest connection always gets its chance, and the one that had its chance longest goes: a host that
speaks at once is through in milliseconds, whoever else sits there.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ipaddress
import threading
from collections import Counter
from dataclasses import dataclass

from dflash_moe.protocol.framing import Connection

MAX_STRANGERS = 16  # handshakes under way; a worker has one host, which needs three at a time
# of those from one address, so that one machine displaces its own connections before others'
MAX_PER_ORIGIN = 8
IPV6_SITE_BITS = 64  # one customer has all addresses below such a prefix


@dataclass(eq=False, slots=True)
class Stranger:
    """A connection before its proof, and what is known about it."""

    connection: Connection
    origin: str  # as `origin_of`
    has_spoken: bool = False
    was_displaced: bool = False


class Strangers:
    """The strangers of one listener, oldest first. Any thread; the connections stay their
    handshakes' own.
    """

    def __init__(self) -> None:
        self._present: list[Stranger] = []
        self._lock = threading.Lock()

    def admit(self, newcomer: Stranger) -> Stranger | None:
        """Adds `newcomer`; returns the one it displaces, which no longer counts from now on."""
        with self._lock:
            displaced = self._displaced_by(newcomer)
            if displaced is not None:
                self._present.remove(displaced)
                displaced.was_displaced = True
            self._present.append(newcomer)
            return displaced

    def leave(self, stranger: Stranger) -> bool:
        """Its handshake is over, one way or the other. False where it was displaced, or has left
        before.
        """
        with self._lock:
            if stranger not in self._present:
                return False
            self._present.remove(stranger)
            return True

    def _displaced_by(self, newcomer: Stranger) -> Stranger | None:
        counts = Counter(stranger.origin for stranger in self._present)
        if counts[newcomer.origin] >= MAX_PER_ORIGIN:
            origin = newcomer.origin
        elif len(self._present) >= MAX_STRANGERS:
            # max() takes the first of equals: the address whose oldest connection is the oldest.
            origin = max(counts, key=lambda found: counts[found])
        else:
            return None
        of_origin = [stranger for stranger in self._present if stranger.origin == origin]
        # Who has not said a word goes before who has: a host's first message comes with its
        # connection.
        return next((stranger for stranger in of_origin if not stranger.has_spoken), of_origin[0])


def origin_of(address: object) -> str:
    """Whose connection it is, from what `accept` says of the peer: an IPv4 address, the site of an
    IPv6 one, and nothing for Unix sockets, whose peers are all this user's.
    """
    if not isinstance(address, tuple):
        return ""
    try:
        found = ipaddress.ip_address(str(address[0]).partition("%")[0])
    except ValueError:
        return str(address[0])
    if found.version == 6:
        mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
        return str(mapped or ipaddress.ip_network((int(found), IPV6_SITE_BITS), strict=False))
    return str(found)
