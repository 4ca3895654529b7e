"""The hook for grammars: which tokens may come next, said by a user's object. `MaskThread` asks it
on one thread of its own, while the engine computes the step before.

What such an object does is unknown: it may be slow, raise, or never return. None of that may hold
up other requests, so that the engine waits a few milliseconds only and else leaves the row out.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from dflash_moe.errors import ConfigError, DflashError, shown

# A row whose mask is not there by then sits out one step.
DEADLINE_S = 0.002
# A mask that takes longer has failed, and its thread is given up.
MAX_CALL_S = 10.0
# So many threads that were given up are replaced by another one. With the next that has to be given
# up, masks are refused altogether: such a thread cannot be ended, and each may use a core for as
# long as the process lives.
MAX_STUCK = 4
MAX_WAITING = 4096
CLOSE_S = 2.0


class AskedMask(Protocol):
    """A mask that is found elsewhere, such as `integrations.grammars.GrammarMask`: it takes a
    question and answers later, so that nobody's mask waits for another's.
    """

    def ask(self, token_ids: Sequence[int], answer: Callable[[Any], None], /) -> None:
        """Takes the question of `TokenMask.allowed` at once, and has `answer` called within
        seconds, on any thread, with what that returns, with its bits as `packed` makes them, or
        with the DflashError that ends the choice.
        """
        ...


class TokenMask(Protocol):
    """Says which tokens may follow. A request has one, or one for each of its choices."""

    def allowed(self, token_ids: Sequence[int], /) -> Any:
        """Returns bool [vocab_size], a numpy array, a torch tensor or a list, False for what must
        not come next, or None where everything may. `token_ids` are all new tokens of the choice.

        It is called on the mask thread, one call at a time, and may be asked about the same tokens
        again. What it raises ends its request only.
        """
        ...


@dataclass(frozen=True, slots=True)
class MaskAnswer:
    """What a mask said: `allowed`, as `packed` makes it, or None for all; or the error that ends
    its request.
    """

    allowed: bytes | None = None
    error: DflashError | None = None


def packed(allowed: torch.Tensor) -> bytes:
    """Returns bool [size] on the processor as bits, which is how a mask is kept and passed on:
    ceil(size / 8) bytes, of which byte i has in its bit j, from the lowest on, place 8 * i + j.
    """
    return np.packbits(allowed.numpy(), bitorder="little").tobytes()


def unpacked(bits: bytes, size: int) -> torch.Tensor:
    """Returns the bool [size] on the processor that was `packed`. Raises ConfigError for bits of
    another size.
    """
    if len(bits) != -(-size // 8):
        raise ConfigError(f"a token mask has {len(bits)} bytes; allowed: {-(-size // 8)}, for {size} tokens")
    return torch.from_numpy(np.unpackbits(np.frombuffer(bits, np.uint8), count=size, bitorder="little").view(np.bool_))


# What the eight tokens of a byte of a mask add to their logits, float32 [256, 8].
_BIASES = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf).astype(
    np.float32
)


class MaskedRows:
    """Rows of logits in the processor's memory without what their masks exclude. It keeps the
    memory, because to map as much anew takes several times as long as to fill it.
    """

    def __init__(self) -> None:
        self._values = np.empty((0, 0), np.float32)
        self._biases = np.empty((0, 8), np.float32)

    def of(self, logits: np.ndarray[Any, Any], masks: Mapping[int, bytes]) -> np.ndarray[Any, Any]:
        """Returns float32 [num_masks, vocab_size], valid until the next call: for each mask the row
        of `logits`, float32 [num_rows, vocab_size], that it is for, with -inf where nothing may
        come. A mask has its ceil(vocab_size / 8) bytes.
        """
        width = logits.shape[1]
        if self._values.shape[0] < len(masks) or self._values.shape[1] != width:
            self._values = np.empty((len(masks), width), np.float32)
            self._biases = np.empty((-(-width // 8), 8), np.float32)
        # A row that has inf and -inf is refused by whoever asks.
        with np.errstate(invalid="ignore"):
            for place, (row, bits) in enumerate(masks.items()):
                np.take(_BIASES, np.frombuffer(bits, np.uint8), axis=0, out=self._biases, mode="clip")
                np.add(logits[row], self._biases.reshape(-1)[:width], out=self._values[place])
        return self._values[: len(masks)]


@dataclass(frozen=True, slots=True, eq=False)
class MaskRequest:
    """Asks `mask` (a TokenMask, a function like its method, or an AskedMask) what may follow
    `token_ids`. `key` names the row: request, epoch, choice and, of a row with drafts, its place.
    """

    key: Hashable
    mask: TokenMask | AskedMask | Callable[[Sequence[int]], Any]
    token_ids: tuple[int, ...]


class MaskThread:
    """One thread that asks masks in the order of the requests. It starts with the first of them.

    All methods are for the engine thread. Each takes the one lock once, for any number of keys.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        max_waiting: int = MAX_WAITING,
        max_call_s: float = MAX_CALL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._vocab_size, self._max_waiting, self._max_call_s = vocab_size, max_waiting, max_call_s
        self._clock = clock  # tells how long a mask takes
        # It guards all fields below.
        self._condition = threading.Condition()
        self._waiting: dict[Hashable, MaskRequest] = {}
        self._answers: dict[Hashable, MaskAnswer] = {}
        # Those that an AskedMask has taken.
        self._begun: dict[Hashable, MaskRequest] = {}
        # The one that the thread is at, None where nobody wants its answer any more.
        self._asked: MaskRequest | None = None
        self._busy_since: float | None = None
        self._thread: threading.Thread | None = None
        self._num_stuck = 0
        self._is_closed = False

    def request(
        self, key: Hashable, mask: TokenMask | AskedMask | Callable[[Sequence[int]], Any], token_ids: Sequence[int]
    ) -> bool:
        """Queues one request as `request_all` does. Returns False where the queue is full."""
        return self.request_all((MaskRequest(key, mask, tuple(token_ids)),)) == 1

    def request_all(self, requests: Sequence[MaskRequest]) -> int:
        """Queues requests and returns how many of them, the first ones, found room. The others sit
        out a step and are requested again. A request replaces what its key had before, an answer
        that nobody took included.

        Errors: ConfigError where no thread can answer: it is closed, it was given up too often, or
        the system allows no more threads.
        """
        if not requests:
            return 0
        with self._condition:
            if self._thread is None:
                self._start_thread()
            if self._is_closed or self._thread is None:
                raise self._no_thread()
            num_queued = 0
            for request in requests:
                self._forget(request.key)
                if len(self._waiting) + len(self._begun) + len(self._answers) >= self._max_waiting:
                    break
                self._waiting[request.key] = request
                num_queued += 1
            self._condition.notify_all()
            return num_queued

    def take(self, key: Hashable, deadline_s: float = DEADLINE_S) -> MaskAnswer | None:
        """Returns the answer to one request as `take_all` does, None where it is not there yet."""
        return self.take_all((key,), deadline_s).get(key)

    def take_all(self, keys: Sequence[Hashable], deadline_s: float = DEADLINE_S) -> dict[Hashable, MaskAnswer]:
        """Takes the answers to these requests, and waits `deadline_s` at most for all of them
        together. What is missing is not there yet: its row sits out a step, and is taken later
        without being requested again.
        """
        until = time.monotonic() + deadline_s
        with self._condition:
            while not all(key in self._answers for key in keys):
                self._give_up_stuck()
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._condition.wait(left)
            return {key: self._answers.pop(key) for key in keys if key in self._answers}

    def drop(self, keys: Sequence[Hashable]) -> None:
        """Forgets requests and answers of rows that ended. An answer that comes later is lost."""
        with self._condition:
            for key in keys:
                self._forget(key)

    def close(self, deadline_s: float = CLOSE_S) -> bool:
        """Ends the thread and forgets everything. Returns False where a mask did not return within
        the deadline; its thread is left behind. May be called twice.
        """
        with self._condition:
            self._is_closed = True
            self._waiting.clear()
            self._answers.clear()
            self._begun.clear()
            self._asked = None
            thread = self._thread
            self._condition.notify_all()
        if thread is None:
            return True
        thread.join(deadline_s)
        return not thread.is_alive()

    def _forget(self, key: Hashable) -> None:
        self._waiting.pop(key, None)
        self._answers.pop(key, None)
        self._begun.pop(key, None)
        if self._asked is not None and self._asked.key == key:
            self._asked = None

    def _start_thread(self) -> None:
        self._thread = None
        if self._is_closed or self._num_stuck > MAX_STUCK:
            return
        thread = threading.Thread(target=self._run, name="dflash-masks", daemon=True)
        self._thread = thread
        try:
            thread.start()
        except RuntimeError:  # as many threads as the system allows
            self._thread = None

    def _no_thread(self) -> ConfigError:
        reason = "it is closed" if self._is_closed else f"{self._num_stuck} masks never returned, or there are too many threads"
        return ConfigError(f"token_mask: the thread that asks token masks has ended: {reason}; send requests without a mask")

    def _give_up_stuck(self) -> None:
        """Has another thread ask the other masks where one has taken too long, which is answered
        for. The caller holds the lock.
        """
        if self._busy_since is None or self._clock() - self._busy_since < self._max_call_s:
            return
        if self._asked is not None:
            error = ConfigError(f"token_mask: it did not return within {self._max_call_s:g} s; allowed: masks that are quicker")
            self._answers[self._asked.key] = MaskAnswer(error=error)
        self._asked, self._busy_since = None, None
        self._num_stuck += 1
        self._start_thread()
        if self._thread is None:
            self._answers.update((key, MaskAnswer(error=self._no_thread())) for key in self._waiting)
            self._waiting.clear()

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._condition:
                while not self._waiting and not self._is_closed:
                    self._condition.wait()
                if self._is_closed:
                    return
                request = self._asked = self._waiting.pop(next(iter(self._waiting)))
                self._busy_since = self._clock()
                is_later = hasattr(type(request.mask), "ask")
                if is_later:
                    self._begun[request.key] = request
            answer = None
            if is_later:
                self._hand_over(request)
            else:
                allowed: Any = getattr(request.mask, "allowed", request.mask)
                answer = self._judged(partial(allowed, request.token_ids))
            with self._condition:
                if self._thread is not me:  # given up while it asked; another thread has its place
                    return
                self._busy_since = None
                if self._asked is request:
                    if answer is not None:
                        self._answers[request.key] = answer
                    self._asked = None
                self._condition.notify_all()
            # A mask may hold a process, and is to end with its request.
            del request

    def _hand_over(self, request: MaskRequest) -> None:
        """Gives a question to an AskedMask."""
        try:
            request.mask.ask(request.token_ids, lambda said: self._put(request, said))  # type: ignore[union-attr]
        except BaseException as error:  # noqa: BLE001 - as in `_judged`
            self._put(request, ConfigError(f"token_mask: it raised {shown(error)}; allowed: to take a question"))

    def _put(self, request: MaskRequest, said: Any) -> None:
        """Keeps what an AskedMask has answered, if anybody still wants it. Any thread."""
        answer = self._judged(lambda: said)
        with self._condition:
            if self._begun.get(request.key) is request:
                del self._begun[request.key]
                self._answers[request.key] = answer
                self._condition.notify_all()

    def _judged(self, say: Callable[[], Any]) -> MaskAnswer:
        try:
            said = say()
            if said is None or isinstance(said, DflashError):
                return MaskAnswer(error=said)
            return MaskAnswer(self._checked(said))
        except DflashError as error:
            return MaskAnswer(error=error)
        except BaseException as error:  # noqa: BLE001 - a user's code; its request ends, the thread goes on
            return MaskAnswer(
                error=ConfigError(f"token_mask: it raised {shown(error)}; allowed: bool [{self._vocab_size}] or None")
            )

    def _checked(self, said: Any) -> bytes:
        if isinstance(said, bytes) and len(said) >= -(-self._vocab_size // 8):
            return said[: -(-self._vocab_size // 8)]
        # Packing copies, because the mask may use its memory again for its next answer.
        allowed = said.detach().cpu() if isinstance(said, torch.Tensor) else torch.tensor(said)
        if allowed.dtype != torch.bool or tuple(allowed.shape) != (self._vocab_size,):
            raise ConfigError(
                f"token_mask: it gave {allowed.dtype} {list(allowed.shape)}; allowed: bool [{self._vocab_size}] or None"
            )
        return packed(allowed)
