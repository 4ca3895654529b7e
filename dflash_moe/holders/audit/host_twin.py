"""Computes rows at the host that a worker has computed, from the host's own checkpoint: the second
opinion about a worker, and with the readable kernel set of the reference the third.

Only the experts of a row are loaded, and let go of afterwards.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.errors import CheckpointError, DflashError, UnsupportedError
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.refusals import in_one_line
from dflash_moe.protocol.failures import is_passing
from dflash_moe.store.expert_store import ExpertStore
from dflash_moe.telemetry.spaced_log import SpacedLog
from dflash_moe.topology.numerics import CLASSES

if TYPE_CHECKING:
    from dflash_moe.holders.audit.row_questions import RowQuestion
    from dflash_moe.placement.held_shards import HeldShard

log = logging.getLogger(__name__)

# A readable definition of every class whose bits are nobody's own (csrc/compute/reference).
REFERENCE = "reference"


class HostTwin:
    """Computes with one kernel set, on the caller's thread. Any thread may call; calls of two
    threads take turns.
    """

    def __init__(self, path: Path, isa: str) -> None:
        """`path` is the checkpoint, which is opened when the first row is computed."""
        self._path = path
        self._isa = isa
        self._classes = frozenset(_core.numerics_classes(isa))
        self._lock = threading.Lock()
        self._checkpoint: Checkpoint | None = None
        self._store: ExpertStore | None = None
        # Names of what is loaded; they need to be unlike, and mean nothing.
        self._names = itertools.count(1)
        # Why this host cannot compute anything, now or later, empty where it can.
        self.failure = ""
        # Why it could not compute the last row, although it may compute the next one.
        self.setback = ""
        self._setbacks = SpacedLog(log)

    def computes(self, held: HeldShard) -> bool:
        """Says whether the twin's bits for this shard are those of every holder of its class."""
        is_reference = held.numerics in CLASSES and not CLASSES[held.numerics].is_bounded
        return is_reference and held.numerics in self._classes and not self.failure

    def compute(self, held: HeldShard, question: RowQuestion) -> bytes | None:
        """Returns the reply to a row, or None where this host has not the weights (`failure`), or
        lacks descriptors or memory at this time (`setback`). Errors are those of a worker that
        computes.
        """
        local = sorted(set(question.local_expert_ids))
        experts = tuple(held.experts[one] for one in local)
        with self._lock:
            loan = None
            try:
                store, checkpoint = self._opened()
                loan = store.load(
                    checkpoint, held.layer.ffn, experts, name=f"{held.layer.name}, shard {held.shard_id}",
                    weight_dtype=held.weight_dtype, weights_fingerprint=next(self._names), numerics=held.numerics,
                )  # fmt: skip
                computed = loan.compute_rows(
                    question.row, question.row_dtype, row_counts=[len(question.local_expert_ids)],
                    local_expert_ids=[local.index(one) for one in question.local_expert_ids], weights=question.weights,
                    reply_dtype=question.reply_dtype,
                )  # fmt: skip
            except (DflashError, OSError, MemoryError) as error:
                if is_passing(error):
                    self._set_back(error)
                elif loan is None and isinstance(error, (CheckpointError, UnsupportedError)):
                    # It has only a stub of the weights, say, or the files are another machine's.
                    self.failure = str(error)
                    log.info("this host cannot compute what its workers do: %s", self.failure)
                else:
                    raise
                return None
            finally:
                if loan is not None:
                    loan.give_back()
                    store.drop_unborrowed()
            self.setback = ""
            return computed

    def _set_back(self, error: BaseException) -> None:
        self.setback = in_one_line(error)
        # Nothing is kept that was found with half of the files unread.
        self._checkpoint = self._store = None
        self._setbacks.warning("this host cannot compute what its workers do at this time: %s", self.setback)

    def close(self) -> None:
        """Lets go of the checkpoint's files; never raises. A later row opens them again."""
        with self._lock:
            self._checkpoint = self._store = None

    def _opened(self) -> tuple[ExpertStore, Checkpoint]:
        if self._checkpoint is None or self._store is None:
            self._checkpoint = Checkpoint.open(self._path)
            self._store = ExpertStore(isa=self._isa, threads=1)
        return self._store, self._checkpoint
