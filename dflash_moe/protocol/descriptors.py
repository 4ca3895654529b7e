"""Open descriptors on their way from one owner to the next.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from types import TracebackType


class Descriptors:
    """Descriptors that somebody will take over; at the end of the `with` block those that nobody
    took are closed.
    """

    def __init__(self) -> None:
        self._held: list[int] = []

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, descriptors: Iterable[int]) -> None:
        """Takes ownership of `descriptors`, behind those it has."""
        self._held.extend(descriptors)

    def socket_pair(self) -> tuple[int, int]:
        """Both ends of a new Unix socket pair, held here. OSError."""
        ends = tuple(end.detach() for end in socket.socketpair())
        self.hold(ends)
        return ends[0], ends[1]

    def take(self, descriptor: int) -> int:
        """Gives one away."""
        self._held.remove(descriptor)
        return descriptor

    def take_first(self) -> int:
        """Gives the first one away; IndexError where there is none."""
        return self._held.pop(0)

    def take_last(self) -> int:
        """Gives the last one away; IndexError where there is none."""
        return self._held.pop()

    def take_all(self) -> list[int]:
        """Gives all away, in their order."""
        taken, self._held = self._held, []
        return taken

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for descriptor in self.take_all():
            os.close(descriptor)
