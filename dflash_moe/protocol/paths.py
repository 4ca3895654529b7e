"""Data paths as the control plane sees them: the table of transports, and what an Attach says of a
path. Both ends use these. What a transport does with an offer is known only to its row of the table
(csrc/transport/kinds.h).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dflash_moe import _core
from dflash_moe.protocol.framing import USER_TIMEOUT_MS
from dflash_moe.protocol.messages import Attach

# The transports of this version by name, in the order in which `auto` prefers them.
TRANSPORTS = {kind.name: kind for kind in _core.transport_kinds()}


def terms_of(message: Attach, *, local_host: str = "", is_fast_only: bool = False) -> _core.PathTerms:
    """Returns what both ends know of the path that `message` asks for before it exists, with two
    wishes that the host's end alone has (csrc/transport/kinds.h).
    """
    return _core.PathTerms(
        _core.Geometry(message.num_slots, message.request_bytes, message.reply_bytes),
        message.generation,
        is_open=message.is_open,
        socket_buffer_bytes=message.socket_buffer_bytes,
        user_timeout_ms=USER_TIMEOUT_MS,
        local_host=local_host,
        is_fast_only=is_fast_only,
    )
