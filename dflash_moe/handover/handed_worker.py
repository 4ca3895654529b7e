"""One worker that is handed over to a program: its data paths, of which the program makes one end
and the worker the other, and what the supervisor knows of it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dflash_moe.errors import ProtocolError, WorkerLost, WorkerTimeout
from dflash_moe.protocol.descriptors import Descriptors
from dflash_moe.protocol.framing import USER_TIMEOUT_MS
from dflash_moe.protocol.handover import HandoverMessage, PathAnswered, PathOffered, PathTerms

if TYPE_CHECKING:
    from dflash_moe import _core
    from dflash_moe.holders.fleet import Fleet
    from dflash_moe.holders.holder import Holder

# The program makes its end of a data path within this time, which maps and zeroes memory.
OFFER_S = 20.0
# Sends a message with copies of descriptors to the program.
Tell = Callable[[HandoverMessage, Sequence[int]], None]


class HandedWorker:
    """A worker as the supervisor sees it. Whoever makes a path takes `make_path`; the supervisor's
    lock guards `lost`, `num_told`, `num_worn`, `thread` and `is_busy`.
    """

    def __init__(self, index: int, holder: Holder, slots: _core.SlotPlan) -> None:
        """`index` is its number in the plan, and `slots` are those of all its paths."""
        self.index = index
        self.holder = holder
        # Why it is gone, empty where it is not.
        self.lost = ""
        # How often the program has said that the worker is gone, and that its path is worn.
        self.num_told = 0
        self.num_worn = 0
        # What the supervisor's caller was told of a loss.
        self.is_loss_said = False
        self.said = ""
        # The renewal that is under way, or the last one.
        self.thread: threading.Thread | None = None
        # `thread` looks at `num_worn` again before it ends.
        self.is_busy = False
        self._slots = slots
        # The generation that the program was last asked to offer a path for, and its offers; None
        # says that the program has given the worker up meanwhile.
        self._generation = 0
        self._offers: queue.SimpleQueue[tuple[PathOffered, list[int]] | None] = queue.SimpleQueue()
        # One thread at a time makes a path.
        self._making = threading.Lock()

    @property
    def name(self) -> str:
        """The worker's name in the topology."""
        return self.holder.name

    def give_up_offer(self) -> None:
        """Ends a wait for an offer that will not come."""
        self._offers.put(None)

    def take_offer(self, offered: PathOffered, descriptors: list[int]) -> None:
        """Takes the program's end of a path, and owns `descriptors`. Raises ProtocolError for one
        that nobody asked for.
        """
        if offered.generation == self._generation:
            self._offers.put((offered, descriptors))
            return
        with Descriptors() as late:  # an offer that came after its deadline
            late.hold(descriptors)
        if offered.generation > self._generation:
            what = f"a path of generation {offered.generation}"
            raise ProtocolError(f"the program offered {what}, which nobody asked for")

    def make_path(self, fleet: Fleet, tell: Tell) -> None:
        """Makes a fresh data path between the program and the worker. Raises PeerGone where the
        program hung up, and the errors of `HostSession.relay`.
        """
        timeout_s = fleet.attach_timeout_s
        if not self._making.acquire(timeout=timeout_s + OFFER_S):
            text = f"worker {self.name}: another data path is being made all the while"
            raise WorkerTimeout(text, worker=self.name)
        try:
            with Descriptors() as held:
                self._make_path(fleet, tell, held, timeout_s)
        finally:
            self._making.release()

    def _make_path(self, fleet: Fleet, tell: Tell, held: Descriptors, timeout_s: float) -> None:
        while not self._offers.empty():  # what came after its deadline, for the path before
            if (late := self._offers.get_nowait()) is not None:
                held.hold(late[1])
        generation = self._generation = fleet.next_generation()
        session = self.holder.require_session()
        wish = session.wish(self._slots, self.holder.transport, generation)
        terms = PathTerms(
            worker=self.index, generation=generation, transport=wish.transport, num_slots=wish.num_slots,
            request_bytes=wish.request_bytes, reply_bytes=wish.reply_bytes,
            socket_buffer_bytes=wish.socket_buffer_bytes, user_timeout_ms=USER_TIMEOUT_MS, local_host=session.local_host,
        )  # fmt: skip
        tell(terms, ())
        offered, descriptors = self._next_offer()
        held.hold(descriptors)
        answer = session.relay(wish, offered.payload, descriptors, timeout_s=timeout_s)
        held.hold(answer.descriptors)
        answered = PathAnswered(
            worker=self.index, generation=generation, payload=answer.payload,
            num_descriptors=len(answer.descriptors), has_pulse=answer.has_pulse,
        )  # fmt: skip
        tell(answered, answer.descriptors)
        self.holder.slots = self._slots

    def _next_offer(self) -> tuple[PathOffered, list[int]]:
        try:
            offer = self._offers.get(timeout=OFFER_S)
        except queue.Empty:
            text = f"the program did not offer a data path to worker {self.name} within {OFFER_S:g} s"
            raise WorkerTimeout(text) from None
        if offer is None:
            raise WorkerLost(f"worker {self.name} was given up by the program", worker=self.name)
        return offer
