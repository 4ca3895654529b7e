"""A worker inside the host process, reached over loopback. It serves the experts kept at the host,
and workers with `address: loopback`.

It has the C++ worker, the kernels and the rounding on the wire of a worker process; only the
process is missing. On the processor it has no thread either: the thread that waits for a reply
computes it, with the pool of threads that the host's operators use too.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from dflash_moe import _core
from dflash_moe.config.cache import NO_CACHE, CacheSettings
from dflash_moe.errors import DflashError, WorkerError, WorkerLost
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.ffn import FfnSpec
from dflash_moe.protocol.devices import DeviceChoice, open_device
from dflash_moe.protocol.identity import choose_numerics
from dflash_moe.store.expert_store import ExpertStore
from dflash_moe.store.scrub import HeldWeights, WeightScrub
from dflash_moe.telemetry.affinity import check_cpus, pin_to_first

log = logging.getLogger(__name__)

# A worker that is stopped first ends the call under way, which takes less than this.
STOP_S = 30.0


class LocalWorker:
    """Owns the weights of an in-process worker, and where it computes on a device its one serving
    thread. All of it computes without the GIL. `close()` ends both.
    """

    def __init__(
        self, name: str, *, isa: str, threads: int, spin_ns: int, slowdown: float, numerics: str, cpus: tuple[int, ...] = (),
        device: DeviceChoice | None = None, weights_layout: str = "packed", pool: _core.HostPool | None = None,
        scrub_s: float = 0.0, on_change: Callable[[int, int, str], None] = lambda _layer, _shard, _failure: None,
        cache: CacheSettings = NO_CACHE, slots_bytes: int = 0,
    ) -> None:  # fmt: skip
        """The worker computes on `device`, or where that is None on the processor with the kernel
        set `isa`. `cpus` are the CPUs that its threads are pinned to, one each, none if empty. With
        a `pool` its threads compute, on the call of whoever waits for a reply. Its weights are
        summed up again every `scrub_s` seconds, never where that is 0. `on_change` is told of
        those that changed in memory: layer, shard, and why they could not be loaded again, empty
        where they were. `cache` says what may be kept on disk. With the layout slots it keeps
        experts in `slots_bytes` of memory.

        Raises UnsupportedError where the device or kernel set does not compute `numerics` or cannot
        be used, and ConfigError where the device or one of `cpus` is missing.
        """
        opened = open_device(device or DeviceChoice(), threads=threads, name=name)
        self.numerics, self.offered = choose_numerics(numerics, isa, name=name, device=opened)
        check_cpus(cpus, name=name)
        self.name = name
        # A worker on a card reports the architecture of the card as its kernel set.
        self.isa = isa if opened is None else opened.arch
        self.has_own_memory = (device or DeviceChoice()).has_own_memory
        # These are the free bytes of its card, 0 where it computes in the host's memory.
        self.memory_available = opened.free_bytes() if opened is not None and self.has_own_memory else 0
        self._store = ExpertStore(
            isa=isa,
            threads=threads,
            cpus=cpus,
            device=opened,
            weights_layout=weights_layout,
            pool=pool,
            cache=cache,
            slots_bytes=slots_bytes,
        )
        self._worker = _core.Worker(name=name, spin_ns=spin_ns, slowdown=slowdown)
        self._on_change = on_change
        self._scrub: WeightScrub | None = None
        if scrub_s > 0 or self._store.uses_panels:
            self._scrub = WeightScrub(self._store, period_s=scrub_s)
            self._scrub.start()
        self._cpus = cpus
        self._is_inline = pool is not None
        # Guards what serves, since a path may be renewed while somebody closes the runtime. The
        # thread that holds it takes it again where it collects a runtime that nobody closed.
        self._lock = threading.RLock()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        # This is the generation of the data path that is served.
        self._generation = 0

    @property
    def resident_bytes(self) -> int:
        """The bytes of all loaded weights."""
        return self._store.resident_bytes

    def load(
        self,
        checkpoint: Checkpoint,
        ffn: FfnSpec,
        *,
        layer: int,
        shard: int,
        experts: tuple[int, ...],
        weight_dtype: str,
        weights_fingerprint: int,
        numerics: str,
        report: Callable[[int], None] = lambda _count: None,
    ) -> int | None:
        """Loads one shard and returns its content checksum, or None where it is unchecked so far.

        `report` is called with the number of its experts loaded so far. Raises CheckpointError and
        UnsupportedError.
        """
        loan = self._store.load(
            checkpoint, ffn, experts, name=f"layer {layer}, shard {shard}", weight_dtype=weight_dtype,
            weights_fingerprint=weights_fingerprint, numerics=numerics, report=report,
        )  # fmt: skip
        self._worker.hold(layer, shard, loan)
        if self._scrub is not None:
            name = f"layer {layer}, shard {shard}"
            held = HeldWeights(layer, shard, name, ffn, experts, weights_fingerprint, loan, checkpoint, self._tell_change)
            self._scrub.hold(held)
        return loan.content()[0]

    def ask_checksum(self, layer: int, shard: int) -> tuple[int | None, int]:
        """Returns the content checksum of a shard that it holds, or None as long as the shard is
        unchecked, and how many of its experts have been read. Raises CheckpointError where they
        cannot be read, and WorkerError for a shard that it does not hold.
        """
        content = self._worker.content(layer, shard)
        if content is None:
            raise WorkerError(f"worker {self.name}: layer {layer}, shard {shard} is not held", worker=self.name, layer=layer)
        return content

    def attach(self, slots: _core.SlotPlan, generation: int) -> _core.Channel:
        """Serves a fresh channel instead of the former one, and returns the host's end. Raises
        WorkerError where the serving thread does not leave the former one, and WorkerLost once this
        worker is closed.
        """
        with self._lock:
            self._stop()
            self._store.begin_service()
            if not self._is_closed and self._is_inline:
                return self._worker.serve_inline(slots.geometry, generation)
            if not self._is_closed:
                host, worker = _core.make_loopback(slots.geometry)
                serving = (worker, generation)
                thread = threading.Thread(target=self._serve, args=serving, name=f"expert-{self.name}", daemon=True)
                thread.start()
                self._thread, self._generation = thread, generation
                if not self._is_closed:
                    return host
                self._stop()  # it was closed by what this thread has collected meanwhile
        raise WorkerLost(f"worker {self.name} gets no new data path: the runtime was closed", worker=self.name)

    def counters(self) -> dict[str, int]:
        """Returns the worker's own counters."""
        scrubbed = self._scrub.stats() if self._scrub is not None else {}
        return dict(self._worker.stats()) | self._store.panel_counters() | self._store.slot_counters() | scrubbed

    def _tell_change(self, layer: int, shard: int, _local_expert_id: int, failure: str) -> None:
        self._on_change(layer, shard, failure)

    def close(self) -> None:
        """Stops serving and frees the weights. It never raises; a thread that does not stop keeps
        its weights.
        """
        with self._lock:
            self._is_closed = True
            try:
                self._stop()
            except WorkerError as error:
                log.warning("%s", error)
                return
            if self._scrub is not None:
                self._scrub.close()
            self._worker.give_back()
            self._store.close()

    def _serve(self, channel: _core.Channel, generation: int) -> None:
        pin_to_first(self._cpus)
        try:
            self._worker.serve(channel, generation)
        except DflashError as error:
            log.error("worker %s: data path of generation %d ended: %s", self.name, generation, error)

    def _stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._worker.stop(self._generation)
        thread.join(STOP_S)
        if thread.is_alive():
            raise WorkerError(f"worker {self.name} did not stop within {STOP_S:g} s", worker=self.name)
