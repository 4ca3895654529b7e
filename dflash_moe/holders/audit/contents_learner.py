"""Learns what mapped weights add up to, once their holders have read them in the background. A
worker that comes back to other files is then compared with what it held.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dflash_moe.errors import CheckpointError, DflashError

if TYPE_CHECKING:
    from dflash_moe.holders.audit.contents import AskChecksum, ReferenceChecksums
    from dflash_moe.placement.held_shards import HeldShard

log = logging.getLogger(__name__)

# The pauses between two looks double from the first to the second: tiny models are read at once,
# and large ones for minutes.
PAUSES_S = (0.05, 5.0)
# The thread ends within a question, which ends when its worker is hung up on.
STOP_S = 1.0


class ContentsLearner:
    """Asks holders that have not read their shards yet, from a thread that ends when all is known.
    `call_off` ends it early, `close` waits for it.
    """

    def __init__(
        self, contents: ReferenceChecksums, ask: AskChecksum, is_as_started: Callable[[str], bool],
        held: Mapping[str, Sequence[HeldShard]],
    ) -> None:  # fmt: skip
        """`is_as_started` says of a holder that it computes from files which are what they were
        before it read them first. `held` are the shards of each holder, in the order in which it
        reads them.
        """
        self._contents, self._ask, self._is_as_started = contents, ask, is_as_started
        self._unknown = {name: [one for one in shards if self._is_unknown(name, one)] for name, shards in held.items()}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dflash-contents", daemon=True)

    def start(self) -> None:
        """Starts the thread where there is something to learn. One that the system does not give is
        done without.
        """
        if not any(self._unknown.values()):
            return
        try:
            self._thread.start()
        except RuntimeError as error:
            log.warning("what mapped weights add up to is not learned: %s", error)

    def call_off(self) -> None:
        """Has the thread end; never raises."""
        self._is_over.set()

    def close(self) -> None:
        """Waits for the thread, which was called off; never raises."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)

    def _is_unknown(self, name: str, held: HeldShard) -> bool:
        return name in self._contents.holders(held)[1]

    def _run(self) -> None:
        pause_s, longest_s = PAUSES_S
        while any(self._unknown.values()) and not self._is_over.wait(pause_s):
            pause_s = min(2 * pause_s, longest_s)
            for name, shards in self._unknown.items():
                while shards and not self._is_over.is_set() and self._learn(name, shards[0]):
                    shards.pop(0)

    def _learn(self, name: str, held: HeldShard) -> bool:
        """Returns whether there is nothing more to learn of a shard from this holder."""
        if not self._is_unknown(name, held):
            return True
        try:
            checksum, _ = self._ask(name, held)
            # After the answer: it may have been started again, and have read other files.
            if not self._is_as_started(name):
                return True
            if checksum is not None:
                self._contents.note(held, name, checksum)
        except CheckpointError as error:
            log.error("worker %s: %s", name, error)
            return True
        except DflashError as error:
            # It is lost, and is compared when it comes back.
            log.debug("worker %s cannot be asked what it holds: %s", name, error)
            return False
        return checksum is not None
