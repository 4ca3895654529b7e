"""The mask thread: order, what is not there yet, errors of one request, masks that never return,
and its end. No test depends on how long anything takes: whoever is slow waits for an event.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import queue
import threading
import weakref

import numpy as np
import pytest
import torch

from dflash_moe.engine.sampling.token_masks import (
    MAX_STUCK,
    MaskAnswer,
    MaskRequest,
    MaskThread,
    packed,
    unpacked,
)
from dflash_moe.errors import ConfigError, UnsupportedError

VOCAB = 7
# An answer that must come is awaited so long. Only a failing test waits for all of it.
PATIENCE_S = 60.0


class Blocked:
    """A mask that says when it is asked, and returns when it is let go."""

    def __init__(self) -> None:
        self.is_asked, self.may_return = threading.Event(), threading.Event()

    def allowed(self, token_ids):
        self.is_asked.set()
        assert self.may_return.wait(PATIENCE_S)
        return [token_id in token_ids for token_id in range(VOCAB)]


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def masks():
    thread = MaskThread(VOCAB)
    yield thread
    assert thread.close(PATIENCE_S)


def answer_of(masks: MaskThread, mask, token_ids=(1, 2)) -> MaskAnswer | None:
    assert masks.request("only", mask, token_ids)
    return masks.take("only", PATIENCE_S)


def allowed(answer: MaskAnswer | None) -> list[bool]:
    assert answer is not None
    assert answer.allowed is not None
    return unpacked(answer.allowed, VOCAB).tolist()


def only(*token_ids: int) -> list[bool]:
    return [token_id in token_ids for token_id in range(VOCAB)]


@pytest.mark.parametrize(
    "given",
    [
        only(2, 5),
        np.array(only(2, 5)),
        torch.tensor(only(2, 5)),
        np.repeat(only(2, 5), 2)[::2],
        np.frombuffer(bytes(only(2, 5)), np.bool_),  # read-only
    ],
    ids=["list", "numpy", "torch", "strided", "read-only"],
)
def test_an_answer_has_a_bit_for_each_token_of_what_the_mask_gave(masks, given):
    answer = answer_of(masks, lambda token_ids: given)
    assert answer == MaskAnswer(bytes([1 << 2 | 1 << 5]))
    assert allowed(answer) == only(2, 5)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 151_936, 151_937])
def test_a_mask_is_kept_in_an_eighth_of_its_size_and_comes_back_as_it_was(size):
    given = torch.rand(size, generator=torch.Generator().manual_seed(size)) < 0.5
    bits = packed(given)
    assert len(bits) == (size + 7) // 8
    assert torch.equal(unpacked(bits, size), given)
    with pytest.raises(ConfigError, match=rf"a token mask has {len(bits) + 1} bytes; allowed: {len(bits)}, for {size} tokens"):
        unpacked(bits + b"0", size)


def test_the_mask_sees_the_tokens_of_the_time_of_the_request(masks):
    token_ids, seen = [1, 2], []
    blocked = Blocked()
    masks.request("first", blocked, token_ids)
    masks.request("second", seen.append, token_ids)
    token_ids.append(3)
    blocked.may_return.set()
    assert masks.take("second", PATIENCE_S) == MaskAnswer(None)
    assert seen == [(1, 2)]
    assert allowed(masks.take("first", 0)) == only(1, 2)


def test_what_is_not_there_yet_is_none_and_is_taken_later_once(masks):
    blocked = Blocked()
    masks.request("row", blocked, [4])
    assert blocked.is_asked.wait(PATIENCE_S)
    assert masks.take("row") is None
    assert masks.take("row", 0) is None
    blocked.may_return.set()
    assert allowed(masks.take("row", PATIENCE_S)) == only(4)
    assert masks.take("row", 0) is None
    assert masks.take("never requested", 0) is None


def test_requests_are_answered_in_their_order_by_one_thread_of_their_own(masks):
    order, threads = [], set()

    def note(token_ids):
        order.append(token_ids[0])
        threads.add(threading.get_ident())

    keys = list(range(50))
    assert masks.request_all([MaskRequest(key, note, (key,)) for key in keys]) == 50
    assert masks.take_all(keys, PATIENCE_S) == dict.fromkeys(keys, MaskAnswer(None))
    assert order == keys
    assert len(threads) == 1
    assert threading.get_ident() not in threads


class Shouting(Exception):
    """An error that cannot even be shown."""

    def __repr__(self) -> str:
        raise ValueError("no text")


def _raise(error: BaseException):
    raise error


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (
            lambda ids: _raise(KeyError("no rule")),
            r"token_mask: it raised KeyError\('no rule'\); allowed: bool \[7\] or None",
        ),
        (lambda ids: _raise(SystemExit(3)), r"it raised SystemExit\(3\)"),
        (lambda ids: _raise(Shouting()), r"it raised a Shouting"),
        (lambda ids: only(1)[:-1], r"it gave torch.bool \[6\]; allowed: bool \[7\] or None"),
        (lambda ids: [1.0] * VOCAB, r"it gave torch.float32 \[7\]"),
        (lambda ids: [only(1)], r"it gave torch.bool \[1, 7\]"),
        (lambda ids: "all", r"token_mask: it raised"),
        (lambda: None, r"it raised TypeError"),
    ],
)
def test_what_a_mask_does_wrong_is_an_error_of_its_request_alone(masks, mask, text):
    masks.request_all([MaskRequest("bad", mask, ()), MaskRequest("good", lambda ids: only(3), ())])
    answers = masks.take_all(["bad", "good"], PATIENCE_S)
    assert type(answers["bad"].error) is ConfigError
    with pytest.raises(ConfigError, match=text):
        raise answers["bad"].error
    assert (allowed(answers["good"]), answers["good"].error) == (only(3), None)


def test_a_typed_error_of_a_mask_stays_what_it_is(masks):
    error = UnsupportedError("the schema has a look-behind")
    assert answer_of(masks, lambda ids: _raise(error)) == MaskAnswer(error=error)


def test_a_full_queue_takes_the_first_requests_and_says_how_many():
    masks, blocked = MaskThread(VOCAB, max_waiting=3), Blocked()
    masks.request("blocked", blocked, [])
    assert blocked.is_asked.wait(PATIENCE_S)
    requests = [MaskRequest(key, lambda ids: None, ()) for key in "abcde"]
    assert masks.request_all(requests) == 3
    assert not masks.request("f", requests[0].mask, ())
    assert masks.request("b", requests[0].mask, ())  # in the place of its former request
    blocked.may_return.set()
    assert set(masks.take_all("abc", PATIENCE_S)) == set("abc")
    assert masks.take_all("def", 0) == {}
    assert masks.close(PATIENCE_S)


def test_a_request_replaces_what_its_key_had_before(masks):
    blocked = Blocked()
    masks.request("row", blocked, [1])
    assert blocked.is_asked.wait(PATIENCE_S)
    masks.request("row", lambda ids: only(6), [2])
    blocked.may_return.set()
    assert allowed(masks.take("row", PATIENCE_S)) == only(6)
    masks.request("row", lambda ids: only(5), [3])
    masks.request("other", lambda ids: None, [3])
    assert masks.take("other", PATIENCE_S) == MaskAnswer(None)
    masks.request("row", lambda ids: only(4), [3])  # an answer was there that nobody took
    assert allowed(masks.take("row", PATIENCE_S)) == only(4)


def test_what_was_dropped_is_not_answered(masks):
    blocked, asked = Blocked(), []
    masks.request("under way", blocked, [1])
    assert blocked.is_asked.wait(PATIENCE_S)
    masks.request("waiting", asked.append, [1])
    masks.request("after", lambda ids: None, [1])
    masks.drop(["under way", "waiting", "unknown"])
    blocked.may_return.set()
    assert masks.take("after", PATIENCE_S) == MaskAnswer(None)
    assert masks.take_all(["under way", "waiting"], 0) == {}
    assert asked == []


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_mask_that_never_returns_holds_up_nobody_else(is_dropped):
    clock, blocked = Clock(), Blocked()
    masks = MaskThread(VOCAB, max_call_s=10.0, clock=clock)
    masks.request("stuck", blocked, [])
    assert blocked.is_asked.wait(PATIENCE_S)
    masks.request("other", lambda ids: only(1), [])
    if is_dropped:
        masks.drop(["stuck"])
    clock.now = 9.9
    assert masks.take_all(["stuck", "other"], 0) == {}
    clock.now = 10.0
    assert allowed(masks.take("other", PATIENCE_S)) == only(1)
    answer = masks.take("stuck", 0)
    assert is_dropped == (answer is None)
    assert is_dropped or "did not return within 10 s" in str(answer.error)
    blocked.may_return.set()
    assert masks.close(PATIENCE_S)


def test_a_mask_that_returns_after_it_was_given_up_changes_nothing():
    clock, first, second = Clock(), Blocked(), Blocked()
    masks = MaskThread(VOCAB, max_call_s=10.0, clock=clock)
    masks.request("first", first, [])
    assert first.is_asked.wait(PATIENCE_S)
    given_up = masks._thread
    masks.request("second", second, [])
    clock.now = 10.0
    assert "did not return" in str(masks.take("first", 0).error)
    assert second.is_asked.wait(PATIENCE_S)
    first.may_return.set()
    given_up.join(PATIENCE_S)
    assert masks.take_all(["first", "second"], 0) == {}
    clock.now = 20.0
    assert "did not return" in str(masks.take("second", 0).error)
    second.may_return.set()
    assert masks.close(PATIENCE_S)


def test_masks_are_refused_when_too_many_never_returned():
    clock, stuck = Clock(), [Blocked() for _ in range(MAX_STUCK + 1)]
    masks = MaskThread(VOCAB, max_call_s=10.0, clock=clock)
    for place, blocked in enumerate(stuck):
        masks.request(place, blocked, [])
        assert blocked.is_asked.wait(PATIENCE_S)
        if place == MAX_STUCK:
            masks.request("last", lambda ids: None, [])
        clock.now += 10.0
        assert "did not return" in str(masks.take(place, 0).error)
    assert "5 masks never returned" in str(masks.take("last", 0).error)
    with pytest.raises(ConfigError, match="5 masks never returned"):
        masks.request("one more", lambda ids: None, [])
    for blocked in stuck:
        blocked.may_return.set()
    assert masks.close(PATIENCE_S)


def test_closing_waits_for_a_mask_only_until_the_deadline():
    masks, blocked = MaskThread(VOCAB), Blocked()
    masks.request("row", blocked, [])
    assert blocked.is_asked.wait(PATIENCE_S)
    assert not masks.close(0.0)
    with pytest.raises(ConfigError, match="has ended: it is closed"):
        masks.request("row", lambda ids: None, [])
    blocked.may_return.set()
    assert masks.close(PATIENCE_S)
    assert masks.take("row", 0) is None


def test_without_a_request_there_is_no_thread():
    before = threading.active_count()
    masks = MaskThread(VOCAB)
    assert masks.request_all([]) == 0
    assert masks.take_all([], PATIENCE_S) == {}
    assert threading.active_count() <= before  # fewer, where a thread of an earlier test ended
    assert masks.close(0.0)


class CountedLock:
    """A condition that counts how often one thread enters it."""

    def __init__(self, condition: threading.Condition) -> None:
        self._condition, self._thread, self.count = condition, threading.get_ident(), 0

    def __enter__(self):
        self.count += threading.get_ident() == self._thread
        return self._condition.__enter__()

    def __exit__(self, *outcome):
        return self._condition.__exit__(*outcome)

    def __getattr__(self, name):
        return getattr(self._condition, name)


@pytest.mark.parametrize("num_rows", [1, 64])
def test_a_step_takes_the_lock_twice_whatever_the_number_of_rows(masks, num_rows):
    lock = masks._condition = CountedLock(masks._condition)
    requests = [MaskRequest(key, lambda ids: None, ()) for key in range(num_rows)]
    masks.request_all(requests)
    masks.take_all(range(num_rows), PATIENCE_S)
    assert lock.count == 2


class Elsewhere:
    """A mask that is found on another thread: the test answers."""

    def __init__(self) -> None:
        self.questions = queue.SimpleQueue()

    def ask(self, token_ids, answer):
        self.questions.put((token_ids, answer))


def test_a_mask_that_is_found_elsewhere_lets_others_be_asked(masks):
    slow = Elsewhere()
    masks.request_all([MaskRequest("slow", slow, (1,)), MaskRequest("quick", lambda _: only(3), ())])
    assert allowed(masks.take("quick", PATIENCE_S)) == only(3)
    token_ids, answer = slow.questions.get(timeout=PATIENCE_S)
    assert token_ids == (1,)
    assert masks.take("slow", 0.0) is None
    answer(bytes([1 << 4, 0xFF]))
    assert allowed(masks.take("slow", PATIENCE_S)) == only(4)


@pytest.mark.parametrize(
    ("said", "words"),
    [(ConfigError("no text fits"), "no text fits"), (b"", "token_mask: it"), (5, "token_mask: it gave")],
)
def test_what_is_no_answer_from_elsewhere_ends_its_request(masks, said, words):
    mask = Elsewhere()
    masks.request("only", mask, ())
    mask.questions.get(timeout=PATIENCE_S)[1](said)
    answer = masks.take("only", PATIENCE_S)
    assert answer is not None
    assert words in str(answer.error)


def test_an_answer_that_nobody_wants_any_more_is_lost(masks):
    mask = Elsewhere()
    masks.request("only", mask, (1,))
    _, late = mask.questions.get(timeout=PATIENCE_S)
    masks.request("only", mask, (1, 2))
    _, answer = mask.questions.get(timeout=PATIENCE_S)
    late(bytes([1]))
    assert masks.take("only", 0.0) is None
    answer(bytes([2]))
    assert allowed(masks.take("only", PATIENCE_S)) == only(1)
    masks.request("only", mask, (1, 2, 3))
    _, late = mask.questions.get(timeout=PATIENCE_S)
    masks.drop(["only"])
    late(bytes([1]))
    assert masks.take("only", 0.0) is None


def test_a_mask_that_takes_no_question_says_so(masks):
    class Broken:
        def ask(self, token_ids, answer):
            raise KeyError("shape")

    assert "KeyError" in str(answer_of(masks, Broken()).error)


def test_a_thread_keeps_no_mask_whose_answer_was_taken(masks):
    class Held(Elsewhere):
        pass

    mask = Held()
    gone = threading.Event()
    weakref.finalize(mask, gone.set)
    masks.request("only", mask, ())
    mask.questions.get(timeout=PATIENCE_S)[1](None)
    assert masks.take("only", PATIENCE_S) == MaskAnswer()
    del mask
    assert gone.wait(PATIENCE_S)
