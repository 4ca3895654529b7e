"""Every error the product raises on purpose. Messages say what was asked, what was found and what
to do.

Depends on nothing. The C++ core raises these same classes (csrc/bindings/errors.cc).
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

_MAX_SHOWN = 80


def shown(value: object) -> str:
    """A value that somebody gave, as a message shows it: its repr, cut to a length that fits a
    sentence. Never raises, whatever the value is.
    """
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - an integer of 5,000 digits, or any object's own repr
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__} ({error})"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def printable(text: str) -> str:
    """The text with bytes that are no UTF-8 spelt out: an argument, and so a path, may hold any."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class DflashError(Exception):
    """Base of all errors of this package.

    What programs want to know are fields, None where it does not apply: `code` (the name in
    docs/errors.md, such as "worker_lost"), `worker` (its name), `layer` (index in the layer table),
    `token` (row of the call) and `slot` (of the worker's data path). The message is for people.
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
        """The fields above as keyword arguments, for another error about the same thing."""
        return {name: getattr(self, name) for name in ("code", "worker", "layer", "token", "slot")}


class ConfigError(DflashError, ValueError):
    """An argument, flag, environment variable or setting that is not allowed; names it, its value
    and the allowed ones.
    """

    exit_code = 2
    default_code = "invalid_argument"


class TopologyError(ConfigError):
    """A topology file that is wrong; the message starts with `file:line:`."""


class CheckpointError(DflashError):
    """A checkpoint that is missing, truncated, inconsistent, or not the one the peer has; names
    file and tensor.
    """

    exit_code = 2
    default_code = "checkpoint"


class UnsupportedError(DflashError):
    """Something this build, machine or version cannot do; names the class and field, or the
    format.
    """

    exit_code = 2
    default_code = "unsupported"


class ProtocolError(DflashError):
    """A peer that broke the protocol, speaks another version, or failed to authenticate; names the
    field and both values.
    """

    exit_code = 2
    default_code = "protocol"


class WorkerError(DflashError):
    """A worker answered a call with an error; names worker and layer."""

    exit_code = 3
    default_code = "worker_failed"


class WorkerLost(WorkerError):  # noqa: N818 - the name is public
    """A worker hung up, died, froze or could not be started; names worker and layer and quotes its
    log.
    """

    default_code = "worker_lost"


class WorkerTimeout(WorkerError):  # noqa: N818 - the name is public
    """A call, start or handshake passed its deadline; names worker, layer and the limit."""

    default_code = "timeout"
