"""Every control message with its type number and its fields, which have integer keys and limits.
Numbers are only ever added.

The handshake (Open, Challenge, Proof, Accepted, or Refusal) comes first on every connection. All
other messages travel on the control connection only. Numbers below 16 never change their meaning,
so that ends of any two versions can refuse each other in words.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from dflash_moe import _core
from dflash_moe.config.values import runs_of
from dflash_moe.errors import ProtocolError
from dflash_moe.protocol.schema import Binary, Codec, Flag, Float, ListOf, Message, Table, Text, Tree, Uint, Wire

# Each end accepts a range of versions, and both must share one.
PROTOCOL_VERSION = 2
# A higher minor version may add fields, and the end with the lower one ignores those it does not
# know.
PROTOCOL_MINOR = 3
# From this minor version on a worker answers ChecksumRequest.
CHECKSUMS_SINCE = 1
# From this one on it answers ComputeRow, sums its weights up again where Hello asks for that, and
# sends WeightsChanged.
AUDIT_SINCE = 2
# From this one on it knows all words of Hello.weights_layout. Older ones know packed and mapped.
PANELS_SINCE = 3
# A row and its reply fit a frame up to these sizes. Wider ones are not asked for.
MAX_ROW_BYTES = 48 * 1024
MAX_ROW_PAIRS = 1024
NONCE_BYTES = 32
SESSION_ID_BYTES = 16
MAC_BYTES = 32

_U16 = Uint(0xFFFF)
_U32 = Uint(0xFFFFFFFF)
_U64 = Uint()
_NAME = Text(128)
_DTYPE = Text(8)
_NUMERICS = Text(64)
_WORDS = ListOf(Text(64), 64)
_HANDOVER = Binary(_core.MAX_HANDOVER_BYTES, may_be_shorter=True)


class Role(enum.IntEnum):
    """What a connection is used for."""

    CONTROL = 1
    PULSE = 2
    DATA = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Open(Message):
    """Host to worker, first on every connection."""

    TYPE: ClassVar[int] = 1
    protocol_min: Annotated[int, Wire(1, _U16)]
    protocol_max: Annotated[int, Wire(2, _U16)]
    protocol_minor: Annotated[int, Wire(3, _U16)]
    role: Annotated[int, Wire(4, Uint(255))]
    session_id: Annotated[bytes, Wire(5, Binary(SESSION_ID_BYTES))]
    # A data connection names the generation of its path; control and pulse connections have 0.
    generation: Annotated[int, Wire(6, _U64)]
    nonce: Annotated[bytes, Wire(7, Binary(NONCE_BYTES))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge(Message):
    """Worker's answer: the version it chose and its nonce."""

    TYPE: ClassVar[int] = 2
    protocol: Annotated[int, Wire(1, _U16)]
    protocol_minor: Annotated[int, Wire(2, _U16)]
    nonce: Annotated[bytes, Wire(3, Binary(NONCE_BYTES))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof(Message):
    """Host's MAC over the transcript."""

    TYPE: ClassVar[int] = 3
    mac: Annotated[bytes, Wire(1, Binary(MAC_BYTES))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted(Message):
    """Worker's MAC over the transcript and the host's proof."""

    TYPE: ClassVar[int] = 4
    mac: Annotated[bytes, Wire(1, Binary(MAC_BYTES))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal(Message):
    """A typed error in either direction; `code` as in `protocol/failures.py`. The sender may close
    afterwards.
    """

    TYPE: ClassVar[int] = 5
    code: Annotated[int, Wire(1, _U16)]
    text: Annotated[str, Wire(2, Text(4096))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """Host to worker on the control connection: who calls, what it expects, how the worker shall
    run.
    """

    TYPE: ClassVar[int] = 16
    package_version: Annotated[str, Wire(1, Text(64))]
    worker: Annotated[str, Wire(2, _NAME)]
    # The worker shall compute in this class.
    numerics_class: Annotated[str, Wire(3, _NUMERICS)]
    model_fingerprint: Annotated[str, Wire(4, Text(128))]
    wire_limits: Annotated[dict[str, int], Wire(5, Table(_U64, 64))]
    dtypes: Annotated[tuple[str, ...], Wire(6, ListOf(_DTYPE, 16))]
    capabilities: Annotated[tuple[str, ...], Wire(7, _WORDS)] = ()
    # The number of compute threads; 0 leaves it to the worker.
    threads: Annotated[int, Wire(8, _U16)] = 0
    spin_ns: Annotated[int, Wire(9, _U64)] = 0
    # Computing takes this many times as long, to emulate a slower machine.
    slowdown: Annotated[float, Wire(10, Float(1.0, 1e6))] = 1.0
    # The kernel set; an empty one means the worker's best.
    isa: Annotated[str, Wire(11, Text(32))] = ""
    # The CPUs of its compute threads in order; without any the threads are not pinned.
    cpus: Annotated[tuple[int, ...], Wire(12, ListOf(_U16, 1024))] = ()
    backend: Annotated[str, Wire(13, Text(16))] = "cpu"
    # The number of the device among those of the backend.
    device: Annotated[int, Wire(14, _U16)] = 0
    # With backend sim, the vendor whose cards it stands for.
    simulate: Annotated[str, Wire(15, Text(16))] = ""
    # "packed", or "mapped" to compute from the worker's own mapped checkpoint. Since minor version
    # 3 also "auto": packed, or mapped from the panels that the worker's machine keeps on disk, and
    # that it writes there as its own settings say; and "stored": the same, where missing panels are
    # always written.
    weights_layout: Annotated[str, Wire(16, Text(16))] = "packed"
    # The host waits so long in each phase of its start; 0 means that it does not tell.
    start_timeout_s: Annotated[float, Wire(17, Float(0.0, 86400.0))] = 0.0
    # The worker sums all its weights up again in this time, over and over, and tells by
    # WeightsChanged what it finds; 0 means never.
    scrub_s: Annotated[float, Wire(18, Float(0.0, 1e8))] = 0.0
    # Above 0, with auto and stored: so many bytes of memory have a part of the experts at a time,
    # and all panels are on disk.
    slots_bytes: Annotated[int, Wire(19, _U64)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloReply(Message):
    """Worker to host: the same facts of its own side."""

    TYPE: ClassVar[int] = 17
    package_version: Annotated[str, Wire(1, Text(64))]
    worker: Annotated[str, Wire(2, _NAME)]
    # The class that was asked for, or the one of its card that answers to it.
    numerics_class: Annotated[str, Wire(3, _NUMERICS)]
    model_fingerprint: Annotated[str, Wire(4, Text(128))]
    wire_limits: Annotated[dict[str, int], Wire(5, Table(_U64, 64))]
    dtypes: Annotated[tuple[str, ...], Wire(6, ListOf(_DTYPE, 16))]
    capabilities: Annotated[tuple[str, ...], Wire(7, _WORDS)]
    isa: Annotated[str, Wire(8, Text(32))]
    threads: Annotated[int, Wire(9, _U16)]
    pid: Annotated[int, Wire(10, _U32)]
    # The bytes that a new process may still take on its machine, or that are free on its card.
    memory_available: Annotated[int, Wire(11, _U64)]
    # The bytes that the worker's own topology grants to weights; 0 means no limit of its own.
    memory_limit: Annotated[int, Wire(12, _U64)] = 0
    # All classes that its kernel set or device computes.
    numerics_offered: Annotated[tuple[str, ...], Wire(13, _WORDS)] = ()
    # The label of the device that it computes on; an empty one means the processor.
    device: Annotated[str, Wire(14, Text(1024))] = ""
    # The bytes of weights that other sessions use or have left. This one uses them too, or those
    # that nobody uses are freed for what it loads, so they come on top of `memory_available`.
    kept_bytes: Annotated[int, Wire(15, _U64)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShard(Message):
    """Host to worker: one shard of one layer. Answered by Progress ... then ShardLoaded, or
    Refusal.
    """

    TYPE: ClassVar[int] = 18
    layer: Annotated[int, Wire(1, Uint(4095))]
    shard: Annotated[int, Wire(2, _U32)]
    name: Annotated[str, Wire(3, Text(512))]
    ffn: Annotated[Any, Wire(4, Tree())]
    weight_dtype: Annotated[str, Wire(5, Text(32))]
    # Runs of ascending expert ids as start, count, start, count (`compress_experts`).
    expert_ranges: Annotated[tuple[int, ...], Wire(6, ListOf(Uint(65535), 8192))]
    weights_fingerprint: Annotated[int, Wire(7, _U64)]
    # This shard is computed in this class.
    numerics: Annotated[str, Wire(8, _NUMERICS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Message):
    """Worker to host while loading, at least every 0.5 s: a counter that moves."""

    TYPE: ClassVar[int] = 19
    counter: Annotated[int, Wire(1, _U64)]
    resident_bytes: Annotated[int, Wire(2, _U64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLoaded(Message):
    """Worker to host: this shard's weights are resident."""

    TYPE: ClassVar[int] = 20
    layer: Annotated[int, Wire(1, Uint(4095))]
    shard: Annotated[int, Wire(2, _U32)]
    resident_bytes: Annotated[int, Wire(3, _U64)]
    # Whether all source bytes were read, as packing does. Otherwise the shard is unchecked so far,
    # and its checksum means nothing.
    is_checked: Annotated[bool, Wire(4, Flag())] = False
    content_checksum: Annotated[int, Wire(5, _U64)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach(Message):
    """Host to worker: build a data path. Descriptors that travel along: see docs/protocol.md ("Data
    paths").
    """

    TYPE: ClassVar[int] = 21
    generation: Annotated[int, Wire(1, _U64)]
    # A name in the table of transports.
    transport: Annotated[str, Wire(2, Text(16))]
    num_slots: Annotated[int, Wire(3, Uint(256))]
    request_bytes: Annotated[int, Wire(4, Uint(256 << 20))]
    reply_bytes: Annotated[int, Wire(5, Uint(256 << 20))]
    num_descriptors: Annotated[int, Wire(6, Uint(4))]
    # A pulse connection comes with this data path, which is the first of the session.
    has_pulse: Annotated[bool, Wire(7, Flag())]
    # The buffers of the data connection have this size each way; 0 keeps the system's own.
    socket_buffer_bytes: Annotated[int, Wire(8, Uint(1 << 30))] = 0
    # With transport shared, the segments stay writable so that devices may register them.
    is_open: Annotated[bool, Wire(9, Flag())] = False
    # The bytes that the transport's host end tells its worker end.
    offer: Annotated[bytes, Wire(10, _HANDOVER)] = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening(Message):
    """Worker to host, before Attached of a dialled transport: where its connections are awaited."""

    TYPE: ClassVar[int] = 22
    port: Annotated[int, Wire(1, _U16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached(Message):
    """Worker to host: the data path of this generation is served."""

    TYPE: ClassVar[int] = 23
    generation: Annotated[int, Wire(1, _U64)]
    num_descriptors: Annotated[int, Wire(2, Uint(4))]
    # The bytes that the transport's worker end answers.
    answer: Annotated[bytes, Wire(3, _HANDOVER)] = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsRequest(Message):
    """Host to worker: send Stats."""

    TYPE: ClassVar[int] = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats(Message):
    """Worker to host: its counters since start and its memory."""

    TYPE: ClassVar[int] = 25
    counters: Annotated[dict[str, int], Wire(1, Table(_U64, 64))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye(Message):
    """Host to worker: the session ends as wished; the worker stops serving and drops its shards."""

    # 26 and 27 were messages that no host ever sent, and stay unused.
    TYPE: ClassVar[int] = 28
    reason: Annotated[str, Wire(1, Text(256))] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksumRequest(Message):
    """Host to worker, since minor version 1: send the Checksum of a shard it holds."""

    TYPE: ClassVar[int] = 29
    layer: Annotated[int, Wire(1, Uint(4095))]
    shard: Annotated[int, Wire(2, _U32)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksum(Message):
    """Worker to host: what the source bytes of a shard add up to, or how far they have been
    read.
    """

    TYPE: ClassVar[int] = 30
    layer: Annotated[int, Wire(1, Uint(4095))]
    shard: Annotated[int, Wire(2, _U32)]
    # So many experts of the shard have been read whole.
    num_read: Annotated[int, Wire(3, _U32)]
    # The checksum means something only where all of them have been.
    is_checked: Annotated[bool, Wire(4, Flag())]
    content_checksum: Annotated[int, Wire(5, _U64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRow(Message):
    """Host to worker, since minor version 2: compute one row with a shard that it holds, beside its
    data path. Answered by RowComputed, or Refusal.
    """

    TYPE: ClassVar[int] = 31
    layer: Annotated[int, Wire(1, Uint(4095))]
    shard: Annotated[int, Wire(2, _U32)]
    # Positions in the shard, one for each pair, ascending.
    local_expert_ids: Annotated[tuple[int, ...], Wire(3, ListOf(_U16, MAX_ROW_PAIRS))]
    # Little-endian f32, one for each pair.
    weights: Annotated[bytes, Wire(4, Binary(4 * MAX_ROW_PAIRS, may_be_shorter=True))]
    row: Annotated[bytes, Wire(5, Binary(MAX_ROW_BYTES, may_be_shorter=True))]
    row_dtype: Annotated[str, Wire(6, _DTYPE)]
    reply_dtype: Annotated[str, Wire(7, _DTYPE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowComputed(Message):
    """Worker to host: the row's reply, in the dtype that was asked for."""

    TYPE: ClassVar[int] = 32
    layer: Annotated[int, Wire(1, Uint(4095))]
    shard: Annotated[int, Wire(2, _U32)]
    row: Annotated[bytes, Wire(3, Binary(MAX_ROW_BYTES, may_be_shorter=True))]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsChanged(Message):
    """Worker to host, unasked, since minor version 2: the weights of an expert were found changed
    in its memory. It computes nothing from them until they are loaded again.
    """

    TYPE: ClassVar[int] = 33
    layer: Annotated[int, Wire(1, Uint(4095))]
    shard: Annotated[int, Wire(2, _U32)]
    # Its position in the shard.
    local_expert_id: Annotated[int, Wire(3, _U16)]
    # Empty where they were loaded again, else why they could not be.
    failure: Annotated[str, Wire(4, Text(1024))] = ""


MESSAGES: tuple[type[Message], ...] = (
    Open, Challenge, Proof, Accepted, Refusal, Hello, HelloReply, LoadShard, Progress, ShardLoaded, Attach, Listening,
    Attached, StatsRequest, Stats, Bye, ChecksumRequest, Checksum, ComputeRow, RowComputed, WeightsChanged,
)  # fmt: skip
CODEC = Codec(MESSAGES)


def compress_experts(experts: tuple[int, ...]) -> tuple[int, ...]:
    """Writes ascending ids as flattened runs of (start, count): (0, 1, 2, 7) -> (0, 3, 7, 1)."""
    return tuple(number for first, last in runs_of(experts) for number in (first, last - first + 1))


def expand_experts(ranges: tuple[int, ...]) -> tuple[int, ...]:
    """Undoes `compress_experts`. Raises ProtocolError when a number is missing, or when a run is
    empty, overlaps or precedes the one before, or goes beyond 65,535 experts.
    """
    if len(ranges) % 2:
        raise ProtocolError(f"message LoadShard: field expert_ranges: found {len(ranges)} numbers, allowed are pairs")
    experts: list[int] = []
    next_free = 0
    for start, count in zip(ranges[::2], ranges[1::2], strict=True):
        if count == 0 or start < next_free or start + count > 65535:
            raise ProtocolError(
                f"message LoadShard: field expert_ranges: run ({start}, {count}) is empty, out of order or beyond 65535"
            )
        experts.extend(range(start, start + count))
        next_free = start + count
    return tuple(experts)
