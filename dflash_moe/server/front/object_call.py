"""Reads a call that is a JSON object, whose members may come in any order.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from typing import Any, Protocol

from dflash_moe.server.front.call_forms import CallForm
from dflash_moe.server.front.text_source import NO_JSON, Reading, TextSource, loaded

_MAX_KEY = 256
# Characters of a name and of an id, as JSON may spell them.
_MAX_NAME = 512
# What an object has beside name and arguments, and arguments that are text within a string.
_MAX_VALUE = 1 << 20
_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,64}")
_NONE = object()


class Taker(Protocol):
    """Who is given what was read of a call."""

    name: str

    def has_tool(self, name: str) -> bool:
        """Whether there is such a tool."""
        ...

    def begin(self, name: str, call_id: str = "") -> bool:
        """Takes the beginning of a call. Says whether there is such a tool."""
        ...

    def argue(self, text: str) -> None:
        """Takes a piece of the arguments."""
        ...

    def object(self) -> Reading[bool]:
        """Reads arguments that are an object, and gives them out as they come."""
        ...


class ObjectCall:
    """What is known of a call that is an object."""

    def __init__(self, source: TextSource, form: CallForm, taker: Taker) -> None:
        self._source = source
        self._form = form
        self._taker = taker
        self._name = ""
        self._call_id = ""
        self._has_arguments = False
        # Arguments that came before the name.
        self._early: list[str] | None = None

    def read(self) -> Reading[bool]:
        """Reads the object, and says whether it was a call."""
        yield from self._source.space()
        if not (yield from self._source.taken("{")) or not (yield from self._members(())):
            return False
        return bool(self._taker.name) and self._has_arguments

    def _members(self, path: tuple[str, ...]) -> Reading[bool]:
        """Reads the members of an object whose bracket was taken, and the closing one."""
        source = self._source
        yield from source.space()
        if (yield from source.taken("}")):
            return True
        while True:
            yield from source.space()
            key = yield from source.json_string(_MAX_KEY)
            if key is None or not (yield from source.marks([":"])):
                return False
            yield from source.space()
            if not (yield from self._member((*path, key))):
                return False
            yield from source.space()
            if (yield from source.taken("}")):
                return True
            if not (yield from source.taken(",")):
                return False

    def _member(self, path: tuple[str, ...]) -> Reading[bool]:
        source, form = self._source, self._form
        if path == form.name_path:
            name = yield from source.json_string(_MAX_NAME)
            if name is None or not self._taker.has_tool(name) or self._name:
                return False
            self._name = name
            return self._begun()
        if path == form.arguments_path:
            if self._has_arguments:
                return False
            return (yield from self._arguments())
        if path in (form.name_path[: len(path)], form.arguments_path[: len(path)]):
            return (yield from source.taken("{")) and (yield from self._members(path))
        value = yield from self._any_value()
        if path == form.id_path and isinstance(value, str) and _ID.fullmatch(value):
            self._call_id = value
        return value is not _NONE

    def _arguments(self) -> Reading[bool]:
        source, form = self._source, self._form
        if form.is_quoted and (yield from source.is_next('"')):
            text = yield from source.json_string(_MAX_VALUE)
            if text is None or loaded(text, dict) is None:
                return False
            self._early = [text]
        elif self._name:
            # An id behind them comes too late.
            if not self._taker.begin(self._name, self._call_id) or not (yield from self._taker.object()):
                return False
        else:
            early: list[str] = []
            if not (yield from source.json_span(early.append)) or loaded("".join(early), dict) is None:
                return False
            self._early = early
        self._has_arguments = True
        return self._begun()

    def _begun(self) -> bool:
        """Gives out arguments that were there before the name, once both are."""
        if self._name and self._early is not None:
            if not self._taker.begin(self._name, self._call_id):
                return False
            self._taker.argue("".join(self._early))
            self._early = None
        return True

    def _any_value(self) -> Reading[Any]:
        """Reads a value and returns it, if it is a string; `_NONE` where there is none."""
        source = self._source
        if (yield from source.is_next('"')):
            text = yield from source.json_string(_MAX_VALUE)
            return _NONE if text is None else text
        if (yield from source.is_next("{")) or (yield from source.is_next("[")):
            found: list[str] = []
            is_whole = (yield from source.json_span(found.append)) and loaded("".join(found), object) is not NO_JSON
            return None if is_whole else _NONE
        return None if (yield from source.json_scalar()) else _NONE
