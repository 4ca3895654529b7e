"""Grammars and the processes that follow them: masks by tokens, whatever was asked before, and ends
of processes, which cost the question that they were at.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")

from dflash_moe.errors import ConfigError, DflashError
from dflash_moe.integrations import grammars as module
from dflash_moe.integrations.grammars import GrammarMask, Grammars, Source

WAIT_S = 60.0
# Words of more than one letter are what a mask may get wrong.
WORDS = [
    "<end>",
    "<think>",
    "</think>",
    *(chr(letter) for letter in range(32, 127)),
    "\n",
    "ab",
    "abc",
    '{"',
    '":',
    "</th",
    "ink>",
    "}x",
]
IDS = {word: place for place, word in enumerate(WORDS)}
END = IDS["<end>"]
SPECIAL = {word: IDS[word] for word in ("<end>", "<think>", "</think>")}
# With MANY letters this grammar takes seconds for a step.
AMBIGUOUS = 'start: start start | "a"'
MANY = ["a"] * 600
A_OR_B = 'start: "a" "b"? | "b"'


def tokenizer_json() -> str:
    """A tokenizer of WORDS, as the library `tokenizers` writes one."""
    added = [
        {
            "id": IDS[word], "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": True,
        }
        for word in SPECIAL
    ]  # fmt: skip
    letters = {"\n": "Ċ", " ": "Ġ"}
    vocab = {letters.get(word, word): place for word, place in IDS.items()}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return json.dumps(
        {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False, "ignore_merges": True, "vocab": vocab, "merges": [],
            },
        }
    )  # fmt: skip


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    # More ids than there are words, as models have.
    found = Grammars(vocab_size=131, end_ids=[END], special=SPECIAL, tokenizer=tokenizer_json())
    yield found
    found.close()


class Asked:
    """An answer that may not be there yet."""

    def __init__(self) -> None:
        self._there = threading.Event()
        self._said: Any = None

    def __call__(self, said: Any) -> None:
        assert not self._there.is_set()
        self._said = said
        self._there.set()

    def get(self) -> Any:
        assert self._there.wait(WAIT_S)
        return self._said


def tokens(*words: str) -> list[int]:
    return [IDS[word] for word in words]


def ask(mask: GrammarMask, token_ids: Sequence[int]) -> Any:
    asked = Asked()
    mask.ask(token_ids, asked)
    return asked.get()


def allowed(mask: GrammarMask, *words: str) -> set[str]:
    """The words that may follow these."""
    bits = ask(mask, tokens(*words))
    assert isinstance(bits, bytes), bits
    return {word for word, place in IDS.items() if bits[place // 8] >> place % 8 & 1}


def compiled(grammars: Grammars, source: Source) -> Any:
    asked = Asked()
    key = grammars.compile(source, asked)
    try:
        return asked.get()
    finally:
        grammars.give_up(key)


def processes(grammars: Grammars) -> list[int]:
    """Those that follow grammars now, by their process ids."""
    starter = grammars._starter.pid
    return [int(pid) for pid in Path(f"/proc/{starter}/task/{starter}/children").read_text().split()]


def wait_until(is_so: Any) -> None:
    for _ in range(int(WAIT_S / 0.01)):
        if is_so():
            return
        threading.Event().wait(0.01)
    pytest.fail("it was not so in time")


def test_what_may_follow_is_words_with_which_the_text_can_go_on(grammars):
    mask = grammars.mask('start: "abc" | "abd" | "x"')
    assert allowed(mask) == {"a", "ab", "abc", "x"}
    assert allowed(mask, "ab") == {"c", "d"}
    assert allowed(mask, "abc") == {"<end>"}
    assert allowed(mask, "abc", "<end>") == {"<end>"}


def test_the_same_tokens_have_the_same_answer_in_any_order(grammars):
    mask, other = grammars.mask(A_OR_B), grammars.mask(A_OR_B)
    fresh = {(): {"a", "ab", "b"}, ("a",): {"b", "<end>"}, ("b",): {"<end>"}, ("a", "b"): {"<end>"}}
    for words in [(), ("a", "b"), ("a",), ("a",), (), ("b",), ("a", "b"), ("a",), ()]:
        assert allowed(mask, *words) == allowed(other, *words) == fresh[words]
    # Both masks have one process.
    assert len(processes(grammars)) == 1


def test_tokens_that_the_grammar_does_not_take_are_an_error_of_that_question_only(grammars):
    mask = grammars.mask(A_OR_B)
    error = ask(mask, tokens("x"))
    assert isinstance(error, ConfigError)
    assert "doesn't satisfy the grammar" in str(error)
    assert allowed(mask, "a") == {"b", "<end>"}


def test_json_has_little_white_space_between_its_parts(grammars):
    text = compiled(grammars, Source("json", '{"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}'))
    mask = grammars.mask(text)
    assert allowed(mask) == {"{", '{"'}
    assert {" ", "\n", '"'} <= allowed(mask, "{")
    assert " " not in allowed(mask, "{", " ")
    assert " " in allowed(mask, "{", "\n")


def test_a_grammar_may_stand_within_another(grammars):
    around = f"start: (<[{IDS['<think>']}]> FREE <[{IDS['</think>']}]>)? @answer\nFREE: /(.|\\n)*/"
    for source, first in (
        (Source("json", '{"enum": [7]}', around), {"7"}),
        (Source("grammar", A_OR_B, around), {"a", "ab", "b"}),
    ):
        mask = grammars.mask(compiled(grammars, source))
        assert allowed(mask) == {"<think>", *first}
        assert allowed(mask, "<think>", "x") == set(WORDS) - {"<end>", "<think>"}
        assert allowed(mask, "<think>", "x", "</think>") == first


def test_what_cannot_be_compiled_says_why(grammars):
    for source, words in (
        (Source("json", '{"type": "x"}'), "Invalid type: x"), (Source("regex", "("), "unclosed group"),
        (Source("regex", "a?" * 30_000), "was stopped: it takes over"),
    ):  # fmt: skip
        error = compiled(grammars, source)
        assert isinstance(error, ConfigError)
        assert words in str(error)
    assert isinstance(compiled(grammars, Source("regex", "a")), str)


def test_a_step_that_takes_too_long_ends_itself_and_nobody_waits_for_it(grammars):
    slow, other = grammars.mask(AMBIGUOUS), grammars.mask(A_OR_B)
    assert "a" in allowed(slow, "a")
    stuck = Asked()
    slow.ask(tokens(*MANY), stuck)
    assert allowed(other) == {"a", "ab", "b"}
    error = stuck.get()
    assert isinstance(error, ConfigError)
    assert "was stopped" in str(error)
    # Another question is another matter.
    assert "a" in allowed(slow, "a")


def test_questions_behind_one_that_ended_the_process_are_answered_by_another(grammars):
    mask = grammars.mask(A_OR_B)
    allowed(mask)
    (pid,) = processes(grammars)
    os.kill(pid, signal.SIGSTOP)
    first, second = Asked(), Asked()
    mask.ask(tokens("a"), first)
    mask.ask(tokens("b"), second)
    (process,) = grammars._processes.values()
    wait_until(lambda: len(process.questions) == 2)
    os.kill(pid, signal.SIGKILL)
    assert isinstance(first.get(), ConfigError)
    assert isinstance(second.get(), bytes)


def test_a_process_that_does_not_answer_is_given_up(grammars, monkeypatch):
    mask = grammars.mask(A_OR_B)
    allowed(mask)
    (pid,) = processes(grammars)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    assert "no answer within" in str(ask(mask, tokens("a")))
    monkeypatch.undo()
    assert allowed(mask, "a") == {"b", "<end>"}
    os.kill(pid, signal.SIGCONT)  # the kernel ends it, for its pipe is closed
    wait_until(lambda: pid not in processes(grammars))


def test_a_process_ends_with_the_last_of_its_masks_whatever_it_does(grammars):
    mask, second = grammars.mask(AMBIGUOUS), grammars.mask(AMBIGUOUS)
    allowed(mask, "a")
    del second
    gc.collect()
    assert "a" in allowed(mask, "a")
    (pid,) = processes(grammars)
    mask.ask(tokens(*MANY), Asked())
    del mask
    gc.collect()
    wait_until(lambda: pid not in processes(grammars))


def test_more_grammars_than_processes_take_turns(monkeypatch):
    grammars = Grammars(vocab_size=131, end_ids=[END], special=SPECIAL, tokenizer=tokenizer_json(), max_processes=2)
    masks = [grammars.mask(f'start: "a" "{letter}" "x"') for letter in "bcdef"]
    for _ in range(2):
        answers = [Asked() for _ in masks]
        for mask, answer in zip(masks, answers, strict=True):
            mask.ask(tokens("a"), answer)
        assert all(isinstance(answer.get(), bytes) for answer in answers)
        assert len(processes(grammars)) <= 3  # one may be ending
    assert [allowed(mask, "a") for mask in masks] == [{letter} for letter in "bcdef"]
    grammars.close()


def test_the_process_that_starts_others_is_started_again(grammars):
    mask = grammars.mask(A_OR_B)
    allowed(mask)
    starter = grammars._starter.pid
    os.kill(starter, signal.SIGKILL)
    # It is left to be reaped by whoever started it.
    os.waitid(os.P_PID, starter, os.WEXITED | os.WNOWAIT)
    # The one that follows a grammar lives on.
    assert allowed(mask, "a") == {"b", "<end>"}
    assert allowed(grammars.mask('start: "x"')) == {"x"}
    assert grammars._starter.pid != starter


def test_without_descriptors_a_grammar_is_refused_and_others_go_on(grammars, monkeypatch):
    mask = grammars.mask(A_OR_B)
    allowed(mask)

    def full() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(module.os, "pipe", full)
        assert "Too many open files" in str(ask(grammars.mask('start: "x"'), []))
        assert allowed(mask, "a") == {"b", "<end>"}
    assert allowed(grammars.mask('start: "y"')) == {"y"}


def test_a_tokenizer_that_is_none_says_so():
    grammars = Grammars(vocab_size=9, end_ids=[0], special={}, tokenizer="{}")
    error = ask(grammars.mask('start: "x"'), [])
    assert isinstance(error, DflashError)
    assert "did not start" in str(error)
    grammars.close()


def test_the_end_answers_everybody(grammars):
    mask = grammars.mask(AMBIGUOUS)
    allowed(mask, "a")
    asked = Asked()
    mask.ask(tokens(*MANY), asked)
    grammars.close()
    assert "closed" in str(asked.get())
    assert "closed" in str(ask(mask, []))
    grammars.close()
