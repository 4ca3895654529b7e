"""Reads one call of a tool in the form that was found for a model, and gives it out as it comes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from dflash_moe.server.front.call_forms import JSON, NAMED, TAGGED, CallForm, parts
from dflash_moe.server.front.call_ids import new_call_id
from dflash_moe.server.front.call_values import json_of_python, json_of_raw
from dflash_moe.server.front.message_pieces import CallPiece
from dflash_moe.server.front.object_call import ObjectCall
from dflash_moe.server.front.text_source import Reading, TextSource, loaded

MAX_NAME = 64
_MAX_KEY = 256
_NAME = re.compile(r"[A-Za-z0-9_.\-]*")
_KEY = re.compile(r"\w*")
_DIGITS = re.compile(r"[0-9]*")


class CallReader:
    """Reads the call `index` of a message. `tools` are the schemas of arguments by name."""

    def __init__(
        self, source: TextSource, form: CallForm, tools: Mapping[str, Any], index: int, emit: Callable[[CallPiece], object]
    ) -> None:
        self._source = source
        self._form = form
        self._tools = tools
        self._index = index
        self._emit = emit
        # Once it has begun. What is read until then may be no call, and nothing of it is given out.
        self.name = ""

    def read(self) -> Reading[bool]:
        """Reads what is between the marks of a call, and says whether it was one."""
        kind = self._form.kind
        if kind == JSON:
            return (yield from ObjectCall(self._source, self._form, self).read())
        if kind == NAMED:
            return (yield from self._named())
        return (yield from (self._tagged() if kind == TAGGED else self._python()))

    def has_tool(self, name: str) -> bool:
        """Whether there is such a tool."""
        return name in self._tools

    def begin(self, name: str, call_id: str = "") -> bool:
        """Gives out the beginning of a call. Says whether there is such a tool."""
        if name not in self._tools or self.name:
            return False
        self.name = name
        self._emit(CallPiece(self._index, call_id or new_call_id(is_short=self._form.has_short_ids), name))
        return True

    def argue(self, text: str) -> None:
        """Gives out a piece of the arguments."""
        if text:
            self._emit(CallPiece(self._index, arguments=text))

    def object(self) -> Reading[bool]:
        """Reads arguments that are an object, and gives them out as they come."""
        found: list[str] = []

        def emit(text: str) -> None:
            found.append(text)
            self.argue(text)

        yield from self._source.space()
        return (yield from self._source.json_span(emit)) and loaded("".join(found), dict) is not None

    def _named(self) -> Reading[bool]:
        source, form = self._source, self._form
        yield from source.space()
        name = yield from source.matched(_NAME, MAX_NAME)
        call_id = ""
        if form.id_prefix is not None and name in self._tools:
            if not (yield from source.taken(":")):
                return False
            call_id = f"{form.id_prefix}{name}:{(yield from source.matched(_DIGITS, 6))}"
        if name not in self._tools or not (yield from source.marks(parts(form.middle))):
            return False
        yield from source.space()
        if not (yield from source.is_next("{")):
            return False
        return self.begin(name, call_id) and (yield from self.object())

    def _tagged(self) -> Reading[bool]:
        source, form = self._source, self._form
        yield from source.space()
        name = yield from source.matched(_NAME, MAX_NAME)
        if name not in self._tools or not (yield from source.marks(parts(form.name_end))) or not self.begin(name):
            return False
        begin, num_arguments = parts(form.key_begin), 0
        while True:
            yield from source.space()
            if not (yield from source.is_next(begin[0])):
                self.argue("}" if num_arguments else "{}")
                return True
            yield from source.marks(begin)
            pair = yield from self._tagged_pair(name)
            if pair is None:
                return False
            self.argue((", " if num_arguments else "{") + pair)
            num_arguments += 1

    def _tagged_pair(self, name: str) -> Reading[str | None]:
        """Reads a key and its value, and returns them as JSON; None where there are none."""
        source, form = self._source, self._form
        key_end, value_end = parts(form.key_end), parts(form.value_end)
        found: list[str] = []
        if not (yield from source.until(key_end[0], found.append)) or not (yield from source.marks(key_end[1:])):
            return None
        key = "".join(found).strip()
        # One line's end is the form's, further ones are the value's.
        after = form.key_end[len(form.key_end.rstrip()) :]
        if after:
            yield from source.taken(after)
        value: list[str] = []
        if not (yield from source.until(value_end[0], value.append)) or not (yield from source.marks(value_end[1:])):
            return None
        text = "".join(value)
        lead = form.value_end[: len(form.value_end) - len(form.value_end.lstrip())]
        text = text[: len(text) - len(lead)] if lead and text.endswith(lead) else text
        return f"{json.dumps(key, ensure_ascii=False)}: {json_of_raw(text, self._tools[name], key)}"

    def _python(self) -> Reading[bool]:
        source = self._source
        yield from source.space()
        name = yield from source.matched(_NAME, MAX_NAME)
        if not (name in self._tools and (yield from source.taken("(")) and self.begin(name)):
            return False
        yield from source.space()
        begin = "{"
        while not (yield from source.taken(")")):
            key = yield from source.matched(_KEY, _MAX_KEY)
            value: list[str] = []
            if not key or not (yield from source.marks(["="])) or not (yield from source.python_span(value.append)):
                return False
            found = json_of_python("".join(value))
            if found is None:
                return False
            self.argue(f"{begin}{json.dumps(key, ensure_ascii=False)}: {found}")
            begin = ", "
            if (yield from source.taken(",")):
                yield from source.space()
        self.argue("{}" if begin == "{" else "}")
        return True
