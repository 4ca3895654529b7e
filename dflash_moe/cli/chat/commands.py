"""What is typed at `dflash-moe chat`: the commands, and how they are told from what is said to the
model.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_moe.cli import options
from dflash_moe.cli.chat.files import load_conversation, named_path, read_text, save_conversation
from dflash_moe.cli.config_file import SAMPLING
from dflash_moe.config.values import did_you_mean
from dflash_moe.errors import ConfigError, shown

if TYPE_CHECKING:
    from dflash_moe.cli.chat.session import ChatSession

# Around a block of several lines. What is within it is always a message.
QUOTES = '"""'
QUIT = "/quit"
# These are set by the names of the command line's options.
SETTABLE = (*SAMPLING, "stop")
_INTEGERS = ("max_tokens", "top_k", "seed")
# A message may begin with a path, which has more than one slash or other signs.
_COMMAND = re.compile(r"(/[a-z]+)(?:\s+(.*))?", re.DOTALL)
_SETTING = re.compile(r"([^\s=]+)\s*=?\s*(.*)", re.DOTALL)
_NUMBER = re.compile(r"[-+]?[0-9.]+(?:e[-+]?[0-9]+)?", re.ASCII | re.IGNORECASE)
# So much of a question is shown.
_BRIEF = 60


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """A command: what stands behind its name, in brackets where it may be left out; what it does,
    for people; and the function that does it. `takes_path` is for Tab.
    """

    argument: str
    does: str
    run: Callable[[ChatSession, str], None]
    takes_path: bool = False


def obey(session: ChatSession, text: str) -> bool:
    """Does what a typed text asks for, a question to the model among it. Returns whether the chat
    goes on. Errors: ConfigError for what cannot be done, and those of `ChatSession.ask`.
    """
    text = text.strip()
    if len(text) >= 2 * len(QUOTES) and text.startswith(QUOTES) and text.endswith(QUOTES):
        text = text[len(QUOTES) : -len(QUOTES)].strip("\n")
    elif (command := _command(text)) is not None:
        name, argument = command
        COMMANDS[name].run(session, argument)
        return name != QUIT
    if text.strip():
        session.ask(text)
    return True


def _command(text: str) -> tuple[str, str] | None:
    """Returns the name of a command and what is behind it, None for a message. Raises ConfigError
    for what can only be meant as a command.
    """
    found = _COMMAND.fullmatch(text)
    if found is None:
        return None
    name, argument = found[1], (found[2] or "").strip()
    command = COMMANDS.get(name)
    if command is None:
        # With more words it is a message, but for what looks like a typing error.
        if argument and not difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.75):
            return None
        raise ConfigError(f"{name} is no command{did_you_mean(name, COMMANDS)}; /help lists them")
    if argument and not command.argument:
        raise ConfigError(f"{name} takes nothing behind it; {QUOTES}{shown(text)[1:-1]}{QUOTES} says it to the model")
    if command.argument and not argument and not command.argument.startswith("["):
        raise ConfigError(f"{name} {command.argument}: {command.argument} is missing; it {command.does}")
    return name, argument


def _attach(session: ChatSession, argument: str) -> None:
    path = named_path(argument)
    text = read_text(path)
    session.files.append(f"{path.name}:\n\n{text}")
    options.say(f"{path}: {len(text):,} characters, which come before your next question")


def _retry(session: ChatSession, _argument: str) -> None:
    session.retry()


def _undo(session: ChatSession, _argument: str) -> None:
    question = session.undo()
    if question is None:
        raise ConfigError("/undo: there is no question to forget")
    options.say(f"forgotten: {_brief(question)}")


def _system(session: ChatSession, argument: str) -> None:
    if not argument:
        current = session.history.system
        options.say("there is no system prompt" if current is None else f"system prompt: {current}")
    elif argument in ('""', "''"):
        session.history.set_system(None)
        options.say("the system prompt is taken away")
    else:
        session.history.set_system(argument)
        options.say("the system prompt holds from the next question on")


def _set(session: ChatSession, argument: str) -> None:
    found = _SETTING.fullmatch(argument)
    if found is None:
        for known in SETTABLE:
            options.say(f"{known.ljust(max(map(len, SETTABLE)))}  {shown(getattr(session.params, known))}")
        return
    name, value = found.groups()
    field = name.lstrip("-").replace("-", "_").lower()
    if field not in SETTABLE:
        raise ConfigError(f"/set {shown(name)}: no such option{did_you_mean(field, SETTABLE)}; there are {', '.join(SETTABLE)}")
    if not value:
        options.say(f"{field} is {shown(getattr(session.params, field))}")
        return
    try:
        changed: dict[str, Any] = {field: _value(field, value)}
        session.params = dataclasses.replace(session.params, **changed)
    except ConfigError as error:
        raise ConfigError(f"/set {error}") from None
    options.say(f"{field} is {shown(getattr(session.params, field))} from the next answer on")


def _value(field: str, text: str) -> object:
    """Returns a typed value. A text that is no number stays one, which the parameters refuse."""
    if field == "stop":
        unquoted = text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
        return (unquoted,) if unquoted else ()
    if not _NUMBER.fullmatch(text):
        return text
    try:
        return int(text) if field in _INTEGERS else float(text)
    except ValueError:
        return text


def _save(session: ChatSession, argument: str) -> None:
    path = named_path(argument)
    if not session.history.num_turns and session.history.system is None:
        raise ConfigError("/save: nothing was said yet")
    save_conversation(path, session.history.messages)
    options.say(f"saved: {session.turns()}, in {path}")


def _load(session: ChatSession, argument: str) -> None:
    path = named_path(argument)
    messages = load_conversation(path)
    try:
        session.history.load(messages)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    session.forget_unsaid()
    system = ", and the system prompt" if session.history.system is not None else ""
    options.say(f"loaded: {session.turns()}{system}")


def _plan(session: ChatSession, _argument: str) -> None:
    for line in session.plan or ("nothing was planned: the topology says where the model lies",):
        options.say(line)


def _stats(session: ChatSession, _argument: str) -> None:
    for line in session.stats():
        options.say(line)


def _reset(session: ChatSession, _argument: str) -> None:
    session.history.reset()
    session.forget_unsaid()
    options.say("the conversation is forgotten")


def _help(_session: ChatSession, _argument: str) -> None:
    rows = [(f"{name} {command.argument}".rstrip(), command.does) for name, command in COMMANDS.items()]
    rows += [
        ("Alt-Enter", "begins another line, and so does Enter behind a \\"),
        (QUOTES, f"begins a message of several lines, which ends with another {QUOTES}"),
        ("Ctrl-C", "stops an answer, or clears what is typed"),
    ]
    width = max(len(left) for left, _ in rows)
    for left, right in rows:
        options.say(f"{left.ljust(width)}  {right}")


def _brief(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _BRIEF else f"{line[: _BRIEF - 3]}..."


COMMANDS = {
    "/file": ChatCommand("PATH", "puts a file before the next question", _attach, takes_path=True),
    "/retry": ChatCommand("", "asks the latest question again", _retry),
    "/undo": ChatCommand("", "forgets the latest question and its answer", _undo),
    "/system": ChatCommand("[TEXT]", 'says or changes the system prompt; "" takes it away', _system),
    "/set": ChatCommand("[NAME] [VALUE]", "says or changes how answers are sampled: /set temperature 0.7", _set),
    "/save": ChatCommand("FILE", "writes the conversation into a file", _save, takes_path=True),
    "/load": ChatCommand("FILE", "goes on with the conversation of a file", _load, takes_path=True),
    "/plan": ChatCommand("", "says where the model lies", _plan),
    "/stats": ChatCommand("", "says how long the conversation is and how fast the latest answer was", _stats),
    "/reset": ChatCommand("", "forgets the conversation, all but the system prompt", _reset),
    "/help": ChatCommand("", "lists these commands", _help),
    QUIT: ChatCommand("", "leaves; so does Ctrl-D", lambda _session, _argument: None),
}
