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
from dflash_moe.holders.membership import State
from dflash_moe.holders.renewal import try_to_renew
from dflash_moe.holders.worker_keeper import WorkerKeeper, restart_policy
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
    from dflash_moe.holders.member import Member
    from dflash_moe.holders.membership import Member as Life
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
        self._holders = [HandedWorker(member.client_index, member, slots[member.name]) for member in members]
        self._planned = {tensor.name for tensor in model.tensors}
        self._on_lost, self._on_back, self._on_unfit, self._on_left_alone = on_lost, on_back, on_unfit, on_left_alone
        self._keeper = WorkerKeeper(placed.fleet, restart_policy(placed.settings, retries_unfit=True), self)
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
        self._keeper.start(self._placed.held)

    def await_end(self) -> None:
        """Waits until the last words of a program that has ended are read, at most END_S."""
        if self._serving is not None:
            self._serving.join(END_S)

    def close(self) -> None:
        """Hangs up on the program and ends all threads; never raises."""
        self._is_over.set()
        if self._connection is not None:
            self._connection.hang_up()
        for holder in self._holders:
            holder.give_up_offer()
        self._keeper.call_off()
        for holder in self._holders:
            if holder.lost:
                self._say_loss(holder)
        deadline = time.monotonic() + STOP_S
        threads = self._threads + [holder.thread for holder in self._holders if holder.thread is not None]
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            for holder in self._holders:
                if holder.thread is not None and holder.thread.is_alive() and holder.member.session is not None:
                    holder.member.session.hang_up()
            next(thread for thread in threads if thread.is_alive()).join(0.05)
        self._keeper.close()
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
        for holder in self._holders:
            if holder.lost:
                return WorkerLost(f"worker {holder.name} is lost: {holder.lost}", worker=holder.name)
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
            holder = self._holder(message.worker)
            holder.take_offer(message, connection.take_descriptors(message.num_descriptors))
            return
        connection.take_descriptors(0)
        if isinstance(message, PathWorn):
            self._begin_to_renew(self._holder(message.worker), message.reason)
        elif isinstance(message, WorkerGone):
            holder = self._holder(message.worker)
            with self._lock:
                holder.num_told += 1
            holder.give_up_offer()
            self._lose(holder, message.reason, is_told=True)
        elif isinstance(message, TensorSeen):
            # A tensor that was taken stays taken: a second model of the program, such as a draft,
            # has tensors of the same names and keeps them.
            if message.name in self._planned and self.reasons.get(message.name) != "":
                self.reasons[message.name] = message.reason
        elif isinstance(message, Counted):
            self.counted = message
        else:
            raise ProtocolError(f"the program sent {message_name(message)}, which only the supervisor sends")

    def _holder(self, index: int) -> HandedWorker:
        if index >= len(self._holders):
            raise ProtocolError(f"the program named worker {index} of {len(self._holders)}")
        return self._holders[index]

    # -- data paths --------------------------------------------------------------------------------

    def _open_paths(self) -> None:
        try:
            for holder in self._holders:
                self._await_return(holder)
                if holder.lost:
                    raise WorkerLost(f"worker {holder.name} is lost: {holder.lost}", worker=holder.name)
                self._make_path(holder)
            self.is_ready = True
            self._tell(Ready())
        except PeerGone:
            pass
        except DflashError as error:
            self._refuse(error)

    def _await_return(self, holder: HandedWorker) -> None:
        """Waits for a worker that was lost before the program could have it, while it is started
        again.
        """
        until = time.monotonic() + RETURN_S
        while holder.lost and not holder.is_left_alone and time.monotonic() < until:
            if self._is_over.wait(LOOK_S):
                return

    def _make_path(self, holder: HandedWorker) -> None:
        holder.make_path(self._placed.fleet, self._tell)

    def _begin_to_renew(self, holder: HandedWorker, reason: str) -> None:
        log.info("worker %s: its data path is worn: %s", holder.name, reason)
        with self._lock:
            holder.num_worn += 1
            if holder.lost or holder.is_busy or self._is_over.is_set():
                return
            holder.is_busy = True
            holder.thread = threading.Thread(
                target=self._renew, args=(holder,), name=f"dflash-path-{holder.index}", daemon=True
            )
            holder.thread.start()

    def _renew(self, holder: HandedWorker) -> None:
        """Renews the path until the program does not say any more that it is worn. It may say so of
        the new path while the thread that made it has not ended yet.
        """
        while True:
            with self._lock:
                num_worn = holder.num_worn
            is_renewed = self._renew_once(holder)
            with self._lock:
                holder.is_busy = is_renewed and holder.num_worn != num_worn
                if not holder.is_busy:
                    return

    def _renew_once(self, holder: HandedWorker) -> bool:
        """Returns whether the path is renewed. A worker with which that fails is given up."""

        def renew() -> None:
            if holder.lost:
                raise WorkerLost(f"worker {holder.name} is lost: {holder.lost}", worker=holder.name)
            self._make_path(holder)

        try:
            failure = try_to_renew(holder.name, renew, self._is_over)
        except PeerGone:
            return False
        if failure:
            self._lose(holder, failure)
        return not failure and not self._is_over.is_set()

    # -- workers -----------------------------------------------------------------------------------

    def _lose(self, holder: HandedWorker, reason: str, *, is_told: bool = False) -> None:
        """Notes that a worker is gone, and tells program and keeper. `is_told` says that the
        program knows.
        """
        with self._lock:
            if holder.lost or self._is_over.is_set():
                return
            holder.lost = reason or "the program gives no reason"
        with contextlib.suppress(DflashError):
            if self._is_planned and not is_told:
                self._tell(WorkerGone(worker=holder.index, reason=holder.lost))
        self._keeper.note_loss(holder.name, holder.lost)

    # -- what the keeper of workers asks for (worker_keeper.Calls) ---------------------------------

    def lose(self, member: Member, reason: str) -> None:
        """Tells the program that a worker is gone."""
        self._lose(self._holders[member.client_index], reason)

    def join(self, member: Member) -> None:
        """Makes the data path of a worker that came back. Raises WorkerLost where the program
        cannot use it, and the errors of `HandedWorker.make_path`.
        """
        holder = self._holders[member.client_index]
        if holder.thread is not None:
            holder.thread.join(STOP_S)  # it renews a path of the session that is over
        num_told, num_worn = holder.num_told, holder.num_worn
        if self._is_planned:
            self._make_path(holder)  # else it is made with those of all others
        with self._lock:
            is_back = holder.num_told == num_told
            if is_back:
                holder.lost = ""
            is_worn = is_back and holder.num_worn != num_worn
        if not is_back:
            raise WorkerLost(f"worker {holder.name} was given up by the program", worker=holder.name)
        self._on_back(holder.name)
        if is_worn:
            self._begin_to_renew(holder, "it was worn at once")

    def losses(self) -> list[tuple[str, str]]:
        """Returns nothing: whoever hears of a loss tells the keeper."""
        return []

    def descriptor(self) -> int:
        """Returns -1: whoever hears of a loss rings the keeper."""
        return -1

    def tell(self, member: Member, life: Life) -> None:
        """Tells the caller of losses, once it is known how the process ended, and of workers that
        will not do.
        """
        holder = self._holders[member.client_index]
        if life.state is State.READY:
            holder.said, holder.is_loss_said = "", False
        is_left_alone = holder.is_left_alone = life.state is State.QUARANTINED
        if self._is_over.is_set() or life.state not in (State.WAITING, State.QUARANTINED):
            return
        self._say_loss(holder)
        if life.is_unfit and life.reason != holder.said:
            holder.said = life.reason
            self._on_unfit(holder.name, life.reason)
        if is_left_alone:
            self._on_left_alone(holder.name, life.reason)

    def _say_loss(self, holder: HandedWorker) -> None:
        if not holder.is_loss_said:
            holder.is_loss_said = True
            self._on_lost(holder.name, f"worker {holder.name} is lost: {holder.lost}; {_exit_of(holder.member)}")


def _exit_of(member: Member) -> str:
    if member.session is not None and member.session.started is not None:
        return member.last_exit or member.session.started.describe_exit(seconds=0.0)
    return f"look at its own output at {member.address}"
