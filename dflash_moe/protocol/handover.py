"""The messages of a hand-over: how `dflash-moe llama` (the supervisor, which starts and loads the
workers) gives a program without Python what it needs to call them.

They travel in the frames of the control plane over one Unix socket. Messages and codec are the
core's (csrc/wire/handover_fields.h), which the library of the program has too; the library's side
is csrc/c_interface.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dflash_moe import _core
from dflash_moe._core import (
    HANDOVER_TOKEN_BYTES,
    HANDOVER_VERSION,
    Counted,
    OpenHandover,
    PathAnswered,
    PathOffered,
    PathWorn,
    PlanHead,
    PlannedLayer,
    PlannedShard,
    PlannedTensor,
    PlannedWorker,
    RefuseHandover,
    TensorSeen,
    WorkerGone,
)
from dflash_moe._core import HandoverReady as Ready
from dflash_moe._core import PathTermsMessage as PathTerms

__all__ = [
    "HANDOVER_CODEC", "HANDOVER_TOKEN_BYTES", "HANDOVER_VERSION", "Counted", "HandoverMessage", "OpenHandover",
    "PathAnswered", "PathOffered", "PathTerms", "PathWorn", "PlanHead", "PlannedLayer", "PlannedShard", "PlannedTensor",
    "PlannedWorker", "Ready", "RefuseHandover", "TensorSeen", "WorkerGone", "counted_fields", "message_name",
]  # fmt: skip

# Both ends have the same HANDOVER_VERSION. What they say of data frames is compared by
# OpenHandover.layout. By ascending numbers of types, from 1 on.
HandoverMessage = (
    OpenHandover | RefuseHandover | PlanHead | PlannedWorker | PlannedLayer | PlannedShard | PlannedTensor | PathTerms
    | PathOffered | PathAnswered | Ready | PathWorn | WorkerGone | TensorSeen | Counted
)  # fmt: skip


class HandoverCodec:
    """The core's codec as a Connection takes one. Any thread may call."""

    def encode(self, message: HandoverMessage) -> bytes:
        """Returns the msgpack form. Texts beyond their limit are cut; ProtocolError names another
        field outside its limits.
        """
        return _core.encode_handover(message)

    def decode(self, payload: bytes, *, ignore_unknown: bool = False) -> HandoverMessage:
        """Returns the message, or raises ProtocolError, for unknown fields too: both ends have the
        same version.
        """
        del ignore_unknown
        return _core.decode_handover(payload)


HANDOVER_CODEC = HandoverCodec()


def message_name(message: object) -> str:
    """Returns the name that docs/protocol.md has; two classes of the core have longer ones."""
    names: dict[type, str] = {Ready: "Ready", PathTerms: "PathTerms"}
    return names.get(type(message), type(message).__name__)


def counted_fields(counted: Counted | None) -> dict[str, int]:
    """Returns all counters by name, zeros where nobody has counted."""
    names = next(fields for name, fields in _core.handover_tables() if name == "Counted")
    return {name: 0 if counted is None else getattr(counted, name) for _, name, _ in names}
