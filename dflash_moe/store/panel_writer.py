"""Writes what shards have packed to this machine's store, beside calls, and lets the shards change
over to the files.

One thread of the lowest priority, on the processor and at the disk, writes group after group. It
ends with its store of experts; a group that is half written then is removed, or by the next start
where the process was killed.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.config.values import format_bytes
from dflash_moe.errors import DflashError

if TYPE_CHECKING:
    from dflash_moe.store.stored_experts import MappedPanels, PackedShard, StoredExperts

log = logging.getLogger(__name__)

# The thread ends within the time of one expert and an fsync, if it is asked to.
STOP_S = 10.0


class PanelWriter:
    """The shards that are still to be written. Any thread may call; `close` ends it.

    `note` is called by the writer's thread with a shard and the files of those of its experts, by
    their places, that changed over to them.
    """

    def __init__(self, note: Callable[[PackedShard, dict[int, MappedPanels]], None]) -> None:
        self._note = note
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._waiting: list[tuple[StoredExperts, PackedShard]] = []
        self._is_writing = False
        self._thread: threading.Thread | None = None

    def add(self, stored: StoredExperts, shard: PackedShard) -> None:
        """Takes a shard over, which is written once `start` is called."""
        with self._lock:
            self._waiting.append((stored, shard))

    @property
    def num_left(self) -> int:
        """How many shards are still to be written, that which is being written among them."""
        with self._lock:
            return len(self._waiting) + self._is_writing

    def start(self) -> None:
        """Starts to write what was added, unless that is under way."""
        with self._lock:
            is_running = self._thread is not None and self._thread.is_alive()
            if is_running or not self._waiting or self._is_over.is_set():
                return
            self._thread = threading.Thread(target=self._run, name="panels", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # as many threads as the system allows
                self._thread = None
                log.warning("panels are not kept: %s", error)

    def drop(self) -> None:
        """Gives those shards back that nothing has been written of yet."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for _stored, shard in waiting:
            shard.loan.give_back()

    def close(self) -> None:
        """Ends the thread and gives the shards back; never raises, and may be called again."""
        self._is_over.set()
        self.drop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_S)

    def _run(self) -> None:
        _core.take_lowest_priority()
        num_bytes = 0
        while not self._is_over.is_set():
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    break
                stored, shard = self._waiting.pop(0)
                self._is_writing = True
            try:
                num_bytes += self._write(stored, shard)
            except DflashError as error:
                # The next shard may be of another checkpoint, or its group whole all the same.
                log.warning("panels are not kept: %s", error)
            except Exception:
                log.exception("panels are not kept")
            finally:
                shard.loan.give_back()
                with self._lock:
                    self._is_writing = False
        if num_bytes:
            size = format_bytes(num_bytes)
            log.info("%s of packed experts are kept on disk; DFLASH_MOE_CACHE_PANELS=off keeps none", size)

    def _write(self, stored: StoredExperts, shard: PackedShard) -> int:
        num_bytes = 0
        for group in stored.groups(shard):
            if self._is_over.is_set():
                break
            mapped = stored.write_group(shard, group, self._is_over.is_set)
            if mapped:
                self._note(shard, mapped)
                num_bytes += group.count * group.stride_bytes
        return num_bytes
