"""The text of a choice: held back while it may be the beginning of a stop string, ended by the one
that is whole first, and the same however many tokens a step gave. It is made without torch.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_moe.engine import text as text_module
from dflash_moe.engine.request import LENGTH, STOP, TokenDelta
from dflash_moe.engine.sampling.token_logprobs import TokenLogprobs
from dflash_moe.engine.text import ChoiceText, Chunk
from dflash_moe.errors import RequestCancelled, WorkerLost


def test_what_only_passes_tokens_on_imports_neither_torch_nor_transformers():
    """Nor anything that they bring: such a process is to stay small."""
    modules = ["delivery", "request", "text", "sampling.sampling_params", "sampling.token_logprobs"]
    program = "".join(f"import dflash_moe.engine.{module}\n" for module in modules)
    unwanted = {"torch", "transformers", "tokenizers", "numpy", "dflash_moe._core"}
    program += f"import sys; print(sorted({unwanted} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


class Letters:
    """A tokenizer whose tokens are characters."""

    all_special_ids: Sequence[int] = ()

    def decode(self, token_ids: Sequence[int], **_options: Any) -> str:
        return "".join(map(chr, token_ids))


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def pushed(stops: Sequence[str], parts: Iterable[str], reason: str | None = LENGTH) -> tuple[ChoiceText, list[Chunk]]:
    """A choice that got a delta for each part, the last one with the reason of its end."""
    texts = list(parts)
    choice = ChoiceText(Letters(), stops, 0)
    reasons = [*[None] * (len(texts) - 1), reason]
    deltas = [TokenDelta(0, ids(text), finish_reason=end) for text, end in zip(texts, reasons, strict=True)]
    found = [choice.push(delta) for delta in deltas]
    return choice, [chunk for chunk in found if chunk is not None]


@given(text=st.text("ab", max_size=12), stop=st.text("abc", min_size=1, max_size=8))
def test_no_more_is_held_back_than_a_stop_string_may_begin_with(text, stop):
    ends = [length for length in range(1, len(stop)) if length <= len(text) and text.endswith(stop[:length])]
    assert text_module.overlap(text, stop) == max(ends, default=0)


def test_text_comes_at_once_where_no_stop_string_can_begin():
    _, chunks = pushed(["\n\n"], ["one", "\n", "two", "\n", "\n", "never"])
    assert [chunk.text for chunk in chunks] == ["one", "", "\ntwo", "", ""]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, None, None, STOP]


def test_a_beginning_of_a_stop_string_that_does_not_go_on_is_given_at_the_end():
    choice, chunks = pushed(["END"], ["wEN", "EN"])
    assert [chunk.text for chunk in chunks] == ["w", "ENEN"]
    assert choice.completion(3, 5).finish_reason == LENGTH
    assert (choice.completion(3, 5).prompt, choice.completion(3, 5).prompt_tokens) == (3, 5)


def test_tokens_and_logprobs_end_with_the_token_that_made_the_stop_string_whole():
    choice = ChoiceText(Letters(), ["b"], 0)
    logprobs = tuple(TokenLogprobs(token, -1.0, 1, ()) for token in ids("abcd"))
    chunk = choice.push(TokenDelta(0, ids("abcd"), logprobs))
    assert chunk == Chunk("a", ids("ab"), 0, STOP, logprobs[:2], stop_string="b", text_offsets=(0, 1))
    assert choice.push(TokenDelta(0, ids("efg"), finish_reason=LENGTH)) is None
    found = choice.completion(0, 1)
    assert (found.text, found.token_ids, found.finish_reason, found.logprobs) == ("a", ids("ab"), STOP, logprobs[:2])


@pytest.mark.parametrize(("stops", "expected"), [(["abc", "b"], "xa"), (["b", "ab"], "x"), (["aab", "ab"], "x")])
def test_the_stop_string_that_is_whole_first_wins_and_among_those_the_longest(stops, expected):
    for parts in (["xabc"], ["xa", "bc"], ["x", "a", "b", "c"]):
        assert "".join(chunk.text for chunk in pushed(stops, parts)[1]) == expected


def by_characters(stops: Sequence[str], text: str) -> str:
    """What is before the first stop string of a text that grows by characters."""
    for end in range(1, len(text) + 1):
        if begins := [end - len(stop) for stop in stops if text[:end].endswith(stop)]:
            return text[: min(begins)]
    return text


@given(
    parts=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=6),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_how_steps_cut_the_tokens_changes_nothing(parts, stops):
    choice, chunks = pushed(stops, parts)
    whole = "".join(parts)
    expected = by_characters(stops, whole)
    assert "".join(chunk.text for chunk in chunks) == choice.completion(0, 1).text == expected
    assert choice.is_stopped == any(stop in whole for stop in stops)
    single, _ = pushed(stops, whole)
    assert single.token_ids == choice.token_ids == [token for chunk in chunks for token in chunk.token_ids]


@given(
    parts=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=6),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_no_text_that_was_given_is_taken_back_and_none_is_held_without_need(parts, stops):
    _, chunks = pushed(stops, parts)
    begun = itertools.accumulate(parts)
    for given_text, text in zip(itertools.accumulate(chunk.text for chunk in chunks), begun, strict=False):
        assert text.startswith(given_text)
        held = text[len(given_text) :]
        assert not held or any(stop.startswith(held) or stop in held for stop in stops)


def test_an_error_ends_the_choice_and_each_caller_gets_one_of_its_own():
    error = WorkerLost("request 1: worker w1 was lost", worker="w1", layer=3)
    raised = []
    for _ in range(2):
        with pytest.raises(WorkerLost, match="worker w1 was lost") as found:
            ChoiceText(Letters(), (), 0).push(TokenDelta(0, finish_reason="error", error=error))
        raised.append(found.value)
    assert raised[0] is not raised[1] is not error
    assert [(one.worker, one.layer, one.code) for one in raised] == [("w1", 3, "worker_lost")] * 2


def test_a_choice_that_has_met_its_stop_string_hears_of_no_error():
    choice, _ = pushed(["b"], ["b"], None)
    assert choice.push(TokenDelta(0, finish_reason="cancelled", error=RequestCancelled("closed"))) is None
    assert choice.completion(0, 1).finish_reason == STOP


def test_times_are_those_of_the_steps_and_not_of_the_caller():
    choice = ChoiceText(Letters(), (), 0)
    begun = TokenDelta(0).time_s
    for seconds, text in ((1.0, "a"), (1.5, "bc"), (2.0, "d")):
        choice.push(TokenDelta(0, ids(text), time_s=begun + seconds))
    choice.push(TokenDelta(0, finish_reason="cancelled", time_s=begun + 60))
    found = choice.completion(0, 1)
    assert found.ttft_s == pytest.approx(1.0, abs=0.5)
    assert found.tpot_s == pytest.approx(1.0 / 3)
    assert ChoiceText(Letters(), (), 0).completion(0, 1).ttft_s is None
