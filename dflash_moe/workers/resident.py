"""The weights that a worker which somebody started by hand keeps between two sessions. A host that
lost its connection, or was started again, borrows them at once instead of loading them anew.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dflash_moe.errors import ConfigError
from dflash_moe.model.expert_store import ExpertStore
from dflash_moe.protocol.devices import DeviceChoice

log = logging.getLogger(__name__)

# A worker keeps weights for this long without a host, unless it was told otherwise. A host that is
# started anew needs seconds; a machine whose host left for good has its memory back soon.
KEEP_S = 300.0
MAX_KEEP_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class StoreKind:
    """What a session asks of a store. Only one of the same kind can serve it."""

    isa: str
    threads: int
    cpus: tuple[int, ...]
    choice: DeviceChoice
    weights_layout: str


class ResidentWeights:
    """Lends one session after the other a store, and keeps it `keep_s` seconds without one; 0 keeps
    nothing. Any thread may call; one session at a time has the store.
    """

    def __init__(self, keep_s: float = 0.0) -> None:
        """Raises ConfigError where `keep_s` is out of range."""
        if not 0.0 <= keep_s <= MAX_KEEP_S:
            raise ConfigError(f"--keep-s {keep_s:g}: weights are kept for 0 to {MAX_KEEP_S:g} seconds")
        self._keep_s = keep_s
        # Guards what follows; the timer's thread takes it too.
        self._lock = threading.Lock()
        self._kept: tuple[StoreKind, ExpertStore] | None = None
        self._timer: threading.Timer | None = None

    def take(self, kind: StoreKind, make: Callable[[], ExpertStore]) -> ExpertStore:
        """Returns the store that was kept if it is of this kind, and otherwise, after that was
        freed, what `make` returns. The caller gives it to `keep` or drops it.
        """
        with self._lock:
            self._stop_timer()
            kept, self._kept = self._kept, None
        if kept is not None and kept[0] == kind:
            return kept[1]
        # Two stores would hold twice the memory, so the former goes before there is another.
        kept = None
        return make()

    def keep(self, kind: StoreKind, store: ExpertStore) -> None:
        """Keeps a store, all of whose loans were given back, for the next session."""
        if not self._keep_s or not store.resident_bytes:
            store.drop_unborrowed()
            return
        with self._lock:
            self._stop_timer()
            self._kept = (kind, store)
            self._timer = threading.Timer(self._keep_s, self.drop)
            self._timer.daemon = True
            try:
                self._timer.start()
            except RuntimeError:  # as many threads as the system allows
                self._timer = self._kept = None
                return
        log.info("%.2f GiB of weights are kept for %g s", store.resident_bytes / (1 << 30), self._keep_s)

    def drop(self) -> None:
        """Frees what is kept."""
        with self._lock:
            self._stop_timer()
            kept, self._kept = self._kept, None
        if kept is not None:
            log.info("%.2f GiB of weights that were kept are freed", kept[1].resident_bytes / (1 << 30))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
