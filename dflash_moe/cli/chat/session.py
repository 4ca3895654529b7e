"""One conversation of `dflash-moe chat`: what was said, how answers are sampled, and its turns. A
turn writes the answer as it comes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dflash_moe.cli import options
from dflash_moe.cli.generate import generate_report
from dflash_moe.cli.live_text import Rate, live_text
from dflash_moe.engine.chat_history import CHANNEL, ContextWindow
from dflash_moe.errors import ConfigError

if TYPE_CHECKING:
    from dflash_moe.engine.chat_history import ChatHistory, Prompt
    from dflash_moe.engine.llm import LLM
    from dflash_moe.engine.sampling.sampling_params import SamplingParams

# A prompt leaves at least one part of so many of the context for the answer, where turns can be
# left out for it.
LEAST_ANSWER = 4


@dataclass(slots=True)
class Answer:
    """What came of a turn. Times are in seconds."""

    prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    cached_tokens: int = 0
    ttft_s: float | None = None
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """The number of its tokens."""
        return len(self.token_ids)

    @property
    def is_stopped(self) -> bool:
        """Whether an interrupt cut it short."""
        return self.finish_reason is None

    def speed(self) -> str:
        """Returns tokens, speed and time to the first token as text."""
        if self.ttft_s is None:
            return "no tokens"
        later = self.num_tokens - 1
        rate = f", {later / (self.seconds - self.ttft_s):.1f} tokens/s after the first" if later > 0 else ""
        return f"{self.num_tokens} token{'s' * (self.num_tokens != 1)}{rate}, time to first token {self.ttft_s:.3f} s"


class ChatSession:
    """A conversation with a model. The thread that made it uses it. `params` says how the next
    answers are sampled, and `plan` where the model lies.
    """

    def __init__(
        self, llm: LLM, history: ChatHistory, params: SamplingParams, *, is_shifting: bool = True, plan: Sequence[str] = ()
    ) -> None:
        self.history = history
        self.params = params
        self.plan = plan
        # Texts of files, which come before the next question.
        self.files: list[str] = []
        self._llm = llm
        self._is_shifting = is_shifting
        self._answers: list[Answer] = []
        # The latest question where no answer of the conversation belongs to it.
        self._unanswered: str | None = None
        self._num_retries = 0
        self._has_said_left_out = False
        # Why the latest prompt was computed from its beginning.
        self._why_anew = ""
        # Tokens without a text that part the messages of an answer.
        vocabulary = llm.tokenizer.get_vocab()
        self._marks = {vocabulary[mark] for mark in ("<|message|>", "<|end|>") if CHANNEL in vocabulary and mark in vocabulary}

    def ask(self, text: str) -> Answer:
        """Asks a question, with the files before it, and writes the answer. An interrupt ends the
        answer; what came of it stays in the conversation. Errors: ConfigError for what cannot fit,
        and those of the renderer and of the engine.
        """
        question = "\n\n".join([*self.files, text])
        self.files = []
        self._num_retries = 0
        return self._turn(question, self.params)

    def retry(self) -> Answer:
        """Asks the latest question again, with another seed. The new answer takes the place of the
        former one, which stays where none comes. Errors are those of `ask`, and ConfigError where
        nothing was asked.
        """
        if self._unanswered is None and not self.history.num_turns:
            raise ConfigError("/retry: nothing was asked yet")
        self._num_retries += 1
        params = dataclasses.replace(self.params, seed=((self.params.seed or 0) + self._num_retries) % options.MAX_SEED)
        if self._unanswered is not None:
            return self._turn(self._unanswered, params)
        if not params.temperature:
            options.say("at temperature 0 the same question has the same answer; /set temperature 0.7 changes that")
        try:
            return self._turn(str(self.history.undo()), params)
        finally:
            if self._unanswered is not None:
                self.history.redo()
                self._unanswered = None

    def undo(self) -> str | None:
        """Removes the latest turn and returns its question, None where there is none."""
        self._unanswered = None
        return self.history.undo()

    def forget_unsaid(self) -> None:
        """Forgets what belongs to the former conversation where another one begins: files that wait
        for a question, and a question without an answer.
        """
        self.files, self._unanswered, self._has_said_left_out = [], None, False

    def turns(self) -> str:
        """Returns how many questions were answered, as text."""
        count = self.history.num_turns
        return f"{count} turn{'s' * (count != 1)}"

    def stats(self) -> list[str]:
        """Returns lines on the conversation and the latest answer."""
        lines = [f"conversation: {self.turns()}, {self.history.num_tokens} tokens"]
        if self._answers:
            latest = self._answers[-1]
            why = f" ({self._why_anew})" if self._why_anew else ""
            lines.append(f"latest answer: {latest.speed()}")
            lines.append(
                f"its prompt: {latest.prompt_tokens} tokens, {latest.cached_tokens} of them from the prefix cache{why}"
            )
        return lines

    def summary(self) -> str:
        """Returns the sentence that ends a conversation, empty where nothing was answered."""
        count = len(self._answers)
        tokens = sum(answer.num_tokens for answer in self._answers)
        seconds = sum(answer.seconds for answer in self._answers)
        if not seconds:
            return ""
        carried = generate_report.carried(self._llm.stats())
        return f"{count} answer{'s' * (count != 1)}, {tokens} tokens, {tokens / seconds:.1f} tokens/s; {carried}"

    def _turn(self, question: str, params: SamplingParams) -> Answer:
        self._unanswered = question
        answer = Answer()
        with contextlib.suppress(KeyboardInterrupt):
            prompt = self._prompt(question, params)
            answer.prompt_tokens = len(prompt.token_ids)
            self._write(prompt, params, answer)
        if answer.token_ids:
            self.history.answer(prompt, answer.token_ids, answer.text)
            self._unanswered = None
        self._answers.append(answer)
        _say_end(answer)
        return answer

    def _prompt(self, question: str, params: SamplingParams) -> Prompt:
        limit = self._llm.engine.length_limit
        window = ContextWindow(limit, min(params.max_tokens, limit.num_tokens // LEAST_ANSWER), self._is_shifting)
        prompt = self.history.ask(question, window)
        if prompt.num_left_out and not self._has_said_left_out:
            self._has_said_left_out = True
            options.say(
                f"the conversation is longer than {limit.num_tokens:,} tokens, {limit.reason}: the oldest turns are left out"
            )
        self._why_anew = prompt.not_kept
        return prompt

    def _write(self, prompt: Prompt, params: SamplingParams, answer: Answer) -> None:
        """Writes the answer as it comes, and notes in `answer` what has come, also of one that is
        cut short.
        """
        engine = self._llm.engine
        params = dataclasses.replace(params, max_tokens=min(params.max_tokens, engine.room(len(prompt.token_ids))))
        cached, began = engine.stats()["cached_tokens"], time.monotonic()
        try:
            with (
                live_text(_Progress(answer), has_lines=False) as write,
                contextlib.closing(self._llm.stream(prompt.token_ids, params)) as chunks,
            ):
                before = ""
                for chunk in chunks:
                    answer.token_ids += chunk.token_ids
                    answer.text += chunk.text
                    if answer.ttft_s is None and answer.token_ids:
                        answer.ttft_s = time.monotonic() - began
                    if not self._marks.isdisjoint(chunk.token_ids) and (before + chunk.text).strip():
                        # What is thought ends here, and what is answered begins.
                        write("\n")
                    write(chunk.text)
                    before = chunk.text
                    answer.finish_reason = chunk.finish_reason
                write("\n")
        finally:
            answer.seconds = time.monotonic() - began
            answer.cached_tokens = engine.stats()["cached_tokens"] - cached


def _say_end(answer: Answer) -> None:
    if answer.is_stopped:
        options.say("stopped" if answer.token_ids else "stopped before the first token; the question is forgotten")
    elif answer.finish_reason == "length":
        options.say(f"the answer ends after {answer.num_tokens} tokens, which is the limit (--max-tokens, or context)")


class _Progress:
    """What is said while an answer is computed; another thread asks."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._rate = Rate()

    def __call__(self) -> str:
        count = self._answer.num_tokens
        rate = self._rate.add(count)
        return f"{count} tokens, {rate:.1f} tokens/s" if count else f"reading a prompt of {self._answer.prompt_tokens} tokens"
