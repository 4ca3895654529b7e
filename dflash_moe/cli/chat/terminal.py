"""The prompt of `dflash-moe chat` at a terminal: editing, messages of several lines, what was typed
before, Tab, and notices that come while somebody types.

It is the one place that knows prompt_toolkit, which is imported when a terminal is used.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app, run_in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle

from dflash_moe.cli import options
from dflash_moe.cli.chat.commands import COMMANDS, QUOTES, SETTABLE

if TYPE_CHECKING:
    import asyncio

PROMPT = "> "
CONTINUATION = "  "


class Terminal:
    """Reads what a person types. The thread that made it uses it."""

    def __init__(self, typed_path: Path | None, **ends: Any) -> None:
        """`typed_path` is a file with what was typed before, which goes on there; without it that
        is forgotten in the end. `ends` are the input and output of a test.
        """
        if "output" not in ends and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
            ends["output"] = _output()
        history: History = InMemoryHistory() if typed_path is None else _Typed(typed_path)
        self._session: PromptSession[str] = PromptSession(
            PROMPT, multiline=True, prompt_continuation=CONTINUATION, key_bindings=_bindings(), completer=_Completer(),
            complete_while_typing=False, complete_style=CompleteStyle.READLINE_LIKE, history=history, enable_suspend=True,
            **ends,
        )  # fmt: skip

    def read(self) -> str:
        """Returns what was typed. Raises EOFError for Ctrl-D and KeyboardInterrupt for Ctrl-C, both
        where nothing was typed.
        """
        with _notices_above() as ready:
            text = self._session.prompt(pre_run=ready)
        # A terminal may send any bytes.
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def goes_on(text: str) -> bool:
    """Says whether a message that begins with this text goes on with another line."""
    stripped = text.strip()
    if stripped.startswith(QUOTES):
        return len(stripped) < 2 * len(QUOTES) or not stripped.endswith(QUOTES)
    return text.endswith("\\")


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter", filter=has_focus(DEFAULT_BUFFER))
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if not goes_on(buffer.text):
            buffer.validate_and_handle()
            return
        if not buffer.text.lstrip().startswith(QUOTES):
            buffer.cursor_position = len(buffer.text)
            buffer.delete_before_cursor()
        buffer.insert_text("\n")

    @bindings.add("escape", "enter", filter=has_focus(DEFAULT_BUFFER))
    def _another_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c", filter=has_focus(DEFAULT_BUFFER))
    @bindings.add(Keys.SIGINT)
    def _interrupt(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return bindings


class _Completer(Completer):
    """Completes the names of commands and options, and the paths behind some of them."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        name, blank, rest = document.text_before_cursor.partition(" ")
        if not name.startswith("/") or "\n" in name:
            return
        if not blank:
            yield from (Completion(known, -len(name)) for known in COMMANDS if known.startswith(name))
        elif name == "/set" and " " not in rest:
            yield from (Completion(known, -len(rest)) for known in SETTABLE if known.startswith(rest))
        elif name in COMMANDS and COMMANDS[name].takes_path:
            yield from self._paths.get_completions(Document(rest), complete_event)


class _Typed(FileHistory):
    """What was typed, in a file. Where that cannot be written any more it is said once."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._is_kept = True

    def store_string(self, string: str) -> None:
        if not self._is_kept:
            return
        try:
            super().store_string(string)
        except OSError as error:
            self._is_kept = False
            options.say(f"{self.filename!s}: what is typed is not kept any more: {error.strerror}")


class _AbovePrompt(io.TextIOBase):
    """Stands in for stderr while a prompt is open: whole lines appear above it, and what was typed
    stays. Any thread writes.
    """

    def __init__(self, stderr: TextIO) -> None:
        super().__init__()
        self._stderr = stderr
        self._waiting = ""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = contextvars.Context()

    def begin(self) -> None:
        """Notes that the prompt is open; the thread that shows it calls, within its event loop."""
        with self._lock:
            self._loop, self._context = get_app().loop, contextvars.copy_context()

    def end(self) -> None:
        """Notes that the prompt is closed, and writes what has come in the meantime."""
        with self._lock:
            self._loop = None
            self._write_out(len(self._waiting))

    def write(self, text: str) -> int:
        with self._lock:
            self._waiting += text
            if self._loop is None:
                self._write_out(len(self._waiting))
            elif "\n" in text:
                # Where the loop ends before it comes to this, `end` writes it.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(run_in_terminal, self._write_lines, context=self._context)
        return len(text)

    def isatty(self) -> bool:
        return self._stderr.isatty()

    def fileno(self) -> int:
        return self._stderr.fileno()

    def _write_lines(self) -> None:
        with self._lock:
            self._write_out(self._waiting.rfind("\n") + 1)

    def _write_out(self, end: int) -> None:
        text, self._waiting = self._waiting[:end], self._waiting[end:]
        self._stderr.write(text)
        self._stderr.flush()


@contextlib.contextmanager
def _notices_above() -> Iterator[Callable[[], None]]:
    """Opens a block in which what is written to stderr appears above the prompt. It is given what
    the prompt calls once it is open.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    stderr = sys.stderr
    stand_in = _AbovePrompt(stderr)
    sys.stderr = stand_in  # type: ignore[assignment]
    try:
        yield stand_in.begin
    finally:
        sys.stderr = stderr
        stand_in.end()


def _output() -> Any:
    """Returns what draws the prompt: on stderr, since answers may go elsewhere."""
    output: Any = create_output(sys.stderr if sys.stderr.isatty() else sys.stdout)
    # The terminal is not asked where the cursor is. Nothing here needs it, and its answer, where it
    # comes after the prompt, would be the beginning of the next message.
    output.enable_cpr = False
    return output
