"""How long a chat goes on: with a person at a terminal, for one message from a pipe, or for lines
each of which is a turn; and what an interrupt and an error mean there.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dflash_moe.cli import options
from dflash_moe.cli.chat.commands import obey
from dflash_moe.cli.chat.files import MAX_TEXT_BYTES, decoded
from dflash_moe.errors import ConfigError, DflashError

if TYPE_CHECKING:
    from dflash_moe.cli.chat.session import ChatSession
    from dflash_moe.cli.chat.terminal import Terminal


def converse(session: ChatSession, terminal: Terminal) -> None:
    """Talks until somebody leaves. What a line asks for and cannot be done is said. Raises
    KeyboardInterrupt for a second Ctrl-C without anything typed in between.
    """
    options.say("type a message; /help lists commands, Ctrl-C stops an answer")
    is_leaving = False
    while True:
        try:
            text = terminal.read()
        except EOFError:
            return
        except KeyboardInterrupt:
            if is_leaving:
                raise
            is_leaving = True
            options.say("Ctrl-C again leaves, and so does Ctrl-D")
            continue
        is_leaving = False
        try:
            if not obey(session, text):
                return
        except KeyboardInterrupt:
            options.say("stopped")
        except DflashError as error:
            # The conversation stays, and with it the chance to save it.
            options.say(str(error))


def take_turns(session: ChatSession) -> None:
    """Takes each line of stdin as a turn, until one leaves or cannot be done: nobody is there to
    correct it. Errors are those of `obey`.
    """
    while raw := _read(is_line=True):
        if not obey(session, decoded(raw, "stdin")):
            return


def answer_one(session: ChatSession, message: str) -> None:
    """Answers one message. Raises KeyboardInterrupt where the answer was stopped, and the errors of
    `ChatSession.ask`.
    """
    if session.ask(message).is_stopped:
        raise KeyboardInterrupt


def piped_message() -> str:
    """Returns the whole of stdin, which is one message. Raises ConfigError where it is empty, or
    larger than any context.
    """
    text = decoded(_read(is_line=False), "stdin").strip("\n")
    if not text.strip():
        raise ConfigError("stdin: there is no message; pipe a text in, or start `chat` at a terminal")
    return text


def _read(*, is_line: bool) -> bytes:
    """Returns the next line of stdin, or all of it, which may be any bytes."""
    if sys.stdin is None:
        raise ConfigError("stdin is closed; pipe a message in, or start `chat` at a terminal")
    try:
        raw = sys.stdin.buffer.readline(MAX_TEXT_BYTES + 1) if is_line else sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"stdin cannot be read: {error.strerror or error}") from None
    if len(raw) > MAX_TEXT_BYTES:
        raise ConfigError(f"stdin: a message has more than {MAX_TEXT_BYTES >> 20} MiB, more than any model reads; shorten it")
    return raw
