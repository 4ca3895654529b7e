"""Errors across the control connection: one table from numeric code to Python class, shared with
csrc/base/error_code.h. And what the system refuses to the control plane itself, as typed errors.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterable
from typing import cast

from dflash_moe import _core
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

# The codes of the core, by name; 64 and up exist only on the control connection.
_CORE = _core.error_codes()
INTERNAL = _CORE["worker_failed"][0]
BUSY = 64
CROWDED = 65
LEAVING = 66


class CrowdedOut(WorkerError):
    """The worker dropped a connection before its proof, because too many strangers call. The host
    tries again.
    """


ERROR_CLASSES: dict[int, type[DflashError]] = {
    **dict(cast("Iterable[tuple[int, type[DflashError]]]", _CORE.values())),
    BUSY: WorkerError,
    CROWDED: CrowdedOut,
    LEAVING: WorkerLost,
}
_CODES: dict[type[DflashError], int] = {
    ConfigError: _CORE["invalid_argument"][0],
    UnsupportedError: _CORE["unsupported"][0],
    ProtocolError: _CORE["protocol"][0],
    CheckpointError: _CORE["checkpoint"][0],
    WorkerLost: _CORE["worker_lost"][0],
    WorkerTimeout: _CORE["timeout"][0],
    WorkerError: INTERNAL,
    DflashError: _CORE["system"][0],
    CrowdedOut: CROWDED,
}


def to_refusal(error: BaseException) -> Refusal:
    """Makes the message that reports `error` to the peer. The class of the error survives, and its
    text is cut to the limit of the field.
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


def busy_refusal(worker: str, max_sessions: int, *, is_back: bool) -> Refusal:
    """Makes the answer of a worker that was started by hand to a host for which it has no place;
    `is_back`: because the host's own former session has not ended yet.
    """
    if is_back:
        why = "it still ends this host's former session; try again in a moment"
    else:
        hosts = "another host" if max_sessions == 1 else f"{max_sessions} hosts"
        why = (
            f"it already serves {hosts}, and max_sessions is {max_sessions}; wait until one is done, raise "
            "max_sessions, or start another worker"
        )
    return Refusal(code=BUSY, text=f"worker {worker} is busy: {why}")


def crowded_refusal(owner: str, most: int) -> Refusal:
    """Makes the parting word of a listener to a connection that it drops before its proof in favour
    of a newer one. `owner` is who listens, for people; `most` is the number of such connections
    that it keeps.
    """
    text = (
        f"{owner} dropped this connection before it had proved the key: it keeps {most} such connections, and newer "
        "ones came; try again"
    )
    return Refusal(code=CROWDED, text=text)


def leaving_refusal(worker: str) -> Refusal:
    """Makes the parting word of a worker that was told to stop, by which its host knows that this
    was wanted.
    """
    return Refusal(code=LEAVING, text=f"worker {worker} was told to stop, and leaves")


def to_error(refusal: Refusal, *, worker: str) -> DflashError:
    """Makes the Python error of a Refusal. Its text begins with the worker's name, once, and holds
    no control characters. An unknown code becomes WorkerError.
    """
    cls = ERROR_CLASSES.get(refusal.code, WorkerError)
    text = "".join(char if char.isprintable() or char == "\n" else "?" for char in refusal.text)
    return cls(text if text.startswith(f"worker {worker}") else f"worker {worker}: {text}", worker=worker)


# What the system may lack now and have again a moment later.
_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)


def is_passing(error: BaseException) -> bool:
    """Says whether this system lacked descriptors, memory or the like, of which there may be enough
    again later, so that the error says nothing about a checkpoint or about a peer.
    """
    if isinstance(error, DflashError) and error.code in ("system", "out_of_memory"):
        return True
    # The loader's own errors carry the system's words alone.
    if isinstance(error, CheckpointError) and str(error).endswith(tuple(f": {os.strerror(one)}" for one in _LACKS)):
        return True
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in _LACKS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def is_descriptor_limit(error: OSError) -> bool:
    """Says whether the process or the machine has as many open files as it may have."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def descriptor_limit_text() -> str:
    """Says what limit of open descriptors this process has, and how to raise it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"this process may have {limit} open files and sockets; raise that with `ulimit -n 1024` before it starts"


def system_failure(doing: str, error: OSError) -> DflashError:
    """Makes the typed error of a system call that failed at this end while `doing` something. Where
    the limit of descriptors was reached, the error names it.
    """
    remedy = f"; {descriptor_limit_text()}" if is_descriptor_limit(error) else ""
    return DflashError(f"{doing}: {error.strerror or error}{remedy}", code="system")


def _cut(text: str) -> str:
    return text.encode("utf-8", "replace")[:4000].decode("utf-8", "ignore")
