"""Errors across the control connection: one table from numeric code to Python class, shared with
csrc/base/result.h.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dflash_moe.errors import (
    CheckpointError,
    ConfigError,
    DflashError,
    ProtocolError,
    UnsupportedError,
    WorkerError,
    WorkerLost,
    WorkerTimeout,
)
from dflash_moe.protocol.messages import Refusal

# 1..11 are the codes of csrc/base/result.h (a test compares them); 64 and up exist only on the
# control connection.
INTERNAL = 8
BUSY = 64
ERROR_CLASSES: dict[int, type[DflashError]] = {
    1: ConfigError,
    2: UnsupportedError,
    3: ProtocolError,
    4: CheckpointError,
    5: WorkerLost,
    6: WorkerTimeout,
    7: WorkerError,
    8: WorkerError,
    9: DflashError,
    10: DflashError,
    11: DflashError,
    BUSY: WorkerError,
}
_CODES: dict[type[DflashError], int] = {
    ConfigError: 1,
    UnsupportedError: 2,
    ProtocolError: 3,
    CheckpointError: 4,
    WorkerLost: 5,
    WorkerTimeout: 6,
    WorkerError: 8,
    DflashError: 9,
}


def to_refusal(error: BaseException) -> Refusal:
    """The message that reports `error` to the peer; the class survives, the text is cut to the
    field's limit.
    """
    code = INTERNAL
    for cls in type(error).__mro__:
        if cls in _CODES:
            code = _CODES[cls]
            break
    text = str(error) or type(error).__name__
    if not isinstance(error, DflashError):
        text = f"{type(error).__name__}: {text}"
    return Refusal(code=code, text=_cut(text))


def busy_refusal(worker: str) -> Refusal:
    """What a by-hand worker answers to a second host."""
    text = f"worker {worker} is busy: it already serves another host; wait until that one is done or start another worker"
    return Refusal(code=BUSY, text=text)


def to_error(refusal: Refusal, *, worker: str) -> DflashError:
    """The Python error of a Refusal; its text begins with the worker's name, once. An unknown code
    becomes WorkerError.
    """
    cls = ERROR_CLASSES.get(refusal.code, WorkerError)
    text = "".join(char if char.isprintable() or char == "\n" else "?" for char in refusal.text)
    return cls(text if text.startswith(f"worker {worker}") else f"worker {worker}: {text}")


def _cut(text: str) -> str:
    return text.encode("utf-8", "replace")[:4000].decode("utf-8", "ignore")
