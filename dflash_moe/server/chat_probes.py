"""Conversations that say how a chat template writes: their names and texts occur nowhere else.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_moe.errors import DflashError

FIRST, SECOND = "probe_alpha", "probe_beta"
KEYS = ("first_key", "second_key")
ANSWER, THOUGHT, RESULT, QUESTION = "Visible answer.", "Hidden thought.", "Returned result.", "Asked question."
# The arguments of both calls.
VALUES: tuple[dict[str, Any], ...] = (
    {KEYS[0]: "valueone", KEYS[1]: "valuetwo"},
    {KEYS[0]: "valuethree", KEYS[1]: "valuefour"},
)
# All probes of a template take two seconds; a template that loops is given up after so many.
PROBE_S = 30.0
# The probes' turns have some hundred characters. Of a longer one not every cut is tried.
MAX_TURN = 4096
Message = dict[str, Any]
Render = Callable[..., str]


class Probes:
    """A template, and what it makes of conversations. `special` are tokens that are not in a
    model's text.
    """

    # Ids that are tried: ours, those of nine letters and digits, and those that name the tool.
    IDS = ("call_00000000000000000000000{place}", "probe000{place}", "functions.{name}:{place}")

    def __init__(self, template: str, render: Render, special: Sequence[str]) -> None:
        """`render` is that of a `TemplateRenderer`."""
        self.template = template
        self.special = tuple(special)
        self.refusal = ""
        self.has_short_ids = self.takes_text = False
        self._id = self.IDS[0]
        self._render = render
        self._until = time.monotonic() + PROBE_S
        self.generation_prompt = self.tried([], add_generation_prompt=True) or ""

    def tried(self, turns: Sequence[Message], *, add_generation_prompt: bool = False, tools: Any = None) -> str | None:
        """Returns a conversation's text behind a question; None where the template refuses it."""
        question = {"role": "user", "content": QUESTION}
        tools = TOOLS if tools is None else tools
        self.refusal = ""
        if time.monotonic() > self._until:
            self.refusal = f"the chat template was probed for over {PROBE_S:g} s"
            return None
        try:
            return self._render([question, *turns], tools=tools or None, add_generation_prompt=add_generation_prompt)
        except DflashError as error:
            self.refusal = str(error)
            return None

    def answer(self, content: str, **more: Any) -> Message:
        """Returns a message of the model."""
        return {"role": "assistant", "content": content, **more}

    def calling(self, content: str, *calls: tuple[str, Mapping[str, Any]], **more: Any) -> Message:
        """Returns a message of the model with calls: names and arguments."""
        written = [
            {
                "id": self._id_of(name, place),
                "type": "function",
                "function": {"name": name, "arguments": self._given(arguments)},
            }
            for place, (name, arguments) in enumerate(calls)
        ]
        return self.answer(content, tool_calls=written, **more)

    def _given(self, arguments: Mapping[str, Any]) -> Any:
        return json.dumps(arguments, ensure_ascii=False) if self.takes_text else arguments

    def _id_of(self, name: str, place: int) -> str:
        return self._id.format(name=name, place=place)

    def results(self, num_calls: int) -> list[Message]:
        """Returns what tools have answered to the first calls of a pair."""
        return [
            {"role": "tool", "tool_call_id": self._id_of(name, place), "name": name, "content": RESULT}
            for place, name in enumerate((FIRST, SECOND)[:num_calls])
        ]

    def pair(self, *, is_parallel: bool) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """Returns both calls, or the first."""
        return [(FIRST, VALUES[0]), (SECOND, VALUES[1])][: 1 + is_parallel]

    def says_tools(self) -> bool:
        """Whether a prompt names the tools that there are."""
        return FIRST in (self.tried([], add_generation_prompt=True) or "")

    def turn(self, message: Message) -> str | None:
        """Returns the text of a message of the model, without what begins and ends each of its
        turns. None where the template refuses it.
        """
        plain, text = self.tried([self.answer(ANSWER)]), self.tried([message])
        if text is None or plain is None or ANSWER not in plain:
            return None
        place = plain.rfind(ANSWER)
        head = _whole_tags(os.path.commonprefix([text, plain[:place]]))
        tail = os.path.commonprefix([text[::-1], plain[place + len(ANSWER) :][::-1]])[::-1]
        # Tags that both share only the end of are not what ends each turn.
        tail = tail if tail == plain[place + len(ANSWER) :] else tail[tail.find("<") :] if "<" in tail else ""
        turn = text[len(head) : len(text) - len(tail)]
        if len(turn) > MAX_TURN:
            self.refusal = f"the chat template writes more than {MAX_TURN} characters for a call"
            return None
        return turn

    def two_calls(self) -> str | None:
        """Returns a turn with two calls, and finds how they must be given."""
        return self._called(is_parallel=True)

    def one_call(self) -> str | None:
        """As `two_calls`, with one."""
        return self._called(is_parallel=False)

    def _called(self, *, is_parallel: bool) -> str | None:
        pair = self.pair(is_parallel=is_parallel)
        for place, form in enumerate(self.IDS):
            self._id, self.has_short_ids = form, place == 1
            for takes_text in (False, True):
                self.takes_text = takes_text
                turn = self.turn(self.calling("", *pair))
                if turn is not None and all(name in turn for name, _ in pair) and KEYS[0] in turn:
                    # Text that is written as it came is written again as the model wrote it.
                    self.takes_text = True
                    self.takes_text = takes_text or self.turn(self.calling("", *pair)) == turn
                    return turn
        return None


def _whole_tags(text: str) -> str:
    """Returns a text without the beginning of a tag at its end."""
    at = text.rfind("<")
    return text[:at] if at > text.rfind(">") else text


def _tool(name: str) -> dict[str, Any]:
    properties = {
        **{key: {"type": "string", "description": "A text."} for key in KEYS},
        "count": {"type": "integer", "description": "A number."},
        "share": {"type": "number", "description": "A number."},
        "is_set": {"type": "boolean", "description": "A choice."},
        "nested": {"type": "object", "description": "An object."},
        "listed": {"type": "array", "description": "A list.", "items": {"type": "integer"}},
    }
    parameters = {"type": "object", "properties": properties, "required": list(KEYS)}
    return {"type": "function", "function": {"name": name, "description": f"Tool {name}.", "parameters": parameters}}


TOOLS = [_tool(FIRST), _tool(SECOND)]
