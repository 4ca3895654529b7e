"""One row as whoever shall compute it is asked: drawn for a shard, or cut out of an exchange that
crossed a data path.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.errors import ProtocolError
from dflash_moe.protocol.messages import MAX_ROW_BYTES, MAX_ROW_PAIRS, ComputeRow
from dflash_moe.protocol.rows import bytes_of, floats_of

if TYPE_CHECKING:
    from dflash_moe.placement.held_shards import HeldShard

# By their numbers in frames: (name, bytes of a value).
DTYPES = tuple(_core.wire_dtypes().items())
_HEADER_BYTES = _core.wire_limits()["frame_header_bytes"]
# The values of a drawn row are these, k / 128 for k from -128 to 127: bf16 holds them exactly.
_DRAWN = [struct.pack("<f", (k - 128) / 128)[2:] for k in range(256)]


@dataclass(frozen=True, slots=True)
class RowQuestion:
    """A row, the experts of one shard that it goes to, and the dtypes of row and reply."""

    # Positions in the shard, ascending, with the routing weight of each.
    local_expert_ids: tuple[int, ...]
    weights: tuple[float, ...]
    row: bytes
    row_dtype: str
    reply_dtype: str

    def as_message(self, held: HeldShard) -> ComputeRow:
        """Returns the message that asks a holder of the shard."""
        return ComputeRow(
            layer=held.layer.index, shard=held.shard_id, local_expert_ids=self.local_expert_ids,
            weights=bytes_of(self.weights), row=self.row, row_dtype=self.row_dtype, reply_dtype=self.reply_dtype,
        )  # fmt: skip


def drawn_rows(held: HeldShard, *, is_thorough: bool = False) -> list[RowQuestion]:
    """Returns the row that every holder of the shard is asked for when it joins: values, routing
    weights and experts follow from the weights fingerprint alone. Where `is_thorough`, there is a
    row for every top_k experts, so that each of them is asked for once.

    A shard whose rows are too wide for a control message has none.
    """
    ffn = held.layer.ffn
    if max(2 * ffn.in_size, 4 * ffn.out_size) > MAX_ROW_BYTES:
        return []
    draw = random.Random(held.weights_fingerprint)
    order = draw.sample(range(len(held.experts)), len(held.experts))
    num_pairs = max(1, min(held.layer.top_k, len(order), MAX_ROW_PAIRS))
    firsts = range(0, len(order), num_pairs) if is_thorough else (0,)
    return [
        RowQuestion(
            local_expert_ids=(ids := tuple(sorted(order[first : first + num_pairs]))),
            weights=tuple((place + 1) / 16 for place in range(len(ids))),
            row=b"".join(map(_DRAWN.__getitem__, draw.randbytes(ffn.in_size))),
            row_dtype="bf16",
            reply_dtype="f32",
        )
        for first in firsts
    ]


@dataclass(frozen=True, slots=True)
class ExchangedRow:
    """A row that a worker has computed in a call, and what it answered."""

    layer: int
    shard: int
    question: RowQuestion
    answer: bytes


def exchanged_rows(request: bytes, reply: bytes, *, first: int, at_most: int) -> Iterator[ExchangedRow]:
    """Yields up to `at_most` rows of an exchange from row `first` on, around its end. `request` and
    `reply` are whole frames as they crossed the data path; an answer that is an error, that belongs
    to another request, or that is no frame, so that the client did not take it either, has no rows.
    """
    try:
        asked = _core.decode_frame_header(request[:_HEADER_BYTES])
        told = _core.decode_frame_header(reply[:_HEADER_BYTES])
    except ProtocolError:
        return
    is_answer = asked["kind"] == _core.REQUEST_FRAME and told["kind"] == _core.REPLY_FRAME
    if not is_answer or any(asked[name] != told[name] for name in ("call_id", "attempt", "slice", "num_rows")):
        return
    if _core.checksum(reply[_HEADER_BYTES:]) != told["payload_checksum"]:
        return
    num_rows, num_pairs = asked["num_rows"], asked["num_pairs"]
    (row_dtype, row_size), (reply_dtype, reply_size) = DTYPES[asked["request_dtype"]], DTYPES[asked["reply_dtype"]]
    payload, answers = memoryview(request)[_HEADER_BYTES:], memoryview(reply)[_HEADER_BYTES:]
    # The width follows from the bytes: rows come last, and their offset depends on no width.
    layout = _core.request_layout(num_rows, num_pairs, 1, row_dtype)
    row_bytes = (len(payload) - layout["rows_offset"]) // num_rows
    answer_offset = _core.reply_layout(num_rows, 1, reply_dtype)["rows_offset"]
    answer_bytes = (len(answers) - answer_offset) // num_rows
    if row_bytes % row_size or answer_bytes % reply_size:
        return
    counts = struct.unpack_from(f"<{num_rows}H", payload, layout["row_counts_offset"])
    for place in range(min(at_most, num_rows)):
        row = (first + place) % num_rows
        pair, count = sum(counts[:row]), counts[row]
        question = RowQuestion(
            local_expert_ids=struct.unpack_from(f"<{count}H", payload, layout["local_ids_offset"] + 2 * pair),
            weights=floats_of(bytes(payload[layout["weights_offset"] + 4 * pair :][: 4 * count])),
            row=bytes(payload[layout["rows_offset"] + row * row_bytes :][:row_bytes]),
            row_dtype=row_dtype,
            reply_dtype=reply_dtype,
        )
        answer = bytes(answers[answer_offset + row * answer_bytes :][:answer_bytes])
        yield ExchangedRow(asked["layer"], asked["shard"], question, answer)


def difference(held: HeldShard, question: RowQuestion, found: bytes, expected: bytes) -> str:
    """Returns a clause that says where two replies to a row differ: how many values, and the first
    of them with both bit patterns.
    """
    size = dict(DTYPES)[question.reply_dtype]
    if len(found) != len(expected):
        return f"it has {len(found) // size} values and not {len(expected) // size}"
    pairs = zip(range(0, len(found), size), range(size, len(found) + size, size), strict=True)
    unlike = [begin // size for begin, end in pairs if found[begin:end] != expected[begin:end]]
    experts = ", ".join(str(held.experts[local]) for local in question.local_expert_ids)
    if not unlike:
        return "it does not differ"
    at = slice(unlike[0] * size, (unlike[0] + 1) * size)
    theirs, ours = (int.from_bytes(one[at], "little") for one in (found, expected))
    return (
        f"{len(unlike)} of {len(found) // size} values of a row for experts {experts} differ, the first at column {unlike[0]}: "
        f"{theirs:#0{2 * size + 2}x} and not {ours:#0{2 * size + 2}x} ({question.reply_dtype})"
    )
