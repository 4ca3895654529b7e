"""Holds open descriptors on their way from one owner to the next, so that an error in between leaks
none.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from types import TracebackType


class Descriptors:
    """Owns descriptors that somebody will take over. At the end of the `with` block it closes those
    that nobody took. One thread uses it.
    """

    def __init__(self) -> None:
        self._held: list[int] = []

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, descriptors: Iterable[int]) -> None:
        """Takes ownership of `descriptors`, which follow those it has."""
        self._held.extend(descriptors)

    def socket_pair(self) -> tuple[int, int]:
        """Makes a Unix socket pair, holds both ends and returns them. Raises OSError."""
        ends = tuple(end.detach() for end in socket.socketpair())
        self.hold(ends)
        return ends[0], ends[1]

    def take(self, descriptor: int) -> int:
        """Gives `descriptor`, one of those it holds, to the caller."""
        self._held.remove(descriptor)
        return descriptor

    def take_first(self) -> int:
        """Gives the first one to the caller. Raises IndexError where there is none."""
        return self._held.pop(0)

    def take_last(self) -> int:
        """Gives the last one to the caller. Raises IndexError where there is none."""
        return self._held.pop()

    def take_all(self) -> list[int]:
        """Gives all to the caller, in their order."""
        taken, self._held = self._held, []
        return taken

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for descriptor in self.take_all():
            os.close(descriptor)
