"""Who holds each shard, as the client is told: workers in order of preference, and behind them the
host's own processor where it stands in.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_moe import _core

# The index of a layer and the id of a shard of it.
Where = tuple[int, int]


class HolderLists:
    """The lists of holders that the client has. Whoever changes one does so here, since each change
    names the whole list. Any thread may call; holders are named by `client_index`.
    """

    def __init__(self, client: _core.Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._workers: dict[Where, tuple[int, ...]] = {}
        self._last_resort: dict[Where, int] = {}

    def begin(self, where: Where, workers: Sequence[int]) -> None:
        """Notes the workers of a shard that `Client.define_layer` has just told of the first, and
        tells the client of the others. Errors are those of `Client.set_holders`.
        """
        with self._lock:
            self._workers[where] = tuple(workers)
            if len(workers) > 1:
                self._tell(where)

    def set_workers(self, where: Where, workers: Sequence[int]) -> None:
        """Puts these workers in place of the former ones. Errors are those of
        `Client.set_holders`.
        """
        with self._lock:
            self._workers[where] = tuple(workers)
            self._tell(where)

    def everybody(self) -> dict[Where, tuple[int, ...]]:
        """Returns all who hold each shard, the last resort among them."""
        with self._lock:
            return {where: self._all_of(where) for where in self._workers}

    def set_last_resort(self, where: Where, index: int | None) -> None:
        """Puts the holder that is asked only where no worker can be behind all others, or takes it
        out where `index` is None. Errors are those of `Client.set_holders`.
        """
        with self._lock:
            if index is None:
                self._last_resort.pop(where, None)
            else:
                self._last_resort[where] = index
            self._tell(where)

    def _all_of(self, where: Where) -> tuple[int, ...]:
        last = (self._last_resort[where],) if where in self._last_resort else ()
        return (*self._workers[where], *last)

    def _tell(self, where: Where) -> None:
        layer, shard = where
        self._client.set_holders(layer, shard, [*self._all_of(where)])
