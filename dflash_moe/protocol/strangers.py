"""The connections of a listener that have not proved the key yet. The rules are here how many there
may be, from where, and which has to go when there are more.

Nobody can tell a host or a worker from a stranger before the proof, and strangers cost nothing to
make. So the newest connection always gets its chance, and the one that had its chance longest goes:
who speaks at once is through in milliseconds, whoever else sits there.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ipaddress
import threading
from collections import Counter
from dataclasses import dataclass

from dflash_moe.protocol.framing import Connection

# So many handshakes may be under way. A host needs three at a time, and one that meets a full door
# tries again.
MAX_STRANGERS = 16
# This part of them may come from one address, so that one machine displaces its own connections
# before those of others.
PART_PER_ORIGIN = 2
# One customer of a provider has all addresses below such a prefix, so that they count as one.
IPV6_SITE_BITS = 64


@dataclass(eq=False, slots=True)
class Stranger:
    """A connection before its proof, and what is known about it."""

    connection: Connection
    # `origin_of` says where it comes from.
    origin: str
    has_spoken: bool = False
    # It expects the plain protocol, so that a parting word can be read.
    is_plain: bool = False
    was_displaced: bool = False


class Strangers:
    """The strangers of one listener, oldest first. Any thread may call. Each connection stays owned
    by the thread of its handshake.
    """

    def __init__(self, most: int = MAX_STRANGERS) -> None:
        self._most = most
        self._present: list[Stranger] = []
        self._lock = threading.Lock()

    def admit(self, newcomer: Stranger) -> Stranger | None:
        """Adds `newcomer`. Returns the stranger that it displaces, which counts no longer, or
        None.
        """
        with self._lock:
            displaced = self._displaced_by(newcomer)
            if displaced is not None:
                self._present.remove(displaced)
                displaced.was_displaced = True
            self._present.append(newcomer)
            return displaced

    def leave(self, stranger: Stranger) -> bool:
        """Takes out a stranger whose handshake is over, one way or the other. Returns False where
        it was displaced or has left before.
        """
        with self._lock:
            if stranger not in self._present:
                return False
            self._present.remove(stranger)
            return True

    def _displaced_by(self, newcomer: Stranger) -> Stranger | None:
        counts = Counter(stranger.origin for stranger in self._present)
        if counts[newcomer.origin] >= max(1, self._most // PART_PER_ORIGIN):
            origin = newcomer.origin
        elif len(self._present) >= self._most:
            # max() returns the first of equals, which is the address whose oldest connection is the
            # oldest of all.
            origin = max(counts, key=lambda found: counts[found])
        else:
            return None
        of_origin = [stranger for stranger in self._present if stranger.origin == origin]
        # A connection that has not said a word goes before one that has, because a host's first
        # message comes with its connection.
        return next((stranger for stranger in of_origin if not stranger.has_spoken), of_origin[0])


def origin_of(address: object) -> str:
    """Returns whose a connection is, from what `accept` says of the peer: an IPv4 address, the site
    of an IPv6 address, or an empty text for Unix sockets, whose peers are all of this user.
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
