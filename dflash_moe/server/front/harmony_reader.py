"""Reads messages in channels, as gpt-oss writes them (OpenAI, "Harmony response format"):
`<|channel|>analysis<|message|>` begins a thought, `final` text, and `commentary to=functions.NAME`
a call. The prompt has begun the first one with `<|start|>assistant`.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dflash_moe.server.front.call_forms import HARMONY_MARKS, MAX_CALLS
from dflash_moe.server.front.call_ids import new_call_id
from dflash_moe.server.front.growing_reader import GrowingReader
from dflash_moe.server.front.message_pieces import CallPiece
from dflash_moe.server.front.text_source import Emit, Reading, loaded

# What is between two marks of a header: a role, a channel, a recipient, a type.
MAX_HEADER = 256
_RECIPIENT = re.compile(r"\bto=functions\.([A-Za-z0-9_.\-]{1,64})(?![A-Za-z0-9_.\-])")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
# All that may end a body: models leave out an end before they start the next one.
_ENDS = [mark for mark in HARMONY_MARKS if mark not in ("<|message|>", "<|constrain|>")]


class HarmonyReader(GrowingReader):
    """A `MessageReader`. Nothing is a call without `tools`, which are schemas by name."""

    def __init__(self, tools: Mapping[str, Any], *, is_single: bool = False) -> None:
        """`is_single` says that what follows the first call is dropped."""
        self._tools = tools
        super().__init__(self._messages(), is_single=is_single)

    def _messages(self) -> Reading[None]:
        source = self._source
        while not (self._is_single and self.has_called):
            while source.is_empty:
                if source.is_last:
                    return
                yield
            source.record()
            is_headed = yield from self._header()
            header = source.recorded()
            if not is_headed:
                # Text outside of all channels.
                self._piece.content.append(header)
                yield from self._body(self._piece.content.append)
            elif (named := _RECIPIENT.search(header)) and named[1] in self._tools and self._num_calls < MAX_CALLS:
                yield from self._call(named[1], header)
            elif "to=" in header:
                self._piece.content.append(header)
                yield from self._body(self._piece.content.append)
            elif (channel := _CHANNEL.search(header)) and channel[1] == "analysis":
                self.is_thinking = True
                yield from self._body(self._piece.reasoning.append)
                self.is_thinking = False
            else:
                # What comes before calls is written for the reader, too.
                yield from self._body(self._piece.content.append)

    def _header(self) -> Reading[bool]:
        """Takes all up to the mark before a body. Says whether that came, behind a channel or a
        recipient.
        """
        source, found = self._source, ""
        for mark in ("<|start|>", "assistant"):
            yield from source.taken(mark)
        if not ((yield from source.is_next("<|channel|>")) or (yield from source.is_next(" to="))):
            return False
        while len(found) <= MAX_HEADER:
            if (yield from source.taken("<|message|>")):
                return True
            if source.is_empty:
                if source.is_last:
                    return False
                yield
                continue
            found += source.take(1)
        return False

    def _body(self, emit: Emit) -> Reading[str]:
        """Takes a body and the mark that ends it, which it returns; what starts the next one
        stays.
        """
        source = self._source
        while (yield from source.until_next("<|", emit)):
            for mark in _ENDS:
                if (yield from source.is_next(mark)):
                    return mark if mark in ("<|start|>", "<|channel|>") else source.take(len(mark))
            emit(source.take(2))
        return ""

    def _call(self, name: str, header: str) -> Reading[None]:
        arguments: list[str] = []

        def emit(text: str) -> None:
            if text:
                arguments.append(text)
                self._piece.calls.append(CallPiece(index, arguments=text))

        index = self._num_calls
        self._piece.calls.append(CallPiece(index, new_call_id(is_short=False), name))
        end = yield from self._body(emit)
        text = "".join(arguments)
        if loaded(text, dict) is not None:
            self.has_called = True
            self._num_calls += 1
        else:
            self._num_calls += self._piece.breaks(index)
            self._piece.content.append(header + text + (end if end not in ("<|start|>", "<|channel|>") else ""))
