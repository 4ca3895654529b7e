"""How a model writes calls of tools and thoughts, as data: `server.chat_form` finds it in a chat
template, it travels to the front among the facts of a model, and readers are made of it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

# Kinds of calls: a JSON object that holds name and arguments; a name and an object of arguments
# behind it; a name and marks around each argument; a call as Python writes it; gpt-oss's channels.
JSON, NAMED, TAGGED, PYTHON, HARMONY = "json", "named", "tagged", "python", "harmony"
# A message has no more calls: in an answer later ones are text, and in a request they are refused.
MAX_CALLS = 128


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of calls. The text is `section_begin`, calls with `separator` between them, and
    `section_end`; a call is `begin`, what its kind says, and `end`. Each mark is as the template
    writes it, and may be empty. `lead` is white space between a message's text and its calls.
    """

    kind: str
    section_begin: str = ""
    section_end: str = ""
    separator: str = ""
    begin: str = ""
    end: str = ""
    lead: str = ""
    # JSON: where name, arguments and, if the model writes one, the id are in the object.
    name_path: tuple[str, ...] = ()
    arguments_path: tuple[str, ...] = ()
    id_path: tuple[str, ...] = ()
    # Whether the arguments are JSON text within a string.
    is_quoted: bool = False
    # NAMED: between name and arguments. `id_prefix` is there where a number is between the two,
    # which with the prefix and the name is the call's id.
    middle: str = ""
    id_prefix: str | None = None
    # TAGGED: behind the name, and around keys and values.
    name_end: str = ""
    key_begin: str = ""
    key_end: str = ""
    value_end: str = ""
    # How the template takes calls: arguments as text or as objects, several in a message, ids of
    # any length or of nine letters and digits.
    takes_text: bool = False
    is_parallel: bool = True
    has_short_ids: bool = False

    @property
    def opening(self) -> list[str]:
        """The parts of what begins the first call of a message; none where nothing does."""
        return parts(self.section_begin + self.begin)

    @property
    def next(self) -> list[str]:
        """The parts of what is between a call and the next one."""
        return parts(self.separator + self.begin)


@dataclass(frozen=True, slots=True)
class ThoughtForm:
    """The marks around a thought, at the beginning of a message."""

    begin: str
    end: str
    # Under this name the template takes thoughts of earlier messages.
    field: str = "reasoning_content"


@dataclass(frozen=True, slots=True)
class ChatForm:
    """What was found in a template. Without `calls` or `thoughts`, `no_calls` and `no_thoughts` say
    why.
    """

    calls: CallForm | None = None
    thoughts: ThoughtForm | None = None
    no_calls: str = ""
    no_thoughts: str = ""

    @property
    def marks(self) -> list[str]:
        """All marks, some of which may be special tokens."""
        found = [self.thoughts.begin, self.thoughts.end] if self.thoughts is not None else []
        if self.calls is not None:
            found += [value for value in asdict(self.calls).values() if isinstance(value, str)]
        return [mark for mark in found if mark] + (HARMONY_MARKS if self.is_harmony else [])

    @property
    def is_harmony(self) -> bool:
        """Whether messages are in channels, as those of gpt-oss."""
        return self.calls is not None and self.calls.kind == HARMONY

    def begins_thought(self, prompt: str) -> bool:
        """Whether a rendered prompt has begun the model's thought."""
        return self.thoughts is not None and bool(self.thoughts.begin) and prompt.rstrip().endswith(self.thoughts.begin)

    def facts(self) -> dict[str, Any]:
        """Returns it in types that travel."""
        return asdict(self)


HARMONY_MARKS = [f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "call", "return")]


def chat_form(facts: Mapping[str, Any]) -> ChatForm:
    """Returns what `ChatForm.facts` was made of."""
    calls, thoughts = facts["calls"], facts["thoughts"]
    if calls is not None:
        paths = {field.name: tuple(calls[field.name]) for field in fields(CallForm) if field.name.endswith("_path")}
        calls = CallForm(**{**calls, **paths})
    return ChatForm(calls, thoughts and ThoughtForm(**thoughts), facts["no_calls"], facts["no_thoughts"])


def parts(mark: str) -> list[str]:
    """Returns the parts of a mark between which white space may stand, since models add and leave
    out some. A bracket at its end is a part of its own.
    """
    return [part for word in mark.split() for part in re.fullmatch(r"(.*?)([\[({]?)", word, re.DOTALL).groups() if part]  # type: ignore[union-attr]
