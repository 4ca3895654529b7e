"""The messages of a hand-over: how `dflash-moe llama` (the supervisor, which starts and loads the
workers) gives a program without Python what it needs to call them.

They travel in the frames of the control plane over one Unix socket. The supervisor sends the plan
as one message for every worker, layer, shard and tensor, so that no model is too large for a frame.
A data path is then made in three messages, at the start and whenever it is renewed: PathTerms,
PathOffered, PathAnswered. The library makes the host's end with csrc/transport/kinds.h and the
worker makes its own; the supervisor carries bytes and descriptors between them without looking.
The library's side is csrc/c_interface. Numbers are only ever added.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from dflash_moe.protocol.schema import Binary, Codec, Flag, Float, ListOf, Message, Octets, Text, Uint, Wire

# Both ends have the same version. What they say of data frames is compared by OpenHandover.layout.
HANDOVER_VERSION = 1
TOKEN_BYTES = 32

_U16 = Uint(0xFFFF)
_U32 = Uint(0xFFFFFFFF)
_U64 = Uint()
_NAME = Text(256)
_REASON = Text(1024)
# The limit is kMaxHandoverBytes of csrc/transport/kinds.h.
_PAYLOAD = Octets(4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenHandover(Message):
    """Library to supervisor, first: proves with the inherited token that it was meant."""

    TYPE: ClassVar[int] = 1
    version: Annotated[int, Wire(1, _U16)]
    token: Annotated[bytes, Wire(2, Binary(TOKEN_BYTES))]
    # `_core.layout_fingerprint()` of the library, which was compiled at another time than the core.
    layout: Annotated[int, Wire(3, _U32)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseHandover(Message):
    """Supervisor to library: why nothing is handed over. The supervisor closes afterwards."""

    TYPE: ClassVar[int] = 2
    text: Annotated[str, Wire(1, _REASON)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanHead(Message):
    """Supervisor to library: what concerns all calls, and how many messages of each kind follow."""

    TYPE: ClassVar[int] = 3
    num_workers: Annotated[int, Wire(1, Uint(1024))]
    num_layers: Annotated[int, Wire(2, Uint(4096))]
    num_shards: Annotated[int, Wire(3, Uint(1 << 20))]
    num_tensors: Annotated[int, Wire(4, Uint(1 << 16))]
    # llama.cpp's name of the architecture, and the fingerprint of the workers' checkpoint.
    architecture: Annotated[str, Wire(5, Text(64))]
    fingerprint: Annotated[str, Wire(6, Text(128))]
    spin_ns: Annotated[int, Wire(7, _U64)]
    call_timeout_ns: Annotated[int, Wire(8, _U64)]
    stall_timeout_ns: Annotated[int, Wire(9, _U64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorker(Message):
    """Supervisor to library: a worker, numbered in the order of these messages."""

    TYPE: ClassVar[int] = 4
    name: Annotated[str, Wire(1, Text(128))]
    slice_tokens: Annotated[int, Wire(2, _U32)]
    window: Annotated[int, Wire(3, _U32)]
    is_measured: Annotated[bool, Wire(4, Flag())]
    request_dtype: Annotated[str, Wire(5, Text(8))]
    reply_dtype: Annotated[str, Wire(6, Text(8))]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayer(Message):
    """Supervisor to library: a layer and its experts' formula (csrc/compute/experts/ffn_spec.h)."""

    TYPE: ClassVar[int] = 5
    layer: Annotated[int, Wire(1, _U32)]
    name: Annotated[str, Wire(2, _NAME)]
    in_size: Annotated[int, Wire(3, _U32)]
    intermediate_size: Annotated[int, Wire(4, _U32)]
    out_size: Annotated[int, Wire(5, _U32)]
    num_experts: Annotated[int, Wire(6, _U32)]
    top_k: Annotated[int, Wire(7, _U32)]
    cost_class: Annotated[int, Wire(8, _U32)]
    # The numbers of the enumerations Activation and GateKind.
    activation: Annotated[int, Wire(9, Uint(255))]
    gate: Annotated[int, Wire(10, Uint(255))]
    alpha: Annotated[float, Wire(11, Float(-1e9, 1e9))]
    up_offset: Annotated[float, Wire(12, Float(-1e9, 1e9))]
    # 0 means that there is no such limit.
    gate_max: Annotated[float, Wire(13, Float(0.0, 1e9))]
    up_limit: Annotated[float, Wire(14, Float(0.0, 1e9))]
    has_gate_up_bias: Annotated[bool, Wire(15, Flag())]
    has_down_bias: Annotated[bool, Wire(16, Flag())]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedShard(Message):
    """Supervisor to library: the experts of a layer that one worker holds."""

    TYPE: ClassVar[int] = 6
    layer: Annotated[int, Wire(1, _U32)]
    shard: Annotated[int, Wire(2, _U32)]
    worker: Annotated[int, Wire(3, _U32)]
    weights_fingerprint: Annotated[int, Wire(4, _U64)]
    # First and count of each range of expert ids, ascending.
    expert_ranges: Annotated[tuple[int, ...], Wire(5, ListOf(_U32, 4096))]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor(Message):
    """Supervisor to library: a tensor of the checkpoint that the workers stand in for."""

    TYPE: ClassVar[int] = 7
    layer: Annotated[int, Wire(1, _U32)]
    name: Annotated[str, Wire(2, _NAME)]
    # The type's number in GGUF, and the extents in GGUF's order: the fastest one first.
    ggml_type: Annotated[int, Wire(3, _U16)]
    extents: Annotated[tuple[int, ...], Wire(4, ListOf(_U64, 4))]
    num_bytes: Annotated[int, Wire(5, _U64)]
    # Where it begins in its file: a stub's pages are aligned there (dflash_moe/model/stub.py).
    file_offset: Annotated[int, Wire(6, _U64)]
    # Of the content, by dflash_moe/model/tensor_sample.py. The supervisor of a stub has none.
    has_sample: Annotated[bool, Wire(7, Flag())]
    sample: Annotated[int, Wire(8, _U32)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathTerms(Message):
    """Supervisor to library: make the host's end of a data path. The supervisor sends it for every
    worker at the start, in answer to PathWorn, and when a lost worker has come back.
    """

    TYPE: ClassVar[int] = 8
    worker: Annotated[int, Wire(1, _U32)]
    generation: Annotated[int, Wire(2, _U64)]
    transport: Annotated[str, Wire(3, Text(32))]
    num_slots: Annotated[int, Wire(4, _U32)]
    request_bytes: Annotated[int, Wire(5, _U64)]
    reply_bytes: Annotated[int, Wire(6, _U64)]
    socket_buffer_bytes: Annotated[int, Wire(7, _U64)]
    user_timeout_ms: Annotated[int, Wire(8, _U32)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathOffered(Message):
    """Library to supervisor: what the worker needs to make its end, with descriptors."""

    TYPE: ClassVar[int] = 9
    worker: Annotated[int, Wire(1, _U32)]
    generation: Annotated[int, Wire(2, _U64)]
    payload: Annotated[bytes, Wire(3, _PAYLOAD)]
    num_descriptors: Annotated[int, Wire(4, _U16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathAnswered(Message):
    """Supervisor to library: what completes the host's end. The worker's descriptors come first,
    then a dialled connection of the path where the transport has one, then the pulse.
    """

    TYPE: ClassVar[int] = 10
    worker: Annotated[int, Wire(1, _U32)]
    generation: Annotated[int, Wire(2, _U64)]
    payload: Annotated[bytes, Wire(3, _PAYLOAD)]
    num_descriptors: Annotated[int, Wire(4, _U16)]
    # The first path of a session brings a pulse.
    has_pulse: Annotated[bool, Wire(5, Flag())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Message):
    """Supervisor to library: the plan is complete and every worker has its path."""

    TYPE: ClassVar[int] = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class PathWorn(Message):
    """Library to supervisor: a path must be renewed; nothing is under way on it."""

    TYPE: ClassVar[int] = 12
    worker: Annotated[int, Wire(1, _U32)]
    reason: Annotated[str, Wire(2, _REASON)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGone(Message):
    """Either direction: a worker is lost. The supervisor has seen its process or connection end;
    the library has judged it by its pulse or by a call's deadline.
    """

    TYPE: ClassVar[int] = 13
    worker: Annotated[int, Wire(1, _U32)]
    reason: Annotated[str, Wire(2, _REASON)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSeen(Message):
    """Library to supervisor: the program loads a tensor. Without a reason the workers stand in for
    it; with one the program keeps it.
    """

    TYPE: ClassVar[int] = 14
    name: Annotated[str, Wire(1, _NAME)]
    reason: Annotated[str, Wire(2, _REASON)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted(Message):
    """Library to supervisor: counters since the start, sent at most twice a second while they
    change, and at the end.
    """

    TYPE: ClassVar[int] = 15
    calls: Annotated[int, Wire(1, _U64)]
    failed_calls: Annotated[int, Wire(2, _U64)]
    messages: Annotated[int, Wire(3, _U64)]
    rows: Annotated[int, Wire(4, _U64)]
    request_bytes: Annotated[int, Wire(5, _U64)]
    reply_bytes: Annotated[int, Wire(6, _U64)]
    floor_bytes: Annotated[int, Wire(7, _U64)]
    # How long calls took together, and of that the time in which a worker computed.
    call_ns: Annotated[int, Wire(8, _U64)]
    compute_ns: Annotated[int, Wire(9, _U64)]


HANDOVER_MESSAGES: tuple[type[Message], ...] = (
    OpenHandover, RefuseHandover, PlanHead, PlannedWorker, PlannedLayer, PlannedShard, PlannedTensor, PathTerms, PathOffered,
    PathAnswered, Ready, PathWorn, WorkerGone, TensorSeen, Counted,
)  # fmt: skip
HANDOVER_CODEC = Codec(HANDOVER_MESSAGES)


def cut_reason(text: str) -> str:
    """Returns as much of `text` as a reason may hold."""
    return text.encode("utf-8", "replace")[: _REASON.max_bytes].decode("utf-8", "ignore")
