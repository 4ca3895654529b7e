"""The panels that this machine keeps on disk, as one store of experts uses them: mapped where they
are there, written beside calls where they are not, set aside where they are damaged.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.config.cache import CacheSettings
from dflash_moe.errors import ConfigError, DflashError
from dflash_moe.store.folder import PANELS, default_path
from dflash_moe.store.panel_store import PanelStore
from dflash_moe.store.panel_writer import PanelWriter
from dflash_moe.store.stored_experts import MappedPanels, PackedShard, StoredExperts
from dflash_moe.telemetry.machine import num_memory_nodes

if TYPE_CHECKING:
    from dflash_moe.model.checkpoint import Checkpoint

log = logging.getLogger(__name__)

# Where nobody said that panels shall be written, they are where packing took longer than this, and
# where this part of the disk is free.
LONG_PACKING_S = 1.0
FREE_SHARE = 0.2
# The layout of whoever computes from panels or not at all. It is not on the wire.
ONLY_PANELS = "panels"


class PanelsMissing(DflashError):
    """Some experts have no panels, and nobody shall pack them."""


def uses_panels(weights_layout: str, cache: CacheSettings, *, has_slots: bool = False) -> bool:
    """Says whether weights of a layout come from files of panels where those are there. Pages of a
    file have one place, so that where memory has several nodes each worker packs what is its own,
    unless it has slots or somebody has asked for files.
    """
    if not cache.has_panels:
        return False
    if weights_layout in ("stored", ONLY_PANELS):
        return True
    return weights_layout == "auto" and (has_slots or num_memory_nodes() == 1)


def panel_room(cache: CacheSettings) -> int:
    """Returns how many bytes of panels this machine may keep, those that are there included; 0
    where none are kept. Nothing is opened or made for that.
    """
    if not cache.has_panels:
        return 0
    folder = cache.path or default_path()
    existing = next(place for place in (folder, *folder.parents) if place.is_dir())
    try:
        found = os.statvfs(existing)
        panels = folder / PANELS
        held = sum(entry.stat().st_size for entry in os.scandir(panels)) if panels.is_dir() else 0
    except OSError:
        return 0
    spared = 0 if cache.panels == "on" else FREE_SHARE * found.f_blocks * found.f_frsize
    free = found.f_bavail * found.f_frsize
    budget = cache.max_bytes if cache.max_bytes is not None else (free + held) // 2
    return min(max(0, int(free - spared)) + held, budget)


def known_layouts() -> set[tuple[int, int]]:
    """Returns the number of the bytes of panels and the panel width of every kernel set that this
    processor has: other files of panels are for other machines or programs.
    """
    sizes = {"in_size": 64, "intermediate_size": 64, "out_size": 64}
    stores = [_core.ShardStore(isa=isa, num_threads=1) for isa in _core.supported_isas()]
    forms = [store.borrow(sizes, 1, "f32", 1).panel_form for store in stores]
    return {form[:2] for form in forms if form is not None}


class MachinePanels:
    """Any thread may call; `close` ends it. A folder that cannot be used is said once in the log,
    and everything goes on without it, unless somebody has asked for panels.
    """

    def __init__(self, cache: CacheSettings, *, always_writes: bool) -> None:
        """With `always_writes` panels are written wherever they fit."""
        self._cache = cache
        self._always_writes = always_writes or cache.panels == "on"
        # Guards what follows, but for the writer.
        self._lock = threading.Lock()
        self._store: PanelStore | None = None
        self._is_refused = False
        self._checkpoints: dict[str, StoredExperts] = {}
        # By weights fingerprint, and by the place in the shard.
        self._mapped: dict[int, dict[int, MappedPanels]] = {}
        self._packing_s = 0.0
        self._writer = PanelWriter(self._note)

    def map_into(self, shard: PackedShard, checkpoint: Checkpoint, report: Callable[[int], None]) -> set[int]:
        """Maps those experts of a new shard that are there, and returns their places. Raises
        ConfigError where the folder cannot be used and somebody has asked for panels.
        """
        stored = self._of(checkpoint)
        if stored is None:
            return set()
        mapped = stored.map_into(shard, report)
        self._note(shard, mapped)
        return set(mapped)

    def slot_into(
        self, shard: PackedShard, checkpoint: Checkpoint, threads: int, report: Callable[[int], None],
    ) -> bool:  # fmt: skip
        """Says to a shard whose experts are read into slots where they lie, and returns whether all
        have a place. Those that are not there are written, as long as a part of the disk stays
        free. Errors as of `map_into`, and those of packing.
        """
        stored, store = self._of(checkpoint), self._store
        if stored is None or store is None:
            return False
        slotted = stored.slot_into(shard, threads, report, lambda: self._always_writes or self._is_roomy(store))
        self._note(shard, slotted)
        return len(slotted) == len(shard.experts)

    def take_packed(self, shard: PackedShard, checkpoint: Checkpoint, packing_s: float) -> None:
        """Takes over a shard of which some experts were packed, in so many seconds."""
        self._packing_s += packing_s
        stored = self._of(checkpoint)
        if stored is not None and stored.groups(shard):
            self._writer.add(stored, shard)
        else:
            shard.loan.give_back()

    def start_writing(self) -> None:
        """Begins to write what was packed, now that calls may run, where that is worth it."""
        store = self._store
        if store is not None and (self._always_writes or self._is_worth_it(store)) and store.may_write():
            self._writer.start()
        else:
            self._writer.drop()

    def counters(self) -> dict[str, int]:
        """Returns the bytes that this process has mapped and written, and how many shards are still
        to be written.
        """
        with self._lock:
            mapped = [one.file.header.layout.piece_bytes for shard in self._mapped.values() for one in shard.values()]
            written = self._store.written_bytes if self._store is not None else 0
        counted = {"panel_bytes_mapped": sum(mapped), "panel_bytes_written": written}
        return counted | {"panel_shards_left": self._writer.num_left}

    def set_aside(self, weights_fingerprint: int, place: int) -> bool:
        """Takes the file out of which a damaged expert came out of use, and says whether the file
        was at fault: the disk has not what was written. Otherwise memory was, where the page cache
        had it. Those that have mapped a file keep it.
        """
        with self._lock:
            mapped = self._mapped.get(weights_fingerprint, {}).pop(place, None)
        if mapped is None or mapped.file.has_on_disk(mapped.number, _core.checksum):
            return False
        mapped.panels.set_aside(mapped.file)
        return True

    def close(self) -> None:
        """Ends the writer; never raises, and may be called again. What is mapped stays."""
        self._writer.close()
        with self._lock:
            store, self._store, self._is_refused = self._store, None, True
            self._checkpoints.clear()
        if store is not None:
            store.close()

    def _note(self, shard: PackedShard, mapped: dict[int, MappedPanels]) -> None:
        with self._lock:
            self._mapped.setdefault(shard.weights_fingerprint, {}).update(mapped)

    def _is_worth_it(self, store: PanelStore) -> bool:
        return self._packing_s > LONG_PACKING_S and self._is_roomy(store)

    def _is_roomy(self, store: PanelStore) -> bool:
        return store.folder.free_bytes() >= FREE_SHARE * store.folder.total_bytes()

    def _of(self, checkpoint: Checkpoint) -> StoredExperts | None:
        with self._lock:
            if self._is_refused:
                return None
            try:
                if self._store is None:
                    path = self._cache.path or default_path()
                    limit, asked = self._cache.max_bytes, self._always_writes
                    self._store = PanelStore.open(path, max_bytes=limit, allow_network=asked)
                key = str(checkpoint.path)
                if key not in self._checkpoints:
                    self._checkpoints[key] = StoredExperts(self._store, checkpoint)
                return self._checkpoints[key]
            except DflashError as error:
                if self._always_writes and isinstance(error, ConfigError):
                    raise
                self._is_refused = True
                log.warning("panels are neither used nor kept: %s", error)
                return None
