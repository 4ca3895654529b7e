"""The host's end of a control connection: one question at a time, answers in the order of the
questions, and no wait without a bound.

A conversation knows messages and deadlines, and turns a hang-up or a silence into a typed error.
What the questions mean is known only to HostSession.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from dflash_moe.errors import DflashError, ProtocolError, WorkerLost, WorkerTimeout
from dflash_moe.holders.owner import Owner
from dflash_moe.protocol.failures import LEAVING, to_error
from dflash_moe.protocol.framing import Connection, PeerGone
from dflash_moe.protocol.messages import Attached, Listening, Progress, Refusal, WeightsChanged
from dflash_moe.protocol.schema import Message

# After a hang-up the connection is read for at most this time. A refusal that the worker sent
# before it hung up has arrived already, so that the bound is met only when there is none.
LAST_WORDS_S = 0.1
# A goodbye is a courtesy, and nobody waits longer than this for a worker that does not read.
BYE_S = 0.2
# Whoever takes a notice waits so long for its end, and for a thread that reads answers meanwhile.
NOTICE_S = 0.05
# So many notices are taken at a time. A worker sends one per shard that changed, and one that talks
# without end must not hold up the thread that listens to all of them.
MAX_NOTICES = 4096
M = TypeVar("M", bound=Message)
N = TypeVar("N", bound=Message)


class Conversation:
    """Asks one worker questions and takes its answers. Any thread may call, in the process that
    made the conversation; a forked child is refused, because it would speak on the parent's
    connection.

    The conversation owns `connection`. `loss` makes a WorkerLost from what happened, and
    `quote_log` returns what the worker logged last, ready to be appended to a message. `on_notice`
    is told what the worker says unasked, from whatever thread reads it.
    """

    def __init__(
        self, worker: str, connection: Connection, *, loss: Callable[[str], WorkerLost], quote_log: Callable[[], str],
        on_notice: Callable[[WeightsChanged], None],
    ) -> None:  # fmt: skip
        self._worker = worker
        self._connection = connection
        self._loss = loss
        self._quote_log = quote_log
        # The lock is held from a question to its answer, for as long as the asking thread allows.
        self._lock = threading.Lock()
        # The holder of the lock writes here what it asks for, so that others can say what they
        # waited for.
        self._doing = ""
        # So many questions have no answer yet, that of the turn under way included. The others are
        # questions whose answers did not come in time. Answers come in the order of the questions,
        # so that those are awaited first, and thrown away.
        self._num_unanswered = 0
        self._on_notice = on_notice
        # So many messages have come. Any thread may look at it.
        self.num_received = 0
        # The worker's last word was that somebody told it to stop.
        self.has_left = False
        self._owner = Owner()

    @contextmanager
    def turn(self, doing: str, *, timeout_s: float, limit: str) -> Iterator[Turn]:
        """Gives the block the right to ask, for at most `timeout_s` seconds, which include the wait
        for other threads. `limit` names the setting that allows more, for the message. Notices that
        came along with an answer are taken when the block ends.

        Errors: WorkerTimeout that says what the connection is busy with; DflashError in a forked
        child.
        """
        self._owner.require_here()
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise WorkerTimeout(
                f"worker {self._worker} could not be asked to {doing} within {timeout_s:g} s ({limit}): another thread "
                f"waited for it to {self._doing} all the while",
                worker=self._worker,
            )
        self._doing = doing
        try:
            yield Turn(self, doing, deadline, timeout_s, limit)
        finally:
            try:
                # TLS takes whole records off the descriptor, so that nobody who polls that would
                # see a notice which is left behind in one.
                if self._connection.is_encrypted:
                    self._take_notices()
            finally:
                self._lock.release()

    @property
    def connection(self) -> Connection:
        """The connection itself, which the conversation keeps owning. The caller holds a turn."""
        return self._connection

    @property
    def is_encrypted(self) -> bool:
        """Whether nothing of it travels in clear. Any thread may ask."""
        return self._connection.is_encrypted

    @property
    def local_host(self) -> str:
        """The numeric address of this end; empty where it has none. Any thread may ask."""
        return self._connection.local_host

    def say(self, message: Message) -> None:
        """Sends a message that needs no answer. It never raises for a worker that is gone or
        stopped, and does nothing in a forked child.
        """
        if self._owner.is_here:
            with contextlib.suppress(DflashError):
                self._connection.send(message, deadline=time.monotonic() + BYE_S)

    def take_notices(self) -> None:
        """Reads all that the worker has said unasked. It never raises, and leaves the reading to
        another thread that waits for an answer; the connection is readable when this is called.
        """
        if not self._owner.is_here or not self._lock.acquire(timeout=NOTICE_S):
            return
        try:
            self._take_notices()
        finally:
            self._lock.release()

    def hang_up(self) -> None:
        """Ends the connection without a goodbye, so that a thread which waits for this worker
        returns. Any thread may call, also while another has the turn.
        """
        if self._owner.is_here:
            self._connection.hang_up()

    def close(self) -> None:
        """Closes the connection. It may be called again, and has no effect in a forked child."""
        if self._owner.is_here:
            self._connection.close()

    # The thread that calls the methods from here on holds the lock; a Turn calls most of them.

    def _take_notices(self) -> None:
        # However many have come, the descriptor may be readable for the first of them alone.
        until = time.monotonic() + NOTICE_S
        with contextlib.suppress(DflashError):
            for _ in range(MAX_NOTICES):
                if not self._connection.has_news():
                    return
                message = self._connection.receive(deadline=until, waiting_for="a notice")
                if isinstance(message, WeightsChanged):
                    self._on_notice(message)
                elif isinstance(message, Refusal) and message.code == LEAVING:
                    self.has_left = True
                else:
                    self._discard(message)

    def _ask(self, turn: Turn, message: Message, descriptors: Sequence[int]) -> None:
        # A worker that waits for the connection of a path learns by the next question that nobody
        # dials any more, and answers the former one then.
        self._send(turn, message, descriptors)
        self._num_unanswered += 1
        while self._num_unanswered > 1:
            self._discard(self._receive(turn))

    def _discard(self, stale: Message) -> None:
        """Throws away an answer to an earlier question that came after its deadline, and closes the
        descriptors that came with it.
        """
        if isinstance(stale, Attached):
            with contextlib.suppress(DflashError):
                for descriptor in self._connection.take_descriptors(stale.num_descriptors):
                    os.close(descriptor)
        if not isinstance(stale, (Listening, Progress)):  # those are not the end of an answer
            self._num_unanswered = max(0, self._num_unanswered - 1)  # 0 where nobody has asked

    def _answer(self, turn: Turn, wanted: type[M]) -> M:
        received = self._receive(turn)
        while turn.takes(received):
            received = self._receive(turn)
        self._num_unanswered -= 1
        if isinstance(received, Refusal):
            raise self._refused(received)
        if not isinstance(received, wanted):
            raise ProtocolError(f"worker {self._worker}: expected {wanted.__name__}, found {type(received).__name__}")
        return received

    def _send(self, turn: Turn, message: Message, descriptors: Sequence[int]) -> None:
        try:
            self._connection.send(message, deadline=turn.deadline, descriptors=descriptors)
        except PeerGone:
            # A refusal that the worker sent before it left explains more than the hang-up.
            self._raise_last_words()
            raise self._loss(f"hung up before it could {turn.doing}") from None
        except WorkerTimeout:
            raise self.late(turn) from None

    def _raise_last_words(self) -> None:
        answer: Message | None = None
        with contextlib.suppress(PeerGone, WorkerTimeout, ProtocolError):
            answer = self._connection.receive(deadline=time.monotonic() + LAST_WORDS_S, waiting_for="last words")
        if isinstance(answer, Refusal):
            raise self._refused(answer)

    def _refused(self, refusal: Refusal) -> DflashError:
        self.has_left |= refusal.code == LEAVING
        return to_error(refusal, worker=self._worker)

    def _receive(self, turn: Turn) -> Message:
        try:
            while isinstance(
                message := self._connection.receive(deadline=turn.deadline, waiting_for=turn.doing), WeightsChanged
            ):
                self._on_notice(message)
            self.num_received += 1
            return message
        except PeerGone:
            raise self._loss(f"hung up before it could {turn.doing}") from None
        except WorkerTimeout:
            raise self.late(turn) from None

    def take_descriptors(self, turn: Turn, count: int) -> list[int]:
        """Those of the answer to `turn`."""
        try:
            return self._connection.take_descriptors(count)
        except DflashError as error:
            text = f"worker {self._worker} was asked to {turn.doing}: {error}"
            raise error.reworded(text, worker=self._worker) from None

    def late(self, turn: Turn) -> WorkerTimeout:
        """Returns a WorkerTimeout that says what was asked, how long the host waited, which setting
        allows more, and what the worker logged last.
        """
        return WorkerTimeout(
            f"worker {self._worker} did not {turn.doing} within {turn.timeout_s:g} s without progress ({turn.limit})"
            f"{self._quote_log()}",
            worker=self._worker,
        )


class Turn:
    """The right to ask one question and to take its answer, while no other thread may ask. Only the
    thread that entered `Conversation.turn` uses it.
    """

    def __init__(self, conversation: Conversation, doing: str, deadline: float, timeout_s: float, limit: str) -> None:
        self._conversation = conversation
        self._take_interim: Callable[[Message], bool] = lambda _message: False
        self.doing = doing
        self.deadline = deadline
        self.timeout_s = timeout_s
        self.limit = limit

    def renew(self) -> None:
        """Gives the worker as much time again, because it made progress."""
        self.deadline = time.monotonic() + self.timeout_s

    def on(self, interim: type[N], call: Callable[[N], None]) -> None:
        """Has `call` take the messages of type `interim` that come before the answer. A turn knows
        one such type; a second call replaces the first.
        """

        def take(message: Message) -> bool:
            if isinstance(message, interim):
                call(message)
                return True
            return False

        self._take_interim = take

    def takes(self, message: Message) -> bool:
        """Hands an interim message to its taker; returns False where `message` is the answer."""
        return self._take_interim(message)

    def ask(self, message: Message, answer: type[M], descriptors: Sequence[int] = ()) -> M:
        """Sends `message` with copies of `descriptors`, which the caller keeps owning, and returns
        the answer.

        Errors: the typed error with which the worker refuses; WorkerLost, WorkerTimeout, and
        ProtocolError where the answer is of another type.
        """
        self._conversation._ask(self, message, descriptors)
        return self._conversation._answer(self, answer)

    def take_descriptors(self, count: int) -> list[int]:
        """Those that came with the answer, the caller's from now on; ProtocolError where there are
        more or fewer, DflashError where this process had no room for them.
        """
        return self._conversation.take_descriptors(self, count)
