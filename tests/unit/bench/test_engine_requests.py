"""engine_requests.py: what it draws, which ends of a request are faults, and which runs it fails.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bench.requests.clients import MOST_FAULTS, Fault, Load, Outcome, Trace, run_request
from bench.requests.drawn import MOST_NEW_TOKENS, MOST_PROMPT_TOKENS, Drawn, draw, wanted_blocks
from bench.requests.equality import Equality, keep_in, kept_in
from bench.requests.verdict import MOST_GROWN_BYTES, memory_row, requests_row, shown_line, summarise

STALL_S = 0.05


@dataclass(frozen=True)
class Delta:
    choice: int
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    error: str | None = None


class FakeStream:
    """Gives one list of deltas a take; once cancelled, the ends of its choices at once."""

    def __init__(self, engine: FakeEngine, deltas: list[list[Delta]], num_choices: int) -> None:
        self.engine, self.deltas, self.num_choices = engine, deque(deltas), num_choices
        self.cancelled = threading.Event()

    def take(self, timeout: float) -> list[Delta]:
        assert timeout == STALL_S
        if self.cancelled.is_set():
            self.engine.end()
            return [Delta(choice, (), "cancelled") for choice in range(self.num_choices)]
        if not self.deltas:
            self.engine.end()
            return []
        taken = self.deltas.popleft()
        if not self.deltas:
            self.engine.end()
        return taken

    def cancel(self) -> None:
        self.cancelled.set()


class FakeEngine:
    """Ends request `params` (a Drawn) with tokens that count up, or as `scripts` says for it."""

    def __init__(self, scripts: dict[int, Any] | None = None) -> None:
        self.scripts = scripts or {}
        self.streams: dict[int, FakeStream] = {}
        self.outstanding = self.most = 0
        self.lock = threading.Lock()

    def submit(self, prompt_ids: list[int], params: Drawn) -> FakeStream:
        assert prompt_ids == list(params.prompt_ids)
        script = self.scripts.get(params.number, whole(params))
        if isinstance(script, Exception):
            raise script
        with self.lock:
            self.outstanding += 1
            self.most = max(self.most, self.outstanding)
            self.streams[params.number] = FakeStream(self, script, params.num_choices)
            return self.streams[params.number]

    def end(self) -> None:
        with self.lock:
            self.outstanding -= 1


def whole(drawn: Drawn) -> list[list[Delta]]:
    """A token of each choice a take, to the last."""
    last = drawn.max_tokens - 1
    return [
        [Delta(choice, (place,), "length" if place == last else None) for choice in range(drawn.num_choices)]
        for place in range(drawn.max_tokens)
    ]


def request(number: int = 0, *, max_tokens: int = 3, n: int = 1, **more: Any) -> Drawn:
    return Drawn(number, (1, 2), {"max_tokens": max_tokens, "n": n}, **more)


def run(drawn: Drawn, script: Any = None) -> Outcome:
    return run_request(FakeEngine({} if script is None else {drawn.number: script}), drawn, drawn, STALL_S)


def load(engine: FakeEngine, num_requests: int, kept: list[Outcome] | None = None) -> Load:
    keep = (lambda _outcome: None) if kept is None else kept.append
    return Load(engine, request, lambda drawn: drawn, num_requests, lambda number: number % 3 == 0, keep, stall_s=STALL_S)


def test_a_number_gives_one_request_and_another_seed_others() -> None:
    drawn = [draw(number) for number in range(300)]
    assert drawn == [draw(number) for number in range(300)]
    assert [draw(number, 1).prompt_ids for number in range(300)] != [one.prompt_ids for one in drawn]


def test_every_kind_of_request_is_drawn_within_its_bounds() -> None:
    drawn = [draw(number) for number in range(2000)]
    assert all(1 <= len(one.prompt_ids) <= MOST_PROMPT_TOKENS and 1 <= one.max_tokens <= MOST_NEW_TOKENS for one in drawn)
    assert {one.num_choices for one in drawn} == {1, 2, 4}
    assert all(one.num_choices == 1 for one in drawn if one.sampling["temperature"] == 0.0)
    assert any(one.is_plain for one in drawn)
    assert any(one.sampling["temperature"] == 0.0 and not one.is_plain for one in drawn)
    assert any(one.cancel_after_s is not None for one in drawn)
    assert any(one.cancel_after_tokens == 0 for one in drawn)
    # A random beginning of 16 tokens is never shared by chance.
    beginnings = [one.prompt_ids[:16] for one in drawn if len(one.prompt_ids) > 16]
    assert len(set(beginnings)) < 0.8 * len(beginnings)


def test_choices_share_the_blocks_that_the_prompt_fills() -> None:
    one = Drawn(0, (0,) * 40, {"max_tokens": 20, "n": 1})
    assert one.num_blocks(16) == 4
    four = replace(one, sampling={"max_tokens": 20, "n": 4})
    assert four.num_blocks(16) == 2 + 4 * 2
    assert wanted_blocks([one, four], 3, 16) == 21


def test_tokens_of_all_choices_are_taken_to_the_end() -> None:
    assert run(request(n=2)) == Outcome(0, ((0, 1, 2), (0, 1, 2)), ("length", "length"))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ([[Delta(0, (5,))]], "nothing came for 0.05 s, or the stream ended"),
        ([[Delta(0, (5,), "stop"), Delta(0, (6,))]], r"choice 0 had ended \(stop\), and more came"),
        ([[Delta(0, (), "error", "worker w0 was lost")]], "choice 0 ended with error: worker w0 was lost"),
        ([[Delta(0, (1, 2, 3, 4), "stop")]], "choice 0 has 4 tokens of 3"),
        ([[Delta(0, (1, 2), "length")]], "choice 0 has 2 tokens of 3, and ended with length"),
        ([[Delta(0, (1,), "cancelled")]], "choice 0 was cancelled by nobody"),
    ],
)
def test_an_end_that_is_none_is_a_fault(script: list[list[Delta]], said: str) -> None:
    with pytest.raises(Fault, match=said):
        run(request(), script)


def test_a_request_is_cancelled_once_its_tokens_have_come() -> None:
    assert run(request(max_tokens=9, cancel_after_tokens=4)) == Outcome(0, ((0, 1, 2, 3),), ("cancelled",))
    # Tokens of all choices count.
    found = run(request(max_tokens=9, n=2, cancel_after_tokens=4))
    assert found == Outcome(0, ((0, 1), (0, 1)), ("cancelled", "cancelled"))
    assert run(request(cancel_after_tokens=0)).tokens == ((),)


def test_a_cancel_whose_time_never_comes_leaves_no_timer() -> None:
    assert run(request(cancel_after_s=3600.0)).reasons == ("length",)
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    for timer in timers:
        timer.join(10)
    assert not [timer for timer in timers if timer.is_alive()]


def test_a_request_with_a_fault_is_cancelled() -> None:
    engine, drawn = FakeEngine({0: [[Delta(0, (5,))]]}), request()
    with pytest.raises(Fault):
        run_request(engine, drawn, drawn, STALL_S)
    assert engine.streams[0].cancelled.is_set()


def test_a_load_ends_every_request_with_so_many_at_once_and_keeps_the_chosen() -> None:
    engine, kept = FakeEngine(), list[Outcome]()
    found = load(engine, 50, kept)
    found.run(4)
    assert (found.finished, found.tokens, found.reasons, found.faults) == (50, 150, {"length": 50}, [])
    assert sorted(one.number for one in kept) == list(range(0, 50, 3))
    assert 1 <= engine.most <= 4
    assert found.trace.finished == list(range(1, 51))


def test_a_request_that_the_engine_refuses_is_a_fault_and_the_others_go_on() -> None:
    found = load(FakeEngine({7: ValueError("no room")}), 20)
    found.run(3)
    assert found.finished == 19
    assert found.faults == ["request 7: ValueError: no room"]


def test_too_many_faults_end_the_run() -> None:
    found = load(FakeEngine({number: ValueError("lost") for number in range(1000)}), 1000)
    found.run(2)
    assert MOST_FAULTS <= len(found.faults) <= MOST_FAULTS + 1


def test_memory_that_grows_after_the_first_quarter_is_told() -> None:
    trace = Trace()
    for look, size in enumerate([10, 50, 90, 100, 100, 100, 104, 100, 100, 100, 101, 100]):
        trace.look(look, float(look), size)
    assert trace.grown_bytes() == 0
    leaking = Trace(anonymous_bytes=[100 * look for look in range(40)])
    assert leaking.grown_bytes() == 2000
    assert Trace(anonymous_bytes=[1, 2, 3]).grown_bytes() == 0


def compared(outcome: Outcome, alone: Outcome) -> Equality:
    found = Equality()
    found.compare([outcome], lambda number: request(number), lambda _drawn: alone)
    return found


@pytest.mark.parametrize(
    ("tokens", "reason", "different"),
    [
        ((1, 2, 3), "length", ""),
        ((1, 2), "cancelled", ""),
        ((), "cancelled", ""),
        ((1, 9, 3), "length", "request 0, choice 0: 3 tokens (length), alone 3 (length), they part at token 1"),
        ((1, 9), "cancelled", "request 0, choice 0: 2 tokens (cancelled), alone 3 (length), they part at token 1"),
        (
            (1, 2, 3, 4),
            "cancelled",
            "request 0, choice 0: 4 tokens (cancelled), alone 3 (length), they part at token 3",
        ),
        ((1, 2), "stop", "request 0, choice 0: 2 tokens (stop), alone 3 (length), they part at token 2"),
    ],
)
def test_tokens_and_ends_are_those_of_the_request_alone(tokens: tuple[int, ...], reason: str, different: str) -> None:
    found = compared(Outcome(0, (tokens,), (reason,)), Outcome(0, ((1, 2, 3),), ("length",)))
    assert found.different == ([different] if different else [])
    assert (found.choices, found.tokens) == (1, len(tokens))


def test_each_choice_is_compared_with_its_own() -> None:
    alone = Outcome(0, ((1,), (2,)), ("length", "length"))
    assert not compared(alone, alone).different
    assert len(compared(Outcome(0, ((2,), (1,)), ("length", "length")), alone).different) == 2


def test_kept_outcomes_are_read_as_they_were(tmp_path: Path) -> None:
    outcomes = [Outcome(0, ((1, 2), ()), ("length", "cancelled")), Outcome(20, ((3,),), ("stop",))]
    with (tmp_path / "outcomes").open("w") as file:
        for outcome in outcomes:
            keep_in(file)(outcome)
    assert list(kept_in(tmp_path / "outcomes")) == outcomes


@pytest.fixture
def good() -> dict[str, Any]:
    """A run in which everything is as it must be."""
    found = load(FakeEngine(), 20)
    found.run(2)
    found.forked, found.trace = 3, Trace()
    found.reasons["cancelled"] = 2
    blocks = {"num_blocks": 9, "num_free": 9, "error": ""}
    return {
        "load": found,
        "checks": [Equality(choices=1)],
        "blocks": blocks,
        "stats": {"preemptions": 4, "prefix_hits": 5},
    }


def unmet(run: dict[str, Any]) -> list[str]:
    lines = summarise(**run)
    assert all(shown_line(line).endswith(": met") == line["met"] for line in lines)
    return [line["what"] for line in lines if not line["met"]]


def test_a_good_run_meets_every_line(good: dict[str, Any]) -> None:
    assert unmet(good) == []
    assert requests_row(good["load"], 90, 9, good["stats"])["preemptions"] == 4
    assert memory_row(good["load"])["grown_bytes"] == 0


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"checks": [Equality()]}, "choices compared with the same request alone"),
        ({"checks": [Equality(choices=1, different=["request 0"])]}, "choices with other tokens than alone"),
        ({"blocks": {"num_blocks": 9, "num_free": 8, "error": ""}}, "blocks that nobody gave back"),
        ({"blocks": {"num_blocks": 9, "num_free": 9, "error": "block 3"}}, "errors in the books of blocks"),
        ({"stats": {"preemptions": 0, "prefix_hits": 5}}, "preemptions"),
        ({"stats": {"preemptions": 1, "prefix_hits": 0}}, "prefix hits"),
    ],
)
def test_a_run_that_is_not_as_it_must_be_is_told(good: dict[str, Any], changed: dict[str, Any], what: str) -> None:
    assert unmet(good | changed) == [what]


def test_a_run_without_forks_or_cancels_or_with_a_leak_is_told(good: dict[str, Any]) -> None:
    good["load"].forked, good["load"].finished = 0, 19
    good["load"].reasons["cancelled"] = 0
    good["load"].trace = Trace(anonymous_bytes=[0] * 6 + [MOST_GROWN_BYTES + 1] * 6)
    assert unmet(good) == [
        "requests that did not end as they should",
        "bytes that memory grew by from the second quarter to the last",
        "requests forked",
        "choices cancelled",
    ]
