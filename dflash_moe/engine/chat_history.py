"""A conversation as token ids: what was said, rendered by the model's template and tokenised, such
that what the model has computed already stays the beginning of the next prompt.

An answer's ids are kept as they were generated. Tokenised again, its text may give others, and the
prefix cache would miss from there on.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dflash_moe.engine.prompt_check import LengthLimit
from dflash_moe.engine.seen_text import SeenText, seen_with
from dflash_moe.errors import ConfigError
from dflash_moe.integrations.tokenizer import encode_with_ends

# gpt-oss writes several messages for one answer, of which its template takes the last
# (https://cookbook.openai.com/articles/openai-harmony, "Channels").
CHANNEL = "<|channel|>"
_FINAL = f"{CHANNEL}final<|message|>"
_MARK = re.compile(r"<\|(?:return|end|start|call|channel)\|>")

Message = dict[str, Any]


class Renderer(Protocol):
    """What `ChatHistory` asks of a `TemplateRenderer`."""

    def render(self, messages: Sequence[Message]) -> str:
        """Returns the text of a conversation and of what begins the next answer."""
        ...


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """How many tokens a prompt and its answer may have: as many together as `limit` says. Where a
    prompt leaves fewer than `answer_tokens` for the answer, the oldest turns are left out; without
    `is_shifting` it is refused once it leaves none.
    """

    limit: LengthLimit
    answer_tokens: int = 1
    is_shifting: bool = True

    @property
    def max_length(self) -> int:
        """The most tokens of a prompt and its answer."""
        return self.limit.num_tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question and the ids to compute for it, behind which the answer comes. The oldest
    `num_left_out` turns of the conversation are not in it. `not_kept` says why it does not begin
    with all that was computed before, and is empty where it does.
    """

    question: str
    token_ids: list[int]
    text: str
    num_left_out: int = 0
    not_kept: str = ""


@dataclass(frozen=True, slots=True)
class _Turn:
    """A question with its answer. `computed` ends with the answer; it is None where this model has
    not written it, or what was before it has changed since.
    """

    question: str
    answer: str
    computed: SeenText | None
    num_left_out: int = 0


class ChatHistory:
    """The messages of a conversation and the ids that the model has seen. One thread uses it.

    Whatever fails or is interrupted leaves the conversation as it was: a question belongs to it
    only together with its answer.
    """

    def __init__(self, renderer: Renderer, tokenizer: Any, system: str | None = None) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._system = system
        self._turns: tuple[_Turn, ...] = ()
        self._undone: _Turn | None = None
        # Why nothing of what was computed before can be the beginning of the next prompt.
        self._why_anew = ""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def system(self) -> str | None:
        """The system prompt, which stands before all turns."""
        return self._system

    @property
    def messages(self) -> list[Message]:
        """The whole conversation, with the turns that prompts leave out."""
        return self._messages(0)

    @property
    def num_turns(self) -> int:
        """The number of questions with an answer."""
        return len(self._turns)

    @property
    def num_left_out(self) -> int:
        """The number of the oldest turns that the latest prompt left out."""
        return self._turns[-1].num_left_out if self._turns else 0

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the latest prompt and its answer."""
        return len(self._computed.token_ids)

    def reset(self) -> None:
        """Forgets everything but the system prompt."""
        self._turns, self._why_anew = (), ""

    def ask(self, text: str, window: ContextWindow | None = None) -> Prompt:
        """Returns the prompt of a question, within `window` where there is one. Errors: ConfigError
        for what cannot fit, and those of the renderer and of the tokenizer.
        """
        left_out = self.num_left_out
        prompt = self._prompt(text, left_out)
        if window is None or len(prompt.token_ids) + window.answer_tokens <= window.max_length:
            return prompt
        if window.is_shifting and left_out < self.num_turns:
            prompt = self._shifted(text, window.max_length // 2)
        if len(prompt.token_ids) < window.max_length:
            return prompt
        raise self._too_long(prompt, window)

    def answer(self, prompt: Prompt, token_ids: Sequence[int], text: str) -> None:
        """Adds a question and its answer: the ids as generated, and the text as shown."""
        computed = seen_with(self._tokenizer, prompt.token_ids, prompt.text, token_ids)
        written = computed.text[len(prompt.text) :]
        turn = _Turn(prompt.question, _content(written, text), computed, prompt.num_left_out)
        self._turns, self._why_anew = (*self._turns, turn), ""

    def undo(self) -> str | None:
        """Removes the latest turn and returns its question; None where there is none."""
        if not self._turns:
            return None
        *kept, self._undone = self._turns
        self._turns = tuple(kept)
        return self._undone.question

    def redo(self) -> None:
        """Puts back the turn that `undo` has removed; nothing else may have happened since."""
        if self._undone is not None:
            self._turns, self._undone = (*self._turns, self._undone), None

    def set_system(self, text: str | None) -> None:
        """Replaces the system prompt, or takes it away. Errors are those of the renderer, for a
        template that takes none.
        """
        self._renderer.render([*_system_message(text), {"role": "user", "content": "Hello"}])
        self._begin_anew(text, self._turns, "the system prompt was changed")

    def load(self, messages: Sequence[Message]) -> None:
        """Replaces the conversation by messages with a `role` and a `content` each: at most one
        "system" first, then "user" and "assistant" in turn. Raises ConfigError that names the
        message which is something else; other errors are those of the renderer, for a template that
        does not take them.
        """
        system, turns = _system_and_turns(messages)
        self._renderer.render([*messages, {"role": "user", "content": "Hello"}])
        self._begin_anew(system, tuple(_Turn(question, answer, None) for question, answer in turns), "it was loaded")

    def _begin_anew(self, system: str | None, turns: tuple[_Turn, ...], why: str) -> None:
        self._system = system
        self._turns = tuple(replace(turn, computed=None, num_left_out=0) for turn in turns)
        self._why_anew = why if turns else ""

    @property
    def _computed(self) -> SeenText:
        return (self._turns[-1].computed if self._turns else None) or SeenText()

    def _messages(self, left_out: int) -> list[Message]:
        found = _system_message(self._system)
        for turn in self._turns[left_out:]:
            found += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
        return found

    def _prompt(self, question: str, left_out: int) -> Prompt:
        text = self._renderer.render([*self._messages(left_out), {"role": "user", "content": question}])
        token_ids, not_kept = self._tokenised(text)
        if left_out > self.num_left_out:
            not_kept = "the oldest turns are left out"
        return Prompt(question, token_ids, text, left_out, not_kept)

    def _shifted(self, question: str, most: int) -> Prompt:
        """Returns the prompt without as many of the oldest turns as it takes to have `most` tokens
        or fewer, or without all of them. Half of the room is free again then, so that only now and
        then a prompt is computed from its beginning.
        """
        first, last = self.num_left_out + 1, self.num_turns
        while first < last:
            middle = (first + last) // 2
            if len(self._prompt(question, middle).token_ids) <= most:
                last = middle
            else:
                first = middle + 1
        return self._prompt(question, first)

    def _too_long(self, prompt: Prompt, window: ContextWindow) -> ConfigError:
        room = f"prompt and answer together may have {window.max_length:,}, {window.limit.reason}"
        alone = self._prompt(prompt.question, self.num_turns)
        if len(alone.token_ids) >= window.max_length:
            what = "the message alone makes" if self._system is None else "message and system prompt alone make"
            return ConfigError(f"{what} a prompt of {len(alone.token_ids):,} tokens, and {room}; shorten it")
        return ConfigError(
            f"with this message the conversation has {len(prompt.token_ids):,} tokens, and {room}; without --no-shift its "
            "oldest turns are left out"
        )

    def _tokenised(self, text: str) -> tuple[list[int], str]:
        """Returns the ids of a rendered conversation, with those that were computed as they were;
        and why they are not its beginning, empty where they are.
        """
        if self._why_anew:
            return encode_with_ends(self._tokenizer, text)[0], self._why_anew
        return self._computed.continued(self._tokenizer, text)


def _system_message(text: str | None) -> list[Message]:
    return [] if text is None else [{"role": "system", "content": text}]


def _system_and_turns(messages: Sequence[Message]) -> tuple[str | None, list[tuple[str, str]]]:
    """Returns the system prompt of a conversation, and its questions with their answers."""
    contents = [message["content"] for message in messages]
    has_system = bool(messages) and messages[0]["role"] == "system"
    for place, message in enumerate(messages[has_system:]):
        expected = ("user", "assistant")[place % 2]
        if message["role"] != expected:
            raise ConfigError(
                f"message {place + has_system + 1} is of {message['role']}, expected {expected}: a conversation has at most "
                "one system message first, then user and assistant in turn"
            )
    said = contents[has_system:]
    if len(said) % 2:
        raise ConfigError(f"message {len(messages)}, the last one, is of user: each question needs an answer")
    return (contents[0] if has_system else None), list(zip(said[::2], said[1::2], strict=True))


def _content(written: str, shown: str) -> str:
    """Returns what a template is told of an answer: all that was shown, or of an answer in channels
    the final message, which is empty where the model did not come to it.
    """
    if CHANNEL not in written:
        return shown
    return _MARK.split(written.rpartition(_FINAL)[2], maxsplit=1)[0] if _FINAL in written else ""
