"""The one store of a worker, as its sessions share it: each shard is loaded once for all hosts that
ask for it. What no session borrows any more is kept for a while, so that a host that lost its
connection, or was started again, borrows it at once instead of loading it anew.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from dflash_moe import _core
from dflash_moe.errors import ConfigError
from dflash_moe.protocol.devices import DeviceChoice
from dflash_moe.store.expert_store import ExpertStore
from dflash_moe.store.scrub import WeightScrub

log = logging.getLogger(__name__)

# A worker keeps weights for this long after their last host, unless it was told otherwise. A host
# that is started anew needs seconds; a machine whose host left for good has its memory back soon.
KEEP_S = 300.0
MAX_KEEP_S = 7 * 86400.0
# What of a session's counters is told of all sessions together too.
_TOTALS = ("calls", "rows", "pairs", "compute_ns")


@dataclass(frozen=True, slots=True)
class StoreKind:
    """What decides how a worker computes, for all its sessions alike. As a session asks for it, an
    empty `isa`, no `threads` and no `cpus` leave that to the worker.
    """

    isa: str
    threads: int
    cpus: tuple[int, ...]
    choice: DeviceChoice
    weights_layout: str
    slots_bytes: int = 0

    def settled(self) -> StoreKind:
        """Returns it with what was left to the worker: its best kernel set and one thread."""
        return StoreKind(
            _core.parse_isa(self.isa or _core.best_isa()), max(1, self.threads), self.cpus, self.choice, self.weights_layout,
            self.slots_bytes,
        )  # fmt: skip


@dataclass(slots=True)
class SharedStore:
    """A store of shards with what belongs to it, as all sessions of a worker use it at once."""

    kind: StoreKind
    # None where the processor computes.
    device: _core.BackendDevice | None
    store: ExpertStore
    scrub: WeightScrub
    # Its sessions, by their C++ workers, with the period of the scrub that each has asked for.
    sessions: list[tuple[_core.Worker, float]] = field(default_factory=list)
    # What sessions have done that have ended.
    former: Counter[str] = field(default_factory=Counter)

    def close(self) -> None:
        """Frees all that nobody borrows; never raises."""
        self.scrub.close()
        self.store.close()


class ResidentWeights:
    """Lends all sessions of a worker one store, and keeps shards `keep_s` seconds after their last
    session; 0 keeps nothing. Any thread may call.
    """

    def __init__(self, keep_s: float = 0.0) -> None:
        """Raises ConfigError where `keep_s` is out of range."""
        if not 0.0 <= keep_s <= MAX_KEEP_S:
            raise ConfigError(f"--keep-s {keep_s:g}: weights are kept for 0 to {MAX_KEEP_S:g} seconds")
        self._keep_s = keep_s
        # Guards what follows; the timer's thread takes it too. It is held while a store is made, so
        # that there are never two.
        self._lock = threading.Lock()
        self._shared: SharedStore | None = None
        self._timer: threading.Timer | None = None

    def join(
        self, asked: StoreKind, worker: _core.Worker, scrub_s: float, *, name: str, make: Callable[[StoreKind], SharedStore]
    ) -> SharedStore:
        """Returns the store that other sessions use, or that was kept, or, after that was freed
        because it is of another kind, what `make` returns. The session of `worker` gives all its
        loans back and calls `leave`. Its weights are summed up again every `scrub_s` seconds, or
        more often where another session has asked for that.

        Raises ConfigError naming worker, field and both values where others use a store of another
        kind, and the errors of `make`.
        """
        with self._lock:
            shared = self._shared
            if shared is not None and shared.sessions:
                _require_alike(asked, shared.kind, name)
            elif shared is None or shared.kind != asked.settled():
                # Two stores would hold twice the memory, so the former goes before there is
                # another.
                shared = None
                self._close()
                shared = make(asked.settled())
                shared.scrub.start()
                self._shared = shared
            shared.sessions.append((worker, scrub_s))
            self._pace_scrub(shared)
            return shared

    def leave(self, worker: _core.Worker) -> None:
        """Ends the use of a session, which has given all its loans back."""
        with self._lock:
            shared = self._shared
            if shared is None:
                return
            shared.sessions = [one for one in shared.sessions if one[0] is not worker]
            shared.former.update(_totals_of(worker))
            self._pace_scrub(shared)
            if self._keep_s:
                self._drop_old()
            else:
                shared.store.drop_unborrowed()
            if not shared.sessions and not shared.store.resident_bytes:
                self._close()
                return
            if not shared.sessions:
                log.info("%.2f GiB of weights are kept for %g s", shared.store.resident_bytes / (1 << 30), self._keep_s)

    def counters(self) -> dict[str, int]:
        """Returns how many sessions there are, and what all that used this store have done."""
        with self._lock:
            shared = self._shared
            if shared is None:
                return {}
            done = Counter(shared.former)
            for worker, _ in shared.sessions:
                done.update(_totals_of(worker))
            return {"sessions": len(shared.sessions), **{f"total_{name}": done[name] for name in _TOTALS}}

    def drop(self) -> None:
        """Frees what is kept."""
        with self._lock:
            if self._shared is not None and not self._shared.sessions:
                self._close()

    def _close(self) -> None:
        """Frees the store, which nobody uses. The caller holds the lock, as for those below."""
        self._stop_timer()
        shared, self._shared = self._shared, None
        if shared is not None:
            if shared.store.resident_bytes:
                log.info("%.2f GiB of weights that were kept are freed", shared.store.resident_bytes / (1 << 30))
            shared.close()

    @staticmethod
    def _pace_scrub(shared: SharedStore) -> None:
        shared.scrub.set_period(min((period for _, period in shared.sessions if period > 0), default=0.0))

    def _drop_old(self) -> None:
        """Frees shards whose time is over, and comes again when that of the next one is."""
        self._stop_timer()
        if self._shared is None:
            return
        left_s = self._shared.store.drop_unborrowed(self._keep_s)
        if not left_s:
            return
        self._timer = threading.Timer(left_s, self._expire)
        self._timer.daemon = True
        try:
            self._timer.start()
        except RuntimeError:  # as many threads as the system allows
            self._timer = None
            self._shared.store.drop_unborrowed()

    def _expire(self) -> None:
        with self._lock:
            shared = self._shared
            if shared is None:
                return
            before = shared.store.resident_bytes
            self._drop_old()
            freed = before - shared.store.resident_bytes
            if freed > 0:
                log.info("%.2f GiB of weights that were kept are freed", freed / (1 << 30))
            if not shared.sessions and not shared.store.resident_bytes:
                self._close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _totals_of(worker: _core.Worker) -> dict[str, int]:
    stats = worker.stats()
    return {name: stats[name] for name in _TOTALS}


def _require_alike(asked: StoreKind, has: StoreKind, name: str) -> None:
    """Raises ConfigError where a session asks for another kind than others use."""
    for one in fields(StoreKind):
        wanted, found = getattr(asked, one.name), getattr(has, one.name)
        if wanted == found or (one.name in ("isa", "threads", "cpus") and not wanted):
            continue
        if isinstance(wanted, DeviceChoice):
            wanted, found = wanted.name, found.name
        raise settings_differ(name, "device" if one.name == "choice" else one.name, wanted, found)


def settings_differ(name: str, setting: str, asked: object, has: object) -> ConfigError:
    """Makes the error of a host that needs a worker to compute in another way than it does."""
    return ConfigError(
        f"worker {name}: {setting}: this host asks for {asked}, the worker has {has}, which is its own setting or "
        "that of the hosts it serves; ask for the same, or start another worker"
    )
