"""Reads messages in the form that was found for a model: a thought, text, and calls of tools. What
turns out to be no call stays text, as it was written.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_moe.server.front.call_forms import MAX_CALLS, CallForm, ThoughtForm, parts
from dflash_moe.server.front.call_reader import CallReader
from dflash_moe.server.front.growing_reader import GrowingReader
from dflash_moe.server.front.text_source import Reading


class FormReader(GrowingReader):
    """A `MessageReader`. `tools` are the schemas of arguments by name; without them, or without a
    form, nothing is a call.
    """

    def __init__(
        self, calls: CallForm | None, thoughts: ThoughtForm | None, tools: Mapping[str, Any], *, is_thinking: bool = False,
        is_single: bool = False,
    ) -> None:  # fmt: skip
        """`is_thinking` says that the prompt has begun a thought, `is_single` that what follows the
        first call is dropped.
        """
        self._form = calls if tools else None
        self._thoughts = thoughts
        self._tools = tools
        super().__init__(self._message(), is_single=is_single)
        self.is_thinking = is_thinking

    def _message(self) -> Reading[None]:
        source, form = self._source, self._form
        yield from self._thought()
        opening = form.opening if form is not None else []
        if form is None or not opening or len(opening[0]) == 1:
            # Marks that are none, or one bracket, count at the beginning alone.
            source.record()
            yield from source.space()
            begins = form is not None and (yield from source.is_next(opening[0] if opening else "{"))
            before = source.recorded()
            if begins and (yield from self._calls(opening, before)):
                return
            self._piece.content.append("" if begins else before)
            yield from self._rest()
            return
        while found := (yield from source.until(opening[0], self._piece.content.append, form.lead)):
            if (yield from self._calls(opening[1:], found)):
                return

    def _rest(self) -> Reading[None]:
        while True:
            self._piece.content.append(self._source.take_all())
            if self._source.is_last:
                return
            yield

    def _thought(self) -> Reading[None]:
        if self._thoughts is None:
            return
        source, begin, end = self._source, self._thoughts.begin, self._thoughts.end
        if not self.is_thinking:
            source.record()
            yield from source.space()
            if not (yield from source.taken(begin)):
                self._piece.content.append(source.recorded())
                return
            source.recorded()
            self.is_thinking = True
        else:
            yield from source.space()
            # Some models repeat what the prompt has begun.
            yield from source.taken(begin)
        yield from source.space()
        yield from source.until(end, self._piece.reasoning.append, "\n")
        self.is_thinking = False
        yield from source.space()

    # -- calls -------------------------------------------------------------------------------------
    def _calls(self, marks: list[str], before: str) -> Reading[bool]:
        """Reads calls, the first of which begins with `before`, which was taken, and marks that
        follow. Says whether nothing is to come behind them.
        """
        source, form = self._source, self._form
        assert form is not None
        source.record()
        while True:
            if not (yield from self._call(marks, before)):
                return False
            if self._is_single:
                return True
            source.record()
            yield from source.space()
            following, close = form.next, parts(form.section_end)
            if close and (yield from source.is_next(close[0])):
                if not (yield from source.marks(close)):
                    self._piece.content.append(source.recorded())
                    return False
                yield from self._space_between()
                return False
            if not (yield from source.is_next(following[0] if following else "{")):
                yield from self._space_between()
                return False
            before, marks = source.recorded(), following
            source.record()

    def _space_between(self) -> Reading[None]:
        """Drops white space behind calls where nothing comes behind it, or a call."""
        yield from self._source.space()
        taken = self._source.recorded()
        space = taken[len(taken.rstrip()) :]
        opening = self._form.opening if self._form is not None else []
        is_over = self._source.is_last and self._source.is_empty
        if not is_over and not (opening and (yield from self._source.is_next(opening[0]))):
            self._piece.content.append(space)

    def _call(self, marks: list[str], before: str) -> Reading[bool]:
        """Reads one call, whose text has begun with `before`. Says whether it was one."""
        source, form = self._source, self._form
        assert form is not None
        call = CallReader(source, form, self._tools, self._num_calls, self._piece.calls.append)
        is_call = self._num_calls < MAX_CALLS and (yield from source.marks(marks)) and (yield from call.read())
        # The end of a text ends a call, too, once that is whole.
        if is_call and form.end:
            yield from source.space()
            ended = source.is_last and source.is_empty
            is_call = ended or (yield from source.marks(parts(form.end)))
        text = before + source.recorded()
        if is_call:
            self.has_called = True
        if is_call or (call.name and self._piece.breaks(self._num_calls)):
            self._num_calls += 1
        self._piece.content.append("" if is_call else text)
        return is_call
