"""The turns of `dflash-moe chat`: reads a line, writes the answer as it comes, and does what a line
such as /reset asks for.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_moe.cli import generate_report, options
from dflash_moe.cli.live_text import Rate, live_text
from dflash_moe.config.values import did_you_mean
from dflash_moe.engine.chat_history import CHANNEL, Window
from dflash_moe.errors import ConfigError

if TYPE_CHECKING:
    from dflash_moe.engine.chat_history import ChatHistory
    from dflash_moe.engine.llm import LLM
    from dflash_moe.engine.sampling_params import SamplingParams

PROMPT = "> "
COMMANDS = {
    "/reset": "forgets the conversation, all but the system prompt",
    "/stats": "says how long the conversation is and how fast the latest answer was",
    "/help": "lists these commands",
    "/quit": "leaves; so does Ctrl-D",
}
# A prompt leaves at least one part of so many of the context for the answer, where turns can be
# left out for it.
LEAST_ANSWER = 4
# A question may begin with a path; a command is a single word.
_COMMAND = re.compile(r"/[a-z]+")


@dataclass(slots=True)
class Answer:
    """What came of a turn. Times are in seconds."""

    prompt_tokens: int
    num_tokens: int = 0
    finish_reason: str | None = None
    cached_tokens: int = 0
    ttft_s: float | None = None
    seconds: float = 0.0

    def speed(self) -> str:
        """Returns tokens, speed and time to the first token as text."""
        if self.ttft_s is None:
            return "no tokens"
        later = self.num_tokens - 1
        rate = f", {later / (self.seconds - self.ttft_s):.1f} tokens/s after the first" if later > 0 else ""
        return f"{self.num_tokens} token{'s' * (self.num_tokens != 1)}{rate}, time to first token {self.ttft_s:.3f} s"


class ChatSession:
    """One conversation between stdin and a model. The thread that made it uses it."""

    def __init__(self, llm: LLM, history: ChatHistory, params: SamplingParams) -> None:
        self._llm = llm
        self._history = history
        self._params = params
        self._answers: list[Answer] = []
        # Why the latest prompt was computed from its beginning.
        self._why_anew = ""
        self._is_terminal = sys.stdin.isatty()
        # Tokens without a text that part the messages of an answer.
        vocabulary = llm.tokenizer.get_vocab()
        self._marks = {vocabulary[mark] for mark in ("<|message|>", "<|end|>") if CHANNEL in vocabulary and mark in vocabulary}

    def run(self) -> None:
        """Talks until stdin ends or somebody leaves. Raises KeyboardInterrupt for a second Ctrl-C
        without a line in between; errors of a turn end it where nobody can correct the line.
        """
        self._greet()
        num_interrupts = 0
        while True:
            try:
                line = self._read()
            except KeyboardInterrupt:
                num_interrupts += 1
                if self._is_terminal:
                    # The prompt is still on this line.
                    options.say("")
                if num_interrupts > 1:
                    raise
                options.say("Ctrl-C again leaves, and so does /quit")
                continue
            if line is None or line.strip() == "/quit":
                break
            num_interrupts = int(self._take(line.strip()))
        self._say_goodbye()

    def _greet(self) -> None:
        if self._is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - from now on `input` edits lines and remembers them
            options.say("type a line to talk; Ctrl-C stops an answer, /help lists commands")

    def _read(self) -> str | None:
        """Returns the next line, None at the end of stdin."""
        if self._is_terminal:
            try:
                return input(PROMPT)
            except EOFError:
                options.say("")
                return None
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise ConfigError(f"stdin: not UTF-8 text ({error}); write each turn as a line of UTF-8") from None
        return line or None

    def _take(self, text: str) -> bool:
        """Does what a line asks for. Returns whether an interrupt cut it short."""
        if not text:
            return False
        if _COMMAND.fullmatch(text):
            self._obey(text)
            return False
        try:
            answer = self._turn(text)
        except ConfigError as error:
            if not self._is_terminal:
                raise
            options.say(str(error))
            return False
        self._answers.append(answer)
        if answer.finish_reason is None:
            options.say("stopped" if answer.num_tokens else "stopped before the first token; the question is forgotten")
        elif answer.finish_reason == "length":
            options.say(f"the answer ends after {answer.num_tokens} tokens, which is the limit (--max-tokens, or context)")
        return answer.finish_reason is None

    def _obey(self, command: str) -> None:
        if command == "/reset":
            self._history.reset()
            options.say("the conversation is forgotten")
        elif command == "/stats":
            self._show_stats()
        else:
            if command != "/help":
                options.say(f"{command} is no command{did_you_mean(command, COMMANDS)}")
            for name, does in COMMANDS.items():
                options.say(f"{name}  {does}")

    def _turn(self, text: str) -> Answer:
        """Asks the model and writes its answer. An interrupt ends the answer, which is then without
        a finish reason; what came of it stays in the conversation.
        """
        limit = self._llm.engine.length_limit
        most = self._params.max_tokens
        prompt = self._history.ask(text, Window(limit, min(most, limit.num_tokens // LEAST_ANSWER)))
        if prompt.num_left_out and not self._history.num_left_out:
            options.say(
                f"the conversation is longer than {limit.num_tokens:,} tokens, {limit.reason}: the oldest turns are left out"
            )
        self._why_anew = prompt.not_kept
        num_prompt = len(prompt.token_ids)
        answer = Answer(num_prompt)
        token_ids: list[int] = []
        texts: list[str] = []
        cached, began = self._llm.engine.stats()["cached_tokens"], time.monotonic()
        with contextlib.suppress(KeyboardInterrupt):
            params = dataclasses.replace(self._params, max_tokens=min(most, limit.num_tokens - num_prompt))
            with (
                live_text(_Progress(token_ids, num_prompt), has_lines=False) as write,
                contextlib.closing(self._llm.stream(prompt.token_ids, params)) as chunks,
            ):
                for chunk in chunks:
                    token_ids += chunk.token_ids
                    texts.append(chunk.text)
                    if not self._marks.isdisjoint(chunk.token_ids) and "".join(texts[-2:]).strip():
                        # What is thought ends here, and what is answered begins.
                        write("\n")
                    if answer.ttft_s is None and token_ids:
                        answer.ttft_s = time.monotonic() - began
                    write(chunk.text)
                    answer.finish_reason = chunk.finish_reason
                write("\n")
        answer.seconds = time.monotonic() - began
        answer.num_tokens = len(token_ids)
        answer.cached_tokens = self._llm.engine.stats()["cached_tokens"] - cached
        if token_ids:
            self._history.answer(prompt, token_ids, "".join(texts))
        return answer

    def _show_stats(self) -> None:
        history = self._history
        options.say(f"conversation: {history.num_turns} turns, {history.num_tokens} tokens")
        if not self._answers:
            return
        latest = self._answers[-1]
        options.say(f"latest answer: {latest.speed()}")
        why = f" ({self._why_anew})" if self._why_anew else ""
        options.say(f"its prompt: {latest.prompt_tokens} tokens, {latest.cached_tokens} of them from the prefix cache{why}")

    def _say_goodbye(self) -> None:
        if self._answers:
            count = len(self._answers)
            tokens = sum(answer.num_tokens for answer in self._answers)
            seconds = sum(answer.seconds for answer in self._answers)
            options.say(
                f"{count} answer{'s' * (count != 1)}, {tokens} tokens, {tokens / seconds:.1f} tokens/s; "
                f"{generate_report.carried(self._llm.stats())}"
            )


class _Progress:
    """What is said while an answer is computed; another thread asks."""

    def __init__(self, token_ids: list[int], num_prompt: int) -> None:
        self._token_ids = token_ids
        self._num_prompt = num_prompt
        self._rate = Rate()

    def __call__(self) -> str:
        count = len(self._token_ids)
        rate = self._rate.add(count)
        return f"{count} tokens, {rate:.1f} tokens/s" if count else f"reading a prompt of {self._num_prompt} tokens"
