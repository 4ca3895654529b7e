"""Finds weights that have changed in memory since they were loaded, and loads them again.

Memory without error correction flips a bit now and then, and a flipped weight bit is wrong in every
answer from then on. One thread per store of experts sums all of them up again, over and over, with
at most a hundredth of a core (csrc/store/scrubber.h).
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.errors import ConfigError, DflashError
from dflash_moe.model.expert_tensors import expert_sources

if TYPE_CHECKING:
    from dflash_moe.model.checkpoint import Checkpoint
    from dflash_moe.model.ffn import FfnSpec
    from dflash_moe.store.expert_store import ExpertStore

log = logging.getLogger(__name__)

# The thread ends within the time of a megabyte, unless it loads an expert, which takes a second.
STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """A shard as somebody holds it, with what loading one of its experts again needs, and who is
    told of it.
    """

    layer: int
    shard: int
    # What messages call it.
    name: str
    ffn: FfnSpec
    # Their global ids, ascending.
    experts: tuple[int, ...]
    weights_fingerprint: int
    loan: _core.ResidentShard
    checkpoint: Checkpoint
    # Is called with layer and shard, the position of an expert in it whose weights had changed, and
    # why they could not be loaded again, empty where they were.
    tell: Callable[[int, int, int, str], None]


class WeightScrub:
    """Sums up the weights of one store. All who hold a shard are told from the thread of the scrub,
    after an expert was loaded again or could not be, and not of panels that are damaged on disk.
    `close` ends it.
    """

    def __init__(self, store: ExpertStore, *, period_s: float) -> None:
        """A pass over all weights takes `period_s`, or as long as it takes with a hundredth of a
        core; with 0 there is none, and what calls find damaged is loaded again.
        """
        self._store = store
        self._scrubber = store.scrubber(period_s)
        # Guards what follows: an expert may be found damaged before its shard is held. Shards go by
        # their numbers.
        self._lock = threading.Lock()
        self._held: dict[int, list[HeldWeights]] = {}
        self._early: set[tuple[int, int]] = set()
        self._num_reloads = 0
        self._is_over = False
        # It blocks in the core without the GIL until something was found.
        self._thread = threading.Thread(target=self._run, name="scrub", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def set_period(self, period_s: float) -> None:
        """Changes how long a pass takes, from the next expert on. Any thread."""
        self._scrubber.set_period(period_s)

    def hold(self, held: HeldWeights) -> None:
        """Says who holds a loaded shard and where its experts come from, and loads those again that
        were found damaged before. Any thread.
        """
        number = held.loan.number
        with self._lock:
            self._held.setdefault(number, []).append(held)
            early = sorted(one for one in self._early if one[0] == number)
            self._early.difference_update(early)
        for _, local_expert_id in early:
            self._mend(number, local_expert_id)

    def release(self, held: Sequence[HeldWeights]) -> None:
        """Lets go of shards, of which nothing is told there any more. Any thread."""
        with self._lock:
            for one in held:
                number = one.loan.number
                left = [other for other in self._held.pop(number, []) if other is not one]
                if left:
                    self._held[number] = left

    def stats(self) -> dict[str, int]:
        """Returns the bytes summed up so far, the experts found changed, and those loaded again."""
        return {**self._scrubber.stats(), "scrub_reloads": self._num_reloads}

    def close(self) -> None:
        """Ends the thread and lets go of the shards; never raises, and may be called again."""
        self._is_over = True
        self._scrubber.stop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)
        with self._lock:
            self._held.clear()

    def _run(self) -> None:
        while (damage := self._scrubber.next_damage()) is not None:
            number, local_expert_id = damage
            with self._lock:
                if number not in self._held:  # it is being loaded, or its hosts are leaving
                    self._early.add(damage)
                    continue
            self._mend(number, local_expert_id)

    def _mend(self, number: int, local_expert_id: int) -> None:
        with self._lock:
            holders = list(self._held.get(number, []))
        if not holders:
            return
        failure, held = "", holders[0]
        try:
            self._load_again(held, local_expert_id)
            self._num_reloads += 1
            if self._store.set_panels_aside(held.weights_fingerprint, local_expert_id):
                # It was found before anything was computed from it, and says nothing about memory.
                log.warning("%s: the panels of local expert %d are damaged on disk; they were packed again",
                            held.name, local_expert_id)  # fmt: skip
                return
            log.warning("%s: the weights of local expert %d had changed in memory; they were loaded again",
                        held.name, local_expert_id)  # fmt: skip
        except ConfigError:  # its shard was loaded anew since, and is whole
            return
        except DflashError as error:
            failure = str(error)
            log.error("%s: the weights of local expert %d have changed in memory, and cannot be loaded again: %s",
                      held.name, local_expert_id, failure)  # fmt: skip
        with self._lock:  # whoever has let go meanwhile, or has come, is told nothing wrong
            holders = list(self._held.get(number, []))
        for one in holders:
            if not self._is_over:
                one.tell(one.layer, one.shard, local_expert_id, failure)

    def _load_again(self, held: HeldWeights, local_expert_id: int) -> None:
        # What was changed may be the page cache's copy of the file.
        held.checkpoint.drop_pages()
        sources = expert_sources(held.checkpoint, held.ffn, held.experts[local_expert_id])
        held.loan.reload_expert(local_expert_id, **sources)
