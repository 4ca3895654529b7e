"""Every error that the product raises on purpose. A message says what was asked, what was found and
what to do.

This file depends on nothing. The C++ core raises these same classes (csrc/bindings/errors.cc).
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

_MAX_SHOWN = 80


def shown(value: object) -> str:
    """Returns a value that somebody gave as a message shows it: its repr, cut to a length that fits
    a sentence. It never raises, whatever the value is.
    """
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - an integer of 5,000 digits, or any object's own repr
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__} ({error})"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def printable(text: str) -> str:
    """Returns the text with bytes that are no UTF-8 spelt out. An argument, and so a path, may hold
    any bytes.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class DflashError(Exception):
    """The base of all errors of this package.

    What programs want to know is in fields, which are None where they do not apply: `code` (the
    name in docs/errors.md, such as "worker_lost"), `worker` (its name), `layer` (index in the layer
    table), `token` (row of the call) and `slot` (of the worker's data path). The message is for
    people, and nobody parses it. `exit_code` is what the command line exits with.
    """

    exit_code = 1
    default_code: str | None = None  # of an error that nobody gave one

    def __init__(
        self,
        *args: object,
        code: str | None = None,
        worker: str | None = None,
        layer: int | None = None,
        token: int | None = None,
        slot: int | None = None,
    ) -> None:
        super().__init__(*args)
        self.code = code or self.default_code
        self.worker = worker
        self.layer = layer
        self.token = token
        self.slot = slot

    def fields(self) -> dict[str, Any]:
        """Returns the fields as keyword arguments, for another error about the same thing."""
        return {name: getattr(self, name) for name in ("code", "worker", "layer", "token", "slot")}

    def reworded(self, text: str, **fields: Any) -> DflashError:
        """Returns an error of the same type that says `text`, with the same fields but for those
        given.
        """
        return type(self)(text, **{**self.fields(), **fields})


class ConfigError(DflashError, ValueError):
    """An argument, flag, environment variable or setting is not allowed. The message names it, its
    value and the allowed ones.
    """

    exit_code = 2
    default_code = "invalid_argument"


class TopologyError(ConfigError):
    """A topology file is wrong. The message starts with `file:line:`."""


class CheckpointError(DflashError):
    """A checkpoint is missing, truncated, inconsistent, or not the one that the peer has. The
    message names file and tensor.
    """

    exit_code = 2
    default_code = "checkpoint"


class UnsupportedError(DflashError):
    """This build, machine or version cannot do something. The message names the class and field, or
    the format.
    """

    exit_code = 2
    default_code = "unsupported"


class EngineError(DflashError):
    """The engine's own books contradict each other: a block was released twice, or a position has
    no block; or a half of a step did not end in time. No input causes it; the message names block
    or position and both values, or what was awaited and the limit.
    """

    default_code = "engine"


class QueueFull(DflashError):  # noqa: N818 - the name is public
    """The engine has as many waiting requests as it may have. Nothing was started; the message
    names the limit, and `retry_after_s` is when a place may be free, from how fast requests end.
    """

    default_code = "queue_full"

    def __init__(self, *args: object, retry_after_s: float = 1.0, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.retry_after_s = retry_after_s

    def fields(self) -> dict[str, Any]:
        """As `DflashError.fields`, with `retry_after_s`."""
        return {**super().fields(), "retry_after_s": self.retry_after_s}


class RequestCancelled(DflashError):  # noqa: N818 - the name is public
    """A request was cancelled, or its engine was closed before it had ended; with the code
    "draining", the engine takes no more because it is about to be closed.
    """

    default_code = "cancelled"


class ProtocolError(DflashError):
    """A peer broke the protocol, speaks another version, or failed to authenticate. The message
    names the field and both values.
    """

    exit_code = 2
    default_code = "protocol"


class WorkerError(DflashError):
    """A worker answered a call with an error. The message names worker and layer."""

    exit_code = 3
    default_code = "worker_failed"


class WorkerLost(WorkerError):  # noqa: N818 - the name is public
    """A worker hung up, died, froze or could not be started. The message names worker and layer,
    and quotes its log where the host started it.
    """

    default_code = "worker_lost"


class WorkerUnfit(WorkerError):  # noqa: N818 - the name is public
    """A worker computes other numbers than it must, so that none of its answers is used. The
    message names worker, layer and shard, and where which values differ.
    """

    default_code = "worker_unfit"


class WorkerTimeout(WorkerError):  # noqa: N818 - the name is public
    """A call, start or handshake passed its deadline; names worker, layer and the limit."""

    default_code = "timeout"
