"""Finds weights that have changed in memory since they were loaded, and loads them again.

Memory without error correction flips a bit now and then, and a flipped weight bit is wrong in every
answer from then on. One thread per store of experts sums all of them up again, over and over, with
at most a hundredth of a core (csrc/store/scrubber.h).
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.errors import CheckpointError, DflashError
from dflash_moe.model.expert_tensors import expert_sources

if TYPE_CHECKING:
    from dflash_moe.model.checkpoint import Checkpoint
    from dflash_moe.model.expert_store import ExpertStore
    from dflash_moe.model.ffn import FfnSpec

log = logging.getLogger(__name__)

# The thread ends within the time of a megabyte, unless it loads an expert, which takes a second.
STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """A shard with what loading one of its experts again needs."""

    layer: int
    shard: int
    # What messages call it.
    name: str
    ffn: FfnSpec
    # Their global ids, ascending.
    experts: tuple[int, ...]
    weights_fingerprint: int
    loan: _core.ResidentShard


# Is called with a shard, the position of an expert in it whose weights had changed, and why they
# could not be loaded again, empty where they were.
TellChange = Callable[[HeldWeights, int, str], None]


class WeightScrub:
    """Sums up the weights of one store. `tell` is called from the thread of the scrub, after the
    expert was loaded again or could not be. `close` ends it.
    """

    def __init__(self, store: ExpertStore, checkpoint: Checkpoint | None, *, period_s: float, tell: TellChange) -> None:
        """A pass over all weights takes `period_s`, or as long as it takes with a hundredth of a
        core. `checkpoint` is where they are loaded from; None where each shard brings its own.
        """
        self._scrubber = store.scrubber(period_s)
        self._checkpoint = checkpoint
        self._tell = tell
        self._held: dict[int, tuple[HeldWeights, Checkpoint | None]] = {}
        self._num_reloads = 0
        self._is_over = False
        # It blocks in the core without the GIL until something was found.
        self._thread = threading.Thread(target=self._run, name="scrub", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def hold(self, held: HeldWeights, checkpoint: Checkpoint | None = None) -> None:
        """Says where the experts of a loaded shard come from. Any thread."""
        self._held[held.weights_fingerprint] = held, checkpoint or self._checkpoint

    def stats(self) -> dict[str, int]:
        """Returns the bytes summed up so far, the experts found changed, and those loaded again."""
        return {**self._scrubber.stats(), "scrub_reloads": self._num_reloads}

    def close(self) -> None:
        """Ends the thread and lets go of the shards; never raises, and may be called again."""
        self._is_over = True
        self._scrubber.stop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)
        self._held.clear()

    def _run(self) -> None:
        while (damage := self._scrubber.next_damage()) is not None:
            fingerprint, local_expert_id = damage
            found = self._held.get(fingerprint)
            if found is None:  # its host is leaving
                continue
            held, checkpoint = found
            failure = ""
            try:
                self._load_again(held, checkpoint, local_expert_id)
                self._num_reloads += 1
                log.warning("%s: the weights of local expert %d had changed in memory; they were loaded again",
                            held.name, local_expert_id)  # fmt: skip
            except DflashError as error:
                failure = str(error)
                log.error("%s: the weights of local expert %d have changed in memory, and cannot be loaded again: %s",
                          held.name, local_expert_id, failure)  # fmt: skip
            if not self._is_over:
                self._tell(held, local_expert_id, failure)

    def _load_again(self, held: HeldWeights, checkpoint: Checkpoint | None, local_expert_id: int) -> None:
        if checkpoint is None:
            raise CheckpointError(f"{held.name}: nobody knows its checkpoint")
        # What was changed may be the page cache's copy of the file.
        checkpoint.drop_pages()
        sources = expert_sources(checkpoint, held.ffn, held.experts[local_expert_id])
        held.loan.reload_expert(local_expert_id, **sources)
