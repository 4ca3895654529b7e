"""What the readers of messages have in common: a generator reads the text of a choice as it comes,
and what it finds is the piece that the next `push` returns.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dflash_moe.server.front.message_pieces import CallPiece, Piece
from dflash_moe.server.front.text_source import Reading, TextSource


class GrowingReader:
    """A `MessageReader` over a generator."""

    def __init__(self, reading: Reading[None], *, is_single: bool) -> None:
        """`reading` has not begun: it takes text of `_source`, and puts what it says into `_piece`.
        `is_single` says that what follows the first call is dropped.
        """
        self.is_thinking = False
        self.has_called = False
        self._is_single = is_single
        self._source = TextSource()
        self._piece = Growing()
        self._num_calls = 0
        self._reading = reading
        self._has_ended = False

    def push(self, text: str, *, is_last: bool) -> Piece:
        """As `MessageReader.push`."""
        self._source.feed(text, is_last=is_last)
        if not self._has_ended:
            # A generator that has ended gives the second argument.
            self._has_ended = next(self._reading, self) is self
        return self._piece.taken()


class Growing:
    """The piece that the next `push` returns."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self.calls: list[CallPiece] = []

    def breaks(self, index: int) -> bool:
        """Takes back a call that has turned out to be none. Says whether something of it was given
        out before, which the piece then says is broken.
        """
        is_out = not any(piece.index == index and piece.name for piece in self.calls)
        self.calls[:] = [piece for piece in self.calls if piece.index != index]
        if is_out:
            self.calls.append(CallPiece(index, is_broken=True))
        return is_out

    def taken(self) -> Piece:
        """Returns it, and begins the next one. Parts of one call are one."""
        found = Piece("".join(self.reasoning), "".join(self.content), tuple(_joined(self.calls)))
        self.reasoning.clear()
        self.content.clear()
        self.calls.clear()
        return found


def _joined(pieces: list[CallPiece]) -> list[CallPiece]:
    found: list[CallPiece] = []
    for piece in pieces:
        if found and found[-1].index == piece.index and not piece.name and not piece.is_broken and not found[-1].is_broken:
            last = found[-1]
            found[-1] = CallPiece(last.index, last.call_id, last.name, last.arguments + piece.arguments)
        else:
            found.append(piece)
    return found
