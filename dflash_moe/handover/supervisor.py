"""The supervisor of a program that calls our workers by itself: it hands the loaded workers over,
makes and renews data paths between the program and them, and watches them.

What comes from the program is the word of a process that may be broken or hostile: a closed
schema, numbers that are looked up before they are used, and one thread per worker at most.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from dflash_moe.errors import DflashError, ProtocolError, WorkerLost, WorkerTimeout
from dflash_moe.handover.handed_worker import HandedWorker
from dflash_moe.handover.handover_plan import HandoverModel, check_holders, plan_messages
from dflash_moe.holders.events import HolderEvents
from dflash_moe.holders.membership import Happening, State
from dflash_moe.holders.renewal import try_to_renew
from dflash_moe.holders.worker_keeper import WorkerKeeper
from dflash_moe.protocol.framing import Connection, PeerGone
from dflash_moe.protocol.handover import (
    Counted,
    HandoverMessage,
    PathOffered,
    PathWorn,
    Ready,
    RefuseHandover,
    TensorSeen,
    WorkerGone,
    message_name,
)

if TYPE_CHECKING:
    from dflash_moe.handover.handover_socket import HandoverSocket
    from dflash_moe.holders.events import Notice
    from dflash_moe.holders.holder import Holder
    from dflash_moe.holders.placed_experts import PlacedExperts

log = logging.getLogger(__name__)

# The program reads a message within this time, unless it is stopped and the socket's buffer full.
SEND_S = 10.0
# Another thread may be about to end its own message when the last one is sent.
PARTING_S = 1.0
# The accepting thread looks this often whether it shall end, and processes at whether they did.
TICK_S = 0.25
# A worker that is lost when the program takes them all may take so long to come back, which is
# looked at this often.
RETURN_S, LOOK_S = 20.0, 0.05
# The threads have this time to end once their connections are hung up.
STOP_S = 5.0
# What an ended program has sent lies in the socket, and is read in much less time.
END_S = 2.0


class Supervisor:
    """Serves one program. The caller owns workers and socket, and closes them after `close`.

    `on_lost(worker, what happened)` and `on_back(worker)` are called once for each loss and return,
    `on_unfit(worker, why)` when a worker that was started again is no substitute for the one that
    was lost, once as long as the reason stays, and `on_left_alone(worker, why)` when it is not
    started again any more; all from threads of the supervisor.
    """

    def __init__(
        self,
        model: HandoverModel,
        placed: PlacedExperts,
        *,
        on_lost: Callable[[str, str], None],
        on_back: Callable[[str], None],
        on_unfit: Callable[[str, str], None],
        on_left_alone: Callable[[str, str], None],
    ) -> None:
        """Raises ConfigError where the placement leaves experts to the host."""
        check_holders(placed)
        self._placed = placed
        slots = placed.plan_slots()
        self._plan = plan_messages(model, placed, slots)
        members = placed.fleet.members.values()
        self._handed = [HandedWorker(index, member, slots[member.name]) for index, member in enumerate(members)]
        self._by_name = {handed.name: handed for handed in self._handed}
        self._planned = {tensor.name for tensor in model.tensors}
        self._on_lost, self._on_back, self._on_unfit, self._on_left_alone = on_lost, on_back, on_unfit, on_left_alone
        self._events = HolderEvents()
        self._keeper = WorkerKeeper(placed, self, self._events)
        self._connection: Connection | None = None
        self._threads: list[threading.Thread] = []
        # The program knows the workers. One that is lost before is refused with all others.
        self._is_planned = False
        # Reads what the program says, until it hangs up.
        self._serving: threading.Thread | None = None
        self._is_over = threading.Event()
        # Guards what HandedWorker says.
        self._lock = threading.Lock()
        # What the program has said. `reasons` has every planned tensor it met: empty where the
        # workers stand in for it, else why the program keeps it.
        self.reasons: dict[str, str] = {}
        self.counted: Counted | None = None
        self.is_connected = False
        self.is_ready = False
        # Why the workers could not be handed over.
        self.failure: DflashError | None = None

    def start(self, socket: HandoverSocket) -> None:
        """Starts to wait for the program, whose process `socket` expects by now."""
        self._spawn("dflash-handover", lambda: self._accept(socket))
        self._keeper.start()

    def await_end(self) -> None:
        """Waits until the last words of a program that has ended are read, at most END_S."""
        if self._serving is not None:
            self._serving.join(END_S)

    def close(self) -> None:
        """Hangs up on the program and ends all threads; never raises."""
        self._is_over.set()
        if self._connection is not None:
            self._connection.hang_up()
        for handed in self._handed:
            handed.give_up_offer()
        self._keeper.call_off()
        for handed in self._handed:
            if handed.lost:
                self._say_loss(handed)
        deadline = time.monotonic() + STOP_S
        threads = self._threads + [handed.thread for handed in self._handed if handed.thread is not None]
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            for handed in self._handed:
                if handed.thread is not None and handed.thread.is_alive() and handed.holder.session is not None:
                    handed.holder.session.hang_up()
            next(thread for thread in threads if thread.is_alive()).join(0.05)
        self._keeper.close()
        self._events.bell.close()
        if self._connection is not None:
            self._connection.close()

    def _spawn(self, name: str, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self, socket: HandoverSocket) -> None:
        while not self._is_over.is_set():
            connection = socket.accept(timeout_s=TICK_S)
            if connection is not None:
                self._connection = connection
                self.is_connected = True
                self._serving = self._spawn("dflash-program", partial(self._serve, connection))

    # -- the program -------------------------------------------------------------------------------

    def _serve(self, connection: Connection) -> None:
        try:
            for message in self._plan:
                self._tell(message)
            self._is_planned = True
            self._spawn("dflash-paths", self._open_paths)
            while True:
                # It ends with the program, or when `close` hangs up.
                received = connection.receive(deadline=None, waiting_for="the program")
                self._take(connection, cast(HandoverMessage, received))
        except PeerGone:
            log.info("the program has hung up")
            if not self.is_ready:
                self.failure = self.failure or self._early_end()
        except DflashError as error:
            self._refuse(error)
        finally:
            connection.hang_up()

    def _early_end(self) -> DflashError:
        for handed in self._handed:
            if handed.lost:
                return WorkerLost(f"worker {handed.name} is lost: {handed.lost}", worker=handed.name)
        return DflashError("the program hung up before it had taken the workers; what its library says stands above")

    def _refuse(self, error: DflashError) -> None:
        if not self._is_over.is_set():
            log.warning("the hand-over ended: %s", error)
            self.failure = self.failure or error
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(DflashError):
                connection.send(RefuseHandover(text=str(error)), deadline=time.monotonic() + PARTING_S)
            connection.hang_up()

    def _tell(self, message: HandoverMessage, descriptors: Sequence[int] = ()) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            connection.send(message, deadline=time.monotonic() + SEND_S, descriptors=descriptors)
        except WorkerTimeout:
            # A part of the message may be on its way, so that nothing can follow it.
            connection.hang_up()
            raise PeerGone(f"the program did not read {message_name(message)} within {SEND_S:g} s") from None

    def _take(self, connection: Connection, message: HandoverMessage) -> None:
        """Does what the program asks. Raises ProtocolError for what it must not ask."""
        if isinstance(message, PathOffered):
            handed = self._of(message.worker)
            handed.take_offer(message, connection.take_descriptors(message.num_descriptors))
            return
        connection.take_descriptors(0)
        if isinstance(message, PathWorn):
            self._begin_to_renew(self._of(message.worker), message.reason)
        elif isinstance(message, WorkerGone):
            handed = self._of(message.worker)
            with self._lock:
                handed.num_told += 1
            handed.give_up_offer()
            self._lose(handed, message.reason, is_told=True)
        elif isinstance(message, TensorSeen):
            # A tensor that was taken stays taken: a second model of the program, such as a draft,
            # has tensors of the same names and keeps them.
            if message.name in self._planned and self.reasons.get(message.name) != "":
                self.reasons[message.name] = message.reason
        elif isinstance(message, Counted):
            self.counted = message
        else:
            raise ProtocolError(f"the program sent {message_name(message)}, which only the supervisor sends")

    def _of(self, index: int) -> HandedWorker:
        if index >= len(self._handed):
            raise ProtocolError(f"the program named worker {index} of {len(self._handed)}")
        return self._handed[index]

    # -- data paths --------------------------------------------------------------------------------

    def _open_paths(self) -> None:
        try:
            for handed in self._handed:
                self._await_return(handed)
                if handed.lost:
                    raise WorkerLost(f"worker {handed.name} is lost: {handed.lost}", worker=handed.name)
                self._make_path(handed)
            self.is_ready = True
            self._tell(Ready())
        except PeerGone:
            pass
        except DflashError as error:
            self._refuse(error)

    def _await_return(self, handed: HandedWorker) -> None:
        """Waits for a worker that was lost before the program could have it, while it is started
        again.
        """
        until = time.monotonic() + RETURN_S
        while handed.lost and handed.holder.life.state is not State.QUARANTINED and time.monotonic() < until:
            if self._is_over.wait(LOOK_S):
                return

    def _make_path(self, handed: HandedWorker) -> None:
        handed.make_path(self._placed.fleet, self._tell)

    def _begin_to_renew(self, handed: HandedWorker, reason: str) -> None:
        log.info("worker %s: its data path is worn: %s", handed.name, reason)
        with self._lock:
            handed.num_worn += 1
            if handed.lost or handed.is_busy or self._is_over.is_set():
                return
            handed.is_busy = True
            handed.thread = threading.Thread(
                target=self._renew, args=(handed,), name=f"dflash-path-{handed.index}", daemon=True
            )
            handed.thread.start()

    def _renew(self, handed: HandedWorker) -> None:
        """Renews the path until the program does not say any more that it is worn. It may say so of
        the new path while the thread that made it has not ended yet.
        """
        while True:
            with self._lock:
                num_worn = handed.num_worn
            is_renewed = self._renew_once(handed)
            with self._lock:
                handed.is_busy = is_renewed and handed.num_worn != num_worn
                if not handed.is_busy:
                    return

    def _renew_once(self, handed: HandedWorker) -> bool:
        """Returns whether the path is renewed. A worker with which that fails is given up."""

        def renew() -> None:
            if handed.lost:
                raise WorkerLost(f"worker {handed.name} is lost: {handed.lost}", worker=handed.name)
            self._make_path(handed)

        try:
            failure = try_to_renew(handed.name, renew, self._is_over)
        except PeerGone:
            return False
        if failure:
            self._lose(handed, failure)
        return not failure and not self._is_over.is_set()

    # -- workers -----------------------------------------------------------------------------------

    def _lose(self, handed: HandedWorker, reason: str, *, is_told: bool = False) -> None:
        """Notes that a worker is gone, and tells program and keeper. `is_told` says that the
        program knows.
        """
        with self._lock:
            if handed.lost or self._is_over.is_set():
                return
            handed.lost = reason or "the program gives no reason"
        with contextlib.suppress(DflashError):
            if self._is_planned and not is_told:
                self._tell(WorkerGone(worker=handed.index, reason=handed.lost))
        self._events.happen(handed.holder, Happening.LOST, handed.lost)

    # -- what the keeper of workers asks for (worker_keeper.Calls) ---------------------------------

    def lose(self, member: Holder, reason: str) -> None:
        """Tells the program that a worker is gone."""
        self._lose(self._by_name[member.name], reason)

    def join(self, member: Holder) -> None:
        """Makes the data path of a worker that came back. Raises WorkerLost where the program
        cannot use it, and the errors of `HandedWorker.make_path`.
        """
        handed = self._by_name[member.name]
        if handed.thread is not None:
            handed.thread.join(STOP_S)  # it renews a path of the session that is over
        num_told, num_worn = handed.num_told, handed.num_worn
        if self._is_planned:
            self._make_path(handed)  # else it is made with those of all others
        with self._lock:
            is_back = handed.num_told == num_told
            if is_back:
                handed.lost = ""
            is_worn = is_back and handed.num_worn != num_worn
        if not is_back:
            raise WorkerLost(f"worker {handed.name} was given up by the program", worker=handed.name)
        self._on_back(handed.name)
        if is_worn:
            self._begin_to_renew(handed, "it was worn at once")

    def news(self) -> list[tuple[str, Happening, str]]:
        """Returns nothing: whoever hears of a loss puts it into the events."""
        return []

    def note(self, notice: Notice) -> None:
        """Does nothing: no program hears of more than losses and returns."""

    def descriptor(self) -> int:
        """Returns -1: the events have a bell."""
        return -1

    def tell(self, member: Holder) -> None:
        """Tells the caller of losses, once it is known how the process ended, and of workers that
        will not do.
        """
        handed, life = self._by_name[member.name], member.life
        if life.state is State.READY:
            handed.said, handed.is_loss_said = "", False
        is_left_alone = life.state is State.QUARANTINED
        if self._is_over.is_set() or life.state not in (State.WAITING, State.QUARANTINED):
            return
        self._say_loss(handed)
        if life.is_unfit and life.reason != handed.said:
            handed.said = life.reason
            self._on_unfit(handed.name, life.reason)
        if is_left_alone:
            self._on_left_alone(handed.name, life.reason)

    def _say_loss(self, handed: HandedWorker) -> None:
        if not handed.is_loss_said:
            handed.is_loss_said = True
            self._on_lost(handed.name, f"worker {handed.name} is lost: {handed.lost}; {_exit_of(handed.holder)}")


def _exit_of(member: Holder) -> str:
    if member.session is not None and member.session.started is not None:
        return member.last_exit or member.session.started.describe_exit(seconds=0.0)
    return f"look at its own output at {member.address}"
