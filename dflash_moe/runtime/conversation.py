"""The host's end of a control connection: one question at a time, answers in the order of the
questions, and no wait without a bound.

Knows messages, deadlines and how a hang-up or a silence becomes an error; what the questions mean
is HostSession's matter.
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
from dflash_moe.protocol.failures import to_error
from dflash_moe.protocol.framing import Connection, PeerGone
from dflash_moe.protocol.messages import Attached, Listening, Progress, Refusal
from dflash_moe.protocol.schema import Message
from dflash_moe.runtime.owner import Owner

LAST_WORDS_S = 0.1  # a refusal that came before a hang-up has arrived already
BYE_S = 0.2  # a goodbye is a courtesy; nobody waits for a worker that does not read
M = TypeVar("M", bound=Message)
N = TypeVar("N", bound=Message)


class Conversation:
    """Questions to one worker and its answers. Any thread; belongs to the process that made it.

    Owns `connection`. `loss` makes a WorkerLost of what happened, `quote_log` adds what the worker
    logged last.
    """

    def __init__(
        self, worker: str, connection: Connection, *, loss: Callable[[str], WorkerLost], quote_log: Callable[[], str]
    ) -> None:
        self._worker = worker
        self._connection = connection
        self._loss = loss
        self._quote_log = quote_log
        # Held from a question to its answer, which may take as long as the one who asks allows.
        self._lock = threading.Lock()
        self._doing = ""  # what the holder of the lock asks for
        self._num_unanswered = 0  # questions whose answer did not come in time
        self._owner = Owner()

    @contextmanager
    def turn(self, doing: str, *, timeout_s: float, limit: str) -> Iterator[Turn]:
        """The right to ask, for at most `timeout_s`, the wait for it included. `limit` names the
        setting.

        Errors: WorkerTimeout saying what the connection is busy with; DflashError in a forked
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
            self._lock.release()

    @property
    def connection(self) -> Connection:
        """For the handshake, before any turn."""
        return self._connection

    def say(self, message: Message) -> None:
        """Sends what needs no answer; never raises for a worker that is gone or stopped."""
        if self._owner.is_here:
            with contextlib.suppress(DflashError):
                self._connection.send(message, deadline=time.monotonic() + BYE_S)

    def hang_up(self) -> None:
        """Ends the connection without a word, so that a thread which waits for this worker returns;
        any thread.
        """
        if self._owner.is_here:
            self._connection.hang_up()

    def close(self) -> None:
        """Closes the connection; safe to call again, and without effect in a forked child."""
        if self._owner.is_here:
            self._connection.close()

    # What a Turn does, with the lock held.

    def _ask(self, turn: Turn, message: Message, descriptors: Sequence[int]) -> None:
        while self._num_unanswered:
            self._discard(self._receive(turn))
        self._send(turn, message, descriptors)
        self._num_unanswered += 1

    def _discard(self, stale: Message) -> None:
        """An answer that came after its deadline."""
        if isinstance(stale, Attached):
            with contextlib.suppress(DflashError):
                for descriptor in self._connection.take_descriptors(stale.num_descriptors):
                    os.close(descriptor)
        if not isinstance(stale, (Listening, Progress)):  # those are not the end of an answer
            self._num_unanswered -= 1

    def _answer(self, turn: Turn, wanted: type[M]) -> M:
        received = self._receive(turn)
        while turn.takes(received):
            received = self._receive(turn)
        self._num_unanswered -= 1
        if isinstance(received, Refusal):
            raise to_error(received, worker=self._worker)
        if not isinstance(received, wanted):
            raise ProtocolError(f"worker {self._worker}: expected {wanted.__name__}, found {type(received).__name__}")
        return received

    def _send(self, turn: Turn, message: Message, descriptors: Sequence[int]) -> None:
        try:
            self._connection.send(message, deadline=turn.deadline, descriptors=descriptors)
        except PeerGone:
            # What it said before it left explains more than the hang-up.
            self._raise_last_words()
            raise self._loss(f"hung up before it could {turn.doing}") from None
        except WorkerTimeout:
            raise self.late(turn) from None

    def _raise_last_words(self) -> None:
        answer: Message | None = None
        with contextlib.suppress(PeerGone, WorkerTimeout, ProtocolError):
            answer = self._connection.receive(deadline=time.monotonic() + LAST_WORDS_S, waiting_for="last words")
        if isinstance(answer, Refusal):
            raise to_error(answer, worker=self._worker)

    def _receive(self, turn: Turn) -> Message:
        try:
            return self._connection.receive(deadline=turn.deadline, waiting_for=turn.doing)
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
            raise type(error)(text, worker=self._worker) from None

    def late(self, turn: Turn) -> WorkerTimeout:
        """A WorkerTimeout that says what was asked, how long, which setting allows more, and what
        the worker logged last.
        """
        return WorkerTimeout(
            f"worker {self._worker} did not {turn.doing} within {turn.timeout_s:g} s without progress ({turn.limit})"
            f"{self._quote_log()}",
            worker=self._worker,
        )


class Turn:
    """One question and its answer, while nobody else may ask."""

    def __init__(self, conversation: Conversation, doing: str, deadline: float, timeout_s: float, limit: str) -> None:
        self._conversation = conversation
        self._take_interim: Callable[[Message], bool] = lambda _message: False
        self.doing = doing
        self.deadline = deadline
        self.timeout_s = timeout_s
        self.limit = limit

    def renew(self) -> None:
        """The worker made progress: it has as much time again."""
        self.deadline = time.monotonic() + self.timeout_s

    def on(self, interim: type[N], call: Callable[[N], None]) -> None:
        """`call` gets messages of type `interim` that come before the answer."""

        def take(message: Message) -> bool:
            if isinstance(message, interim):
                call(message)
                return True
            return False

        self._take_interim = take

    def takes(self, message: Message) -> bool:
        """True where `message` was not the answer yet."""
        return self._take_interim(message)

    def ask(self, message: Message, answer: type[M], descriptors: Sequence[int] = ()) -> M:
        """Sends `message` and returns the answer. The descriptors stay the caller's.

        Errors: the worker's own; WorkerLost, WorkerTimeout, ProtocolError.
        """
        self._conversation._ask(self, message, descriptors)
        return self._conversation._answer(self, answer)

    def take_descriptors(self, count: int) -> list[int]:
        """Those that came with the answer, the caller's from now on; ProtocolError where there are
        more or fewer, DflashError where this process had no room for them.
        """
        return self._conversation.take_descriptors(self, count)
