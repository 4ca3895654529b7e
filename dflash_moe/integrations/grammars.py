"""Grammars of requests: they are compiled, and followed token by token, in processes with limits
(grammar_process.py). One thread here speaks with all of them, and nobody waits for another's.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import queue
import selectors
import socket
import threading
import time
import weakref
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dflash_moe.errors import ConfigError, DflashError, printable
from dflash_moe.integrations.grammar_process import ERROR, GRAMMAR, LENGTH, MASK, MEMORY_BYTES, STEP_S
from dflash_moe.integrations.grammar_starter import GrammarStarter

log = logging.getLogger(__name__)

# A grammar may take STEP_S of processor time for an answer, which a busy machine gives late.
PATIENCE_S = 9.0
SEND_S = 1.0
CLOSE_S = 5.0
# Processes at once. A grammar that is asked for beyond them takes the place of one that waits for
# its next question, and that one starts again from its tokens.
MAX_PROCESSES = 64
# A mask of 4 million tokens, or what becomes of a grammar of 64 KiB.
_MAX_ANSWER_BYTES = 1 << 19
_RECEIVE_BYTES = 1 << 18

# What comes of a question: the library's own form of a grammar, the bits of a mask, or an error.
Take = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Source:
    """A grammar as somebody gave it: its `kind` is json, regex, choice, grammar (Lark, or the GBNF
    of llama.cpp), lark or llguidance. Where `around` is not empty, it is a grammar of Lark in which
    it stands under the name `answer`.
    """

    kind: str
    text: str
    around: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """Asks what may follow tokens, as they travel, or without them what becomes of a grammar. `key`
    names the process that is asked.
    """

    key: Hashable
    source: Source
    message: bytes | None
    answer: Take


@dataclass(slots=True, eq=False)
class _Process:
    """One that follows a grammar, and the questions that it has not answered, the oldest first,
    each with the time by which it must be.
    """

    sock: socket.socket
    # At its end the process is ended.
    pipe: int
    questions: deque[tuple[float, _Question]] = field(default_factory=deque)
    received: bytearray = field(default_factory=bytearray)
    is_compiled: bool = False


class GrammarMask:
    """Says which tokens may follow in the choices of one request: what a `MaskThread` asks. The
    process of its grammar ends with the last reference to such a mask.
    """

    def __init__(self, grammars: Grammars, grammar: str) -> None:
        self._grammars = grammars
        self._source = Source("llguidance", grammar)
        grammars.hold(self._source, 1)
        weakref.finalize(self, grammars.hold, self._source, -1).atexit = False

    def ask(self, token_ids: Sequence[int], answer: Take) -> None:
        """Has the bits of what may follow these new tokens found; `answer` is called with them, or
        with the error that ends the choice, on another thread, once. It never waits.
        """
        self._grammars.ask(self._source, token_ids, answer)


class Grammars:
    """The grammars of one tokenizer. All methods are for any thread, and none but `close` waits.

    Nothing is started before the first grammar comes. Requests with the same grammar share its
    process, and what that has learnt of it.
    """

    def __init__(
        self, *, vocab_size: int, end_ids: Sequence[int], special: Mapping[str, int], tokenizer: str = "", niceness: int = 0,
        max_processes: int = MAX_PROCESSES,
    ) -> None:  # fmt: skip
        """`end_ids` end a text, which a grammar allows where it does; at least one is needed.
        `special` are the ids of special tokens. `tokenizer` is JSON as the library `tokenizers` has
        it; without it grammars are compiled and cannot be followed.
        """
        self._max_processes = max_processes
        self._numbers = itertools.count(1)
        # What the thread is to do: answer a question, note that so many more masks have a key, or
        # end. Whoever leaves something writes a byte into a socket, and the thread waits at its
        # other end.
        self._commands: queue.SimpleQueue[_Question | tuple[Hashable, int] | None] = queue.SimpleQueue()
        self._bell, self._wakes = socket.socketpair()
        self._bell.setblocking(False)
        self._wakes.setblocking(False)
        # Guards the two below. The collector may end a mask while this thread holds it.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        # -- owned by the thread from here on ------------------------------------------------------
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._processes: OrderedDict[Hashable, _Process] = OrderedDict()
        self._num_masks: Counter[Hashable] = Counter()
        self._waiting: deque[_Question] = deque()
        told = {"vocab_size": vocab_size, "end_ids": sorted(end_ids), "special": dict(special), "niceness": niceness}
        self._starter = GrammarStarter(told, tokenizer)

    def compile(self, source: Source, answer: Take) -> Hashable:
        """Has a grammar compiled. `answer` is called with its text for `mask`, or with the error,
        on another thread. Returns what `give_up` takes, which is to be called in any case.
        """
        key = next(self._numbers)
        self._leave(_Question(key, source, None, answer))
        return key

    def give_up(self, key: Hashable) -> None:
        """Ends the compiling of a grammar, if it has not ended."""
        self._leave((key, 0))

    def mask(self, grammar: str) -> GrammarMask:
        """Returns the mask of a grammar that was compiled."""
        return GrammarMask(self, grammar)

    def hold(self, source: Source, change: int) -> None:
        """Notes that so many more masks have a grammar."""
        self._leave((source, change))

    def ask(self, source: Source, token_ids: Sequence[int], answer: Take) -> None:
        """As `GrammarMask.ask`."""
        self._leave(_Question(source, source, array("i", token_ids).tobytes(), answer))

    def close(self) -> None:
        """Ends all processes. What was asked is answered with an error. It may be called twice."""
        self._leave(None)
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _leave(self, command: _Question | tuple[Hashable, int] | None) -> None:
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._commands.put(command)
                if self._thread is None and isinstance(command, _Question):
                    self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
                    self._thread.start()
            self._is_closed = is_closed or command is None
        if is_closed and isinstance(command, _Question):
            command.answer(_closed())
        # With bytes unread it wakes anyway.
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    # -- the thread --------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException:
            log.exception("the thread that speaks with grammars has failed")
        finally:
            with self._lock:
                self._is_closed = True
            # No command comes from now on.
            left = [question for process in self._processes.values() for _, question in process.questions]
            for key in list(self._processes):
                self._hang_up(key)
            while not self._commands.empty():
                if isinstance(command := self._commands.get_nowait(), _Question):
                    left.append(command)
            for question in (*left, *self._waiting):
                question.answer(_closed())
            self._starter.close()
            self._selector.close()
            self._wakes.close()
            self._bell.close()

    def _turn(self) -> bool:
        """Does what there is to do, and waits for more. Returns whether it goes on."""
        deadlines = [process.questions[0][0] for process in self._processes.values() if process.questions]
        limit = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for entry, _ in self._selector.select(limit):
            if entry.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._wakes.recv(_RECEIVE_BYTES)
            elif entry.data in self._processes:
                self._receive(entry.data)
        while not self._commands.empty():
            command = self._commands.get_nowait()
            if command is None:
                return False
            if isinstance(command, _Question):
                self._put(command)
            else:
                self._count(*command)
        now = time.monotonic()
        for key, process in list(self._processes.items()):
            if process.questions and process.questions[0][0] <= now:
                self._fail(key, ConfigError(f"the grammar gave no answer within {PATIENCE_S:g} s; {_SIMPLER}"))
        while self._waiting and self._has_room():
            self._put(self._waiting.popleft())
        return True

    def _has_room(self) -> bool:
        return len(self._processes) < self._max_processes or any(not process.questions for process in self._processes.values())

    def _count(self, key: Hashable, change: int) -> None:
        self._num_masks[key] += change
        if self._num_masks[key] <= 0:
            del self._num_masks[key]
            self._hang_up(key)
            self._waiting = deque(question for question in self._waiting if question.key != key)

    def _put(self, question: _Question) -> None:
        """Asks the process of a grammar, which is started where there is none."""
        key = question.key
        if key not in self._processes:
            if not self._has_room():
                self._waiting.append(question)
                return
            try:
                self._begin(question)
            except DflashError as error:
                question.answer(error)
                return
            except OSError as error:
                # This process has no more descriptors, for example. Others end, and it goes on.
                question.answer(DflashError(f"the process of a grammar cannot be started: {error.strerror}; try again"))
                return
        self._processes.move_to_end(key)
        if question.message is not None:
            self._send(question, question.message)

    def _begin(self, question: _Question) -> None:
        if len(self._processes) >= self._max_processes:
            self._hang_up(next(key for key, process in self._processes.items() if not process.questions))
        # Sockets that are left behind by an error close themselves, and pipes do not.
        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        try:
            self._starter.hand_over([theirs.fileno(), read_end])
        except BaseException:
            ours.close()
            os.close(write_end)
            raise
        finally:
            theirs.close()
            os.close(read_end)
        ours.settimeout(SEND_S)
        self._processes[question.key] = _Process(ours, write_end)
        self._selector.register(ours, selectors.EVENT_READ, question.key)
        first = question if question.message is None else _Question(question.key, question.source, None, _nothing)
        self._send(first, json.dumps(asdict(question.source)).encode())

    def _send(self, question: _Question, message: bytes) -> None:
        process = self._processes[question.key]
        process.questions.append((time.monotonic() + PATIENCE_S, question))
        # One that has ended, or takes nothing any more, is seen to have done so by its answers.
        with contextlib.suppress(OSError):
            process.sock.sendall(LENGTH.pack(len(message)) + message)

    def _receive(self, key: Hashable) -> None:
        process = self._processes[key]
        try:
            part = process.sock.recv(_RECEIVE_BYTES)
        except OSError:
            part = b""
        if not part:
            self._fail(key, _stopped())
            return
        process.received += part
        while len(process.received) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(process.received)
            if not 0 < size <= _MAX_ANSWER_BYTES or not process.questions:
                self._fail(key, DflashError("the process of a grammar answered what it never should"))
                return
            if len(process.received) < LENGTH.size + size:
                return
            kind, content = bytes(process.received[4:5]), bytes(process.received[5 : 4 + size])
            del process.received[: 4 + size]
            if kind == ERROR and not process.is_compiled:
                self._fail(key, _refused(content))
                return
            process.is_compiled = True
            _, question = process.questions.popleft()
            question.answer(content if kind == MASK else content.decode() if kind == GRAMMAR else _refused(content))

    def _fail(self, key: Hashable, error: DflashError) -> None:
        """Ends a process. The question that it was at gets the error, and all others too where the
        grammar itself was at fault; else they are asked again.
        """
        process = self._processes[key]
        self._hang_up(key)
        left = [question for _, question in process.questions]
        num_failed = 1 if process.is_compiled else len(left)
        for question in left[:num_failed]:
            question.answer(error)
        self._waiting.extend(left[num_failed:])

    def _hang_up(self, key: Hashable) -> None:
        process = self._processes.pop(key, None)
        if process is not None:
            self._selector.unregister(process.sock)
            process.sock.close()
            os.close(process.pipe)


_SIMPLER = "a simpler one is needed"


def _stopped() -> ConfigError:
    # What its process dies of: SIGPROF, an allocation that fails, or a stack that is full.
    return ConfigError(
        f"the grammar was stopped: it takes over {STEP_S:g} s of processor time or {MEMORY_BYTES >> 20} MiB of memory, "
        f"or is nested too deeply; {_SIMPLER}"
    )


def _refused(words: bytes) -> ConfigError:
    return ConfigError(printable(words.decode("utf-8", "replace")))


def _closed() -> DflashError:
    return DflashError("the engine is closed", code="cancelled")


def _nothing(_said: object) -> None:
    """The grammar is known to compile; its mask, or its error, comes next."""
