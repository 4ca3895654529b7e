"""An answer's text as it comes, read by generators: each yields where it needs more text, and holds
back no more than what may yet become the mark it looks for. So all text is looked at once.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from dflash_moe.engine.text import overlap

T = TypeVar("T")
# A generator that yields where it waits for text, and returns what it has read.
Reading = Generator[None, None, T]
Emit = Callable[[str], object]

# JSON and Python values of arguments are nested no deeper.
MAX_DEPTH = 64
_SPACE = re.compile(r"\s*")
_JSON_SIGNS = re.compile(r'["{}\[\]]')
_STRING_SIGNS = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_PYTHON_SIGNS = re.compile(r"[\"'{}\[\](),]")
_OPENING, _CLOSING = "{[(", "}])"


class TextSource:
    """The text that has come and was not taken yet. One thread uses it."""

    def __init__(self) -> None:
        self.is_last = False
        self._text = ""
        self._at = 0
        # What was taken since `record`.
        self._taken: list[str] | None = None

    def feed(self, text: str, *, is_last: bool) -> None:
        """Adds text."""
        self._text = self._text[self._at :] + text
        self._at = 0
        self.is_last = is_last

    def record(self) -> None:
        """Notes what is taken from now on, for `recorded`."""
        self._taken = []

    def recorded(self) -> str:
        """Returns what was taken since `record`, and notes no more."""
        taken, self._taken = self._taken or [], None
        return "".join(taken)

    @property
    def is_empty(self) -> bool:
        """Whether all that has come was taken."""
        return self._at == len(self._text)

    def take(self, num_characters: int) -> str:
        """Returns the next characters, of those that are there."""
        found = self._text[self._at : self._at + num_characters]
        self._at += len(found)
        if self._taken is not None:
            self._taken.append(found)
        return found

    def take_all(self) -> str:
        """Returns all that is there."""
        return self.take(len(self._text) - self._at)

    def is_next(self, mark: str) -> Reading[bool]:
        """Says whether the text goes on with a mark, which it leaves there."""
        while True:
            found = self._text[self._at : self._at + len(mark)]
            if found == mark:
                return True
            if self.is_last or not mark.startswith(found):
                return False
            yield

    def taken(self, mark: str) -> Reading[bool]:
        """Takes a mark where the text goes on with it, and says so."""
        if (yield from self.is_next(mark)):
            self.take(len(mark))
            return True
        return False

    def space(self) -> Reading[None]:
        """Takes white space."""
        while True:
            found = _SPACE.match(self._text, self._at)
            self.take(len(found[0]) if found else 0)
            if not self.is_empty or self.is_last:
                return
            yield

    def marks(self, parts: list[str]) -> Reading[bool]:
        """Takes the parts of a mark, with any white space before each, and says whether they were
        there.
        """
        for part in parts:
            yield from self.space()
            if not (yield from self.taken(part)):
                return False
        return True

    def matched(self, pattern: re.Pattern[str], max_characters: int) -> Reading[str]:
        """Takes what matches a pattern of single characters, and returns it; at most one more than
        `max_characters`, which says that there are too many.
        """
        found = ""
        while len(found) <= max_characters:
            part = pattern.match(self._text, self._at, self._at + max_characters + 1 - len(found))
            found += self.take(len(part[0]) if part else 0)
            if not self.is_empty or self.is_last:
                break
            yield
        return found

    def until(self, mark: str, emit: Emit, lead: str = "") -> Reading[str]:
        """Takes all before a mark, and the mark, and returns that, with what stands before it of
        the white space `lead`; without a mark it takes all there is and returns nothing. What is
        before goes to `emit`.
        """
        led = [lead[place:] + mark for place in range(len(lead) + 1)]
        while True:
            at = self._text.find(mark, self._at)
            if at >= 0:
                begins = (at + len(mark) - len(one) for one in led)
                begin = next(
                    place
                    for place, one in zip(begins, led, strict=True)
                    if place >= self._at and self._text.startswith(one, place)
                )
                emit(self.take(begin - self._at))
                return self.take(at + len(mark) - begin)
            rest = self._text[self._at :]
            held = 0 if self.is_last else max(overlap(rest, one) for one in led)
            emit(self.take(len(rest) - held))
            if self.is_last:
                return ""
            yield

    def until_next(self, mark: str, emit: Emit) -> Reading[bool]:
        """Takes all before a mark, which stays, and says whether it came."""
        while True:
            at = self._text.find(mark, self._at)
            held = overlap(self._text[self._at :], mark) if at < 0 and not self.is_last else 0
            emit(self.take((at if at >= 0 else len(self._text) - held) - self._at))
            if at >= 0 or self.is_last:
                return at >= 0
            yield

    # -- values ------------------------------------------------------------------------------------
    def json_span(self, emit: Emit) -> Reading[bool]:
        """Takes an object or a list of JSON by its brackets, and says whether it ended."""
        if not ((yield from self.is_next("{")) or (yield from self.is_next("["))):
            return False
        return (yield from self._span(emit, _JSON_SIGNS, ""))

    def python_span(self, emit: Emit) -> Reading[bool]:
        """Takes a value as Python writes it, up to the comma or the bracket behind it, which stays,
        and says whether one came.
        """
        return (yield from self._span(emit, _PYTHON_SIGNS, ",)"))

    def _span(self, emit: Emit, signs: re.Pattern[str], ends: str) -> Reading[bool]:
        depth, quote = 0, ""
        while True:
            at = self._at
            while found := (_STRING_SIGNS[quote] if quote else signs).search(self._text, at):
                sign, at = found[0], found.end()
                if sign == "\\":
                    at += 1
                elif sign in _STRING_SIGNS:
                    quote = "" if quote else sign
                elif not depth and sign in ends:
                    emit(self.take(at - 1 - self._at))
                    return True
                elif sign in _OPENING:
                    depth += 1
                elif sign in _CLOSING:
                    depth -= 1
                if depth < 0 or depth > MAX_DEPTH:
                    return False
                if not depth and not ends and not quote:
                    emit(self.take(at - self._at))
                    return True
            # The character behind a backslash is taken with it.
            is_cut = at > len(self._text)
            emit(self.take(len(self._text) - is_cut - self._at))
            if self.is_last:
                return False
            yield

    def json_string(self, max_characters: int) -> Reading[str | None]:
        """Takes a string of JSON and returns it; None for what is none, or is too long."""
        if not (yield from self.is_next('"')):
            return None
        found = self.take(1)
        while True:
            at = self._at
            while sign := _STRING_SIGNS['"'].search(self._text, at):
                at = sign.end() + (sign[0] == "\\")
                if sign[0] == '"':
                    text: str | None = loaded(found + self.take(at - self._at), str)
                    return text
            found += self.take(len(self._text) - (at > len(self._text)) - self._at)
            if self.is_last or len(found) > max_characters:
                return None
            yield

    def json_scalar(self) -> Reading[bool]:
        """Takes a number, true, false or null, and says whether it was one."""
        found = yield from self.matched(_SCALAR, 64)
        return bool(found) and loaded(found, object) is not NO_JSON


_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
# What `loaded` returns for no JSON where any value is looked for.
NO_JSON = object()


def _refused(constant: str) -> Any:
    raise ValueError(constant)


def _finite(number: str) -> float:
    # One that is read as infinite could not be written as JSON again.
    if math.isinf(found := float(number)):
        raise ValueError(number)
    return found


def loaded(text: str, kind: type[T]) -> Any:
    """Returns a value of JSON of a kind. None for anything else, and NO_JSON where the kind is
    `object`.
    """
    try:
        found = json.loads(text, parse_constant=_refused, parse_float=_finite)
    except (ValueError, RecursionError):
        found = NO_JSON
    return found if kind is object or isinstance(found, kind) else None
