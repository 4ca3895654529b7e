"""`dflash-moe chat`: a conversation in the terminal, an answer to what comes from a pipe, or a turn
for each of its lines, with the model's own template.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli import help_page, options, sampling_options
from dflash_moe.cli.live_text import live_text
from dflash_moe.cli.loading import loading_shown
from dflash_moe.cli.model_path import DEMO, TOY
from dflash_moe.errors import ConfigError

if TYPE_CHECKING:
    from dflash_moe.cli.chat.terminal import Terminal
    from dflash_moe.engine.chat_history import ChatHistory
    from dflash_moe.engine.sampling.sampling_params import SamplingParams
    from dflash_moe.integrations.chat_template import TemplateRenderer

# Long enough for an answer that thinks first; Ctrl-C ends one that does not come to an end.
MAX_TOKENS = 2048
_RECOMMENDED = "what the model recommends"


@options.with_settings(reads_config=True)
def chat(
    model: options.ModelOption,
    topology: options.TopologyOption = None,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="System prompt: before all turns [default: none].",
            show_default=False,
            rich_help_panel=help_page.MODEL,
        ),
    ] = None,
    max_tokens: Annotated[int, sampling_options.max_tokens("answer")] = MAX_TOKENS,
    temperature: Annotated[float | None, sampling_options.temperature(f"{_RECOMMENDED}, else 0")] = None,
    top_p: Annotated[float | None, sampling_options.top_p(f"{_RECOMMENDED}, else 1")] = None,
    top_k: Annotated[int | None, sampling_options.top_k(f"{_RECOMMENDED}, else 0")] = None,
    min_p: Annotated[float | None, sampling_options.min_p(f"{_RECOMMENDED}, else 0")] = None,
    stop: Annotated[list[str] | None, sampling_options.STOP] = None,
    seed: Annotated[int, sampling_options.SEED] = 0,
    turns: Annotated[
        bool,
        typer.Option("--turns", help="Each line of stdin is a turn: else all is one.", rich_help_panel=help_page.MODEL),
    ] = False,
    no_shift: Annotated[
        bool,
        typer.Option(
            "--no-shift",
            help="Refuse what exceeds the context: else the oldest turns are left out.",
            rich_help_panel=help_page.MODEL,
        ),
    ] = False,
    no_history: Annotated[
        bool,
        typer.Option(
            "--no-history",
            help="Neither read nor keep what is typed: else ~/.local/state/dflash-moe/chat_history has it.",
            rich_help_panel=help_page.MODEL,
        ),
    ] = False,
    **overrides: Any,
) -> None:
    """Talk with a model, by the chat template it comes with. Without a topology the model is
    fitted to this machine.

    At a terminal each message is a turn, and /help lists commands. From a pipe all of stdin is one
    message. Ctrl-C stops an answer, and twice at an empty prompt it leaves. Answers go to stdout,
    everything else to stderr.
    """
    directory = options.model_directory(model)
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    stated: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    stated |= {"max_tokens": max_tokens, "stop": tuple(stop or ()), "seed": seed}
    sampling_options.sampling_params(**stated)
    is_terminal = not turns and sys.stdin is not None and sys.stdin.isatty() and (sys.stderr.isatty() or sys.stdout.isatty())
    plan = _Plan()
    with ExitStack() as stack:
        with _starting(model) as doing:
            found = _read_model(directory, system, stated, stack, doing)
            message = "" if turns or is_terminal else _message(doing)
            doing.begin("reading what the checkpoint has")
            placed = options.topology_for(topology, directory, overrides)
        terminal = _terminal(no_history) if is_terminal else None
        with loading_shown() as on_loading:
            from dflash_moe.engine.llm import LLM
            from dflash_moe.integrations.chat_template import most_text_bytes

            tokenizer = found.history.tokenizer
            llm = stack.enter_context(LLM(directory, placed, tokenizer=tokenizer, on_loading=on_loading, **overrides))
            found.renderer.max_text_bytes = most_text_bytes(tokenizer, llm.engine.length_limit.num_tokens)
        _say_what_holds(model, llm.host.report.not_paged, found.recommended)
        from dflash_moe.cli.chat.loop import answer_one, converse, take_turns
        from dflash_moe.cli.chat.session import ChatSession

        session = ChatSession(llm, found.history, found.params, is_shifting=not no_shift, plan=plan.lines)
        if terminal is not None:
            converse(session, terminal)
        elif turns:
            take_turns(session)
        else:
            answer_one(session, message)
        if summary := session.summary():
            options.say(summary)


@dataclass(frozen=True, slots=True)
class _Model:
    """What is known of a model before its weights are loaded: the conversation, still empty, how
    answers are sampled, and what of that the checkpoint recommends.
    """

    history: ChatHistory
    renderer: TemplateRenderer
    params: SamplingParams
    recommended: Mapping[str, float]


def _read_model(directory: Path, system: str | None, stated: Mapping[str, Any], stack: ExitStack, doing: _Doing) -> _Model:
    """Reads all of a checkpoint but its weights, for what is wrong there to be said before minutes
    of loading. `stated` are the sampling parameters that somebody gave.
    """
    doing.begin("importing torch and transformers")
    # The largest part of the time is in here.
    import dflash_moe.engine.llm  # noqa: F401
    from dflash_moe.engine.chat_history import ChatHistory
    from dflash_moe.integrations.chat_template import TemplateRenderer, find_chat_template, special_tokens
    from dflash_moe.integrations.generation_settings import read_generation_settings
    from dflash_moe.integrations.tokenizer import load_tokenizer

    doing.begin("reading the tokenizer")
    recommended = {name: value for name, value in read_generation_settings(directory).sampling.items() if name not in stated}
    params = sampling_options.sampling_params(**{"temperature": 0.0, **recommended, **stated})
    tokenizer = load_tokenizer(directory)
    template = find_chat_template(directory, tokenizer)
    renderer = stack.enter_context(TemplateRenderer(template, special_tokens(tokenizer)))
    history = ChatHistory(renderer, tokenizer, system)
    # A template may fail, or refuse the system prompt.
    history.ask("Hello")
    return _Model(history, renderer, params, recommended)


def _terminal(no_history: bool) -> Terminal:
    """Returns the prompt. Where there can be no file for what is typed it is said."""
    from dflash_moe.cli.chat.files import typed_file
    from dflash_moe.cli.chat.terminal import Terminal

    try:
        return Terminal(None if no_history else typed_file(os.environ))
    except ConfigError as error:
        options.say(f"what is typed is not kept for the next chat: {error}")
        return Terminal(None)


def _message(doing: _Doing) -> str:
    from dflash_moe.cli.chat.loop import piped_message

    doing.begin("reading the message from stdin, to its end")
    return piped_message()


def _say_what_holds(model: str, not_paged: str, recommended: Mapping[str, float]) -> None:
    """Says what of a model is worth knowing before one talks with it."""
    if not_paged:
        options.say(f"each turn is computed from its beginning, without a prefix cache: {not_paged}")
    if model == DEMO:
        options.say(TOY)
    if recommended:
        taken = ", ".join(f"{name} {value:g}" for name, value in recommended.items())
        options.say(f"sampling as the checkpoint recommends: {taken}; options of the same names change it")


@contextmanager
def _starting(model: str) -> Iterator[_Doing]:
    """Opens a block that is shown to do something, from its first moment on."""
    if not sys.stderr.isatty():
        options.say(f"starting {model}")
    doing = _Doing()
    with live_text(doing, has_lines=True):
        yield doing


class _Doing:
    """What a start is doing, and for how long; another thread asks."""

    def __init__(self) -> None:
        self.begin("starting")

    def begin(self, what: str) -> None:
        """Says that something else is done from now on."""
        self._what, self._began = what, time.monotonic()

    def __call__(self) -> str:
        return f"{self._what}: {time.monotonic() - self._began:.0f} s"


class _Plan(logging.Handler):
    """Says the lines of the plan as they come, and keeps them for /plan."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("dflash_moe.plan").handlers = [self]

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        options.say(self.lines[-1])
