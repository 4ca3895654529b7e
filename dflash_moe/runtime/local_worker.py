"""A worker inside the host process, over loopback: experts kept at the host, and workers with
`address: loopback`.

Same C++ worker, same kernels, same wire rounding as a worker process; only the process is missing.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from dflash_moe import _core
from dflash_moe.errors import DflashError, WorkerError
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.expert_store import ExpertStore
from dflash_moe.model.ffn import FfnSpec
from dflash_moe.protocol.devices import DeviceChoice, open_device
from dflash_moe.protocol.identity import choose_numerics
from dflash_moe.telemetry.affinity import check_cpus, pin_to_first

log = logging.getLogger(__name__)

STOP_S = 30.0  # the longest call under way ends first


class LocalWorker:
    """Owns the weights and one serving thread, which computes without the GIL. `close()` ends
    it.
    """

    def __init__(
        self, name: str, *, isa: str, threads: int, spin_ns: int, slowdown: float, numerics: str, cpus: tuple[int, ...] = (),
        device: DeviceChoice | None = None, weights_layout: str = "packed",
    ) -> None:  # fmt: skip
        """`device` None: the processor, by kernel set `isa`.

        UnsupportedError where that does not compute `numerics` or cannot be used, ConfigError where
        the device or one of `cpus` is missing.
        """
        opened = open_device(device or DeviceChoice(), threads=threads, name=name)
        self.numerics, _ = choose_numerics(numerics, isa, name=name, device=opened)
        check_cpus(cpus, name=name)
        self.name = name
        self.isa = isa if opened is None else opened.arch  # or the architecture of its card
        self.has_own_memory = (device or DeviceChoice()).has_own_memory
        # of the card
        self.memory_available = opened.free_bytes() if opened is not None and self.has_own_memory else 0
        self._store = ExpertStore(isa=isa, threads=threads, cpus=cpus, device=opened, weights_layout=weights_layout)
        self._worker = _core.Worker(name=name, spin_ns=spin_ns, slowdown=slowdown)
        self._cpus = cpus
        self._thread: threading.Thread | None = None
        self._generation = 0  # of the path that is served

    @property
    def resident_bytes(self) -> int:
        """Bytes of loaded weights."""
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
        """Loads one shard and returns its content checksum, None where it is unchecked so far.

        `report` gets its experts loaded so far. CheckpointError, UnsupportedError.
        """
        loan = self._store.load(
            checkpoint, ffn, experts, name=f"layer {layer}, shard {shard}", weight_dtype=weight_dtype,
            weights_fingerprint=weights_fingerprint, numerics=numerics, report=report,
        )  # fmt: skip
        self._worker.hold(layer, shard, loan)
        return loan.content()[0]

    def ask_checksum(self, layer: int, shard: int) -> tuple[int | None, int]:
        """The content checksum of a shard it holds, None as long as that is unchecked, and how many
        of its experts have been read. CheckpointError where they cannot be read.
        """
        content = self._worker.content(layer, shard)
        if content is None:
            raise WorkerError(f"worker {self.name}: layer {layer}, shard {shard} is not held", worker=self.name, layer=layer)
        return content

    def attach(self, slots: _core.SlotPlan, generation: int) -> _core.Channel:
        """Serves a fresh channel instead of the former one; returns the host's end."""
        self._stop()
        host, worker = _core.make_loopback(slots.geometry)
        self._generation = generation
        self._thread = threading.Thread(target=self._serve, args=(worker, generation), name=f"expert-{self.name}", daemon=True)
        self._thread.start()
        return host

    def counters(self) -> dict[str, int]:
        """The worker's own counters."""
        return dict(self._worker.stats())

    def close(self) -> None:
        """Stops serving and frees the weights; never raises."""
        try:
            self._stop()
        except WorkerError as error:
            log.warning("%s", error)
            return
        self._worker.give_back()
        self._store.drop_unborrowed()

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
