"""The shards that this process has resident. Users borrow a shard by all that decides its numbers.
A new one is filled from the checkpoint. One that all users have given back stays until its room is
needed or somebody drops it.

A worker process has a store for all sessions that it serves, and every worker inside the host
process has one. What this machine keeps on disk is mapped instead of packed (machine_panels.py).
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.config.cache import CacheSettings
from dflash_moe.errors import DflashError, WorkerTimeout
from dflash_moe.store.expert_loading import STANDSTILL_S, is_as_packed, load_experts
from dflash_moe.store.machine_panels import ONLY_PANELS, MachinePanels, PanelsMissing, uses_panels
from dflash_moe.store.stored_experts import PackedShard
from dflash_moe.telemetry.affinity import running_on

if TYPE_CHECKING:
    from dflash_moe.model.checkpoint import Checkpoint
    from dflash_moe.model.ffn import FfnSpec

log = logging.getLogger(__name__)

# Who waits for another's loading looks so often how far that is, and whether it is still wanted.
LOOK_S = 0.05
# The numbers of shards that are mapped because their panels are not kept begin here, so that they
# are none of the others'.
_FIRST_MAPPED = 1 << 63
# Layouts whose experts are packed, wherever the panels come from. The core knows `packed` and
# `mapped`.
_PACKED = {"packed", "auto", "stored", ONLY_PANELS}


class ExpertStore:
    """Shards on the processor or on one device. Any thread may call. One shard is loaded at a time,
    in the order in which they were asked for, because a loading takes all threads of the store.
    """

    def __init__(
        self,
        *,
        isa: str,
        threads: int,
        cpus: tuple[int, ...] = (),
        device: _core.BackendDevice | None = None,
        weights_layout: str = "packed",
        memory_limit: int = 0,
        pool: _core.HostPool | None = None,
        cache: CacheSettings | None = None,
        slots_bytes: int = 0,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Weights are computed with on `device`, or where that is None on the processor by kernel
        set `isa`. Its threads, which also load, are pinned to `cpus` where there are any; where
        `pool` is given, its threads compute. `memory_limit` bounds the bytes of weights; 0 sets no
        limit. With the layouts `auto` and `stored` weights are packed, or mapped from panels that
        `cache` allows; with ONLY_PANELS they are mapped, or `load` raises PanelsMissing. Where
        `slots_bytes` is above 0, they are read from panels into so much memory as calls need them;
        a shard without panels is mapped from the checkpoint. `free_bytes` says how many bytes of
        the memory that weights lie in are free; None has the memory limit alone bound them.
        """
        self._free_bytes = free_bytes
        # Guards the two below: those who load or wait to, the first one of whom does, and how many
        # experts all of them have loaded.
        self._loading = threading.Condition()
        self._loaders: deque[object] = deque()
        self._num_loaded = 0
        self._has_slots = slots_bytes > 0
        self._store = _core.ShardStore(
            isa=isa,
            num_threads=threads,
            cpus=cpus,
            device=device,
            weights_layout="packed" if weights_layout in _PACKED else weights_layout,
            memory_limit=0 if self._has_slots else memory_limit,
            pool=pool,
            slots_bytes=slots_bytes,
        )
        # For shards whose panels cannot be kept; made where there is one.
        self._mapped: _core.ShardStore | None = None
        self._make_mapped = partial(
            _core.ShardStore, isa=isa, num_threads=threads, cpus=cpus, weights_layout="mapped", pool=pool,
            first_number=_FIRST_MAPPED,
        )  # fmt: skip
        self._isa = isa
        self._threads = threads
        self._cpus = cpus
        self._packs = weights_layout != ONLY_PANELS
        self._panels: MachinePanels | None = None
        if cache is not None and device is None and uses_panels(weights_layout, cache, has_slots=self._has_slots):
            self._panels = MachinePanels(cache, always_writes=weights_layout == "stored")

    def load(
        self,
        checkpoint: Checkpoint,
        ffn: FfnSpec,
        experts: Sequence[int],
        *,
        name: str,
        weight_dtype: str,
        weights_fingerprint: int,
        numerics: str,
        report: Callable[[int], None] = lambda _count: None,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> _core.ResidentShard:
        """Lends the loaded shard of `experts` (ascending ids). `name` is what errors call it, and
        `report` is called with the number of its experts loaded so far, which stays 0 while others
        load before; `is_given_up` ends that wait.

        Errors: ConfigError where there is no room for it, CheckpointError naming tensor and file,
        UnsupportedError naming format or class, WorkerTimeout where those before do not get on.
        """

        def count(number: int) -> None:
            with self._loading:
                self._num_loaded += 1
            report(number)

        with self._turn_to_load(name, report, is_given_up):
            return self._load(checkpoint, ffn, experts, name, weight_dtype, weights_fingerprint, numerics, count)

    @contextmanager
    def _turn_to_load(self, name: str, report: Callable[[int], None], is_given_up: Callable[[], bool]) -> Iterator[None]:
        """Waits until those who came before have loaded, reporting as they get on. Raises
        WorkerTimeout.
        """
        me = object()
        with self._loading:
            self._loaders.append(me)
            seen, until = self._num_loaded, time.monotonic() + STANDSTILL_S
        try:
            while True:
                with self._loading:
                    if self._loaders[0] is not me:
                        self._loading.wait(LOOK_S)
                    if self._loaders[0] is me:
                        break
                    found = self._num_loaded
                if found != seen:
                    seen, until = found, time.monotonic() + STANDSTILL_S
                    report(0)
                if is_given_up():
                    raise WorkerTimeout(f"{name}: nobody waits for it any more")
                if time.monotonic() > until:
                    raise WorkerTimeout(f"{name}: what another host loads before it does not get on for {STANDSTILL_S:.0f} s")
            yield
        finally:
            with self._loading:
                self._loaders.remove(me)
                self._loading.notify_all()

    def _load(
        self, checkpoint: Checkpoint, ffn: FfnSpec, experts: Sequence[int], name: str, weight_dtype: str,
        weights_fingerprint: int, numerics: str, report: Callable[[int], None],
    ) -> _core.ResidentShard:  # fmt: skip
        def borrow(store: _core.ShardStore) -> _core.ResidentShard:
            free_bytes = self._free_bytes() if self._free_bytes is not None else None
            try:
                return store.borrow(ffn.kernel_spec(), len(experts), weight_dtype, weights_fingerprint, numerics, free_bytes)
            except DflashError as error:
                raise error.reworded(f"{name}: {error}") from None

        loan = borrow(self._store)
        try:
            # What a former session left is summed up before anybody computes from it again. That
            # session may have ended because its host saw wrong numbers, which this worker is not
            # told: nothing but the sum tells such an end from a lost connection. It costs one
            # reading of the memory by all threads, a fraction of what loading costs. A shard in use
            # is left to the scrub of its store: its users shall not notice who else borrows it.
            is_kept = loan.is_complete and not loan.is_shared
            if is_kept and not is_as_packed(loan, len(experts), threads=self._threads):
                log.error("%s: weights that were kept have changed in memory; they are loaded anew", name)
                # The store lends none that came back damaged. What else is kept is dropped: where
                # one bit of this memory is wrong, others may be.
                loan.give_back()
                self.drop_unborrowed()
                loan = borrow(self._store)
            if not loan.is_complete:
                shard = PackedShard(loan, self._isa, ffn, tuple(experts), weight_dtype, weights_fingerprint, numerics)
                if not self._has_slots:
                    self._fill(shard, checkpoint, report, lambda: borrow(self._store))
                elif self._panels is None or not self._panels.slot_into(shard, checkpoint, self._threads, report):
                    loan.give_back()
                    loan = self._map(borrow, shard, checkpoint, report)
                # Calls are computed with the packed copy, so that the pages of the file may go.
                checkpoint.drop_pages()
        except BaseException:
            loan.give_back()
            self._store.drop_failed()
            if self._mapped is not None:
                self._mapped.drop_failed()
            raise
        return loan

    def _map(
        self, borrow: Callable[[_core.ShardStore], _core.ResidentShard], shard: PackedShard, checkpoint: Checkpoint,
        report: Callable[[int], None],
    ) -> _core.ResidentShard:  # fmt: skip
        """Returns the shard as it is computed from the mapped checkpoint."""
        why = "because their panels are not kept"
        log.warning("%d experts are computed from the mapped checkpoint, %s", len(shard.experts), why)
        if self._mapped is None:
            self._mapped = self._make_mapped()
        loan = borrow(self._mapped)
        load_experts(loan, checkpoint, shard.ffn, shard.experts, threads=self._threads, report=report)
        return loan

    def _fill(
        self, shard: PackedShard, checkpoint: Checkpoint, report: Callable[[int], None],
        borrow: Callable[[], _core.ResidentShard],
    ) -> None:  # fmt: skip
        """Maps the experts of a new shard that are on disk, and packs the others."""
        mapped = self._panels.map_into(shard, checkpoint, report) if self._panels is not None else set()
        left = [place for place in range(len(shard.experts)) if place not in mapped]
        if not left:
            return
        if not self._packs:
            raise PanelsMissing(f"{len(left)} of {len(shard.experts)} experts have no panels on this machine")
        begun = time.monotonic()
        # Memory is local to the node of the core that touches it first.
        with running_on(self._cpus):
            load_experts(
                shard.loan, checkpoint, shard.ffn, shard.experts, threads=self._threads, places=left,
                report=lambda count: report(len(mapped) + count),
            )  # fmt: skip
        if self._panels is not None:
            self._panels.take_packed(replace(shard, loan=borrow()), checkpoint, time.monotonic() - begun)

    @property
    def uses_panels(self) -> bool:
        """Whether weights may come from files, in which somebody may damage them under use."""
        return self._panels is not None

    def panel_counters(self) -> dict[str, int]:
        """Returns what of the weights comes from files and goes there, empty where nothing does."""
        return self._panels.counters() if self._panels is not None else {}

    def begin_service(self) -> None:
        """Says that all is loaded and calls may come: what was packed is written to disk beside
        them.
        """
        if self._panels is not None:
            self._panels.start_writing()

    def slot_counters(self) -> dict[str, int]:
        """Returns what slots have done (`_core.ShardStore.slots`), as counters of a worker."""
        return {f"slot_{name}": value for name, value in self._store.slots().items()}

    def batch_counters(self) -> dict[str, int]:
        """Returns what all sessions have computed (`_core.ShardStore.batches`), as counters of a
        worker.
        """
        return {f"total_{name}": value for name, value in self._store.batches().items()}

    def set_panels_aside(self, weights_fingerprint: int, local_expert_id: int) -> bool:
        """Takes the file of an expert that was found damaged out of use, and says whether the file
        was at fault; False for an expert in memory.
        """
        return self._panels is not None and self._panels.set_aside(weights_fingerprint, local_expert_id)

    def close(self) -> None:
        """Ends what writes to disk, and frees the shards that nobody borrows any more; never
        raises.
        """
        if self._panels is not None:
            self._panels.close()
        self.drop_unborrowed()

    @property
    def resident_bytes(self) -> int:
        """The bytes of all loaded weights."""
        return self._store.resident_bytes()

    def scrubber(self, period_s: float) -> _core.Scrubber:
        """Returns what sums up the weights of this store again, all of them in `period_s`."""
        return _core.Scrubber(self._store, period_s=period_s)

    def drop_unborrowed(self, kept_s: float = 0.0) -> float:
        """Frees the shards that nobody has borrowed for `kept_s` seconds, and returns in how many
        the next one will have been, 0 where there is none.
        """
        stores = [self._store] if self._mapped is None else [self._store, self._mapped]
        return min(filter(None, [store.drop_unborrowed(kept_s) for store in stores]), default=0.0)
