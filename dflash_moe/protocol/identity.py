"""The facts on which both ends must agree before any weight is loaded, and the comparison that
names the field and both values where they do not.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dflash_moe import _core
from dflash_moe.errors import ProtocolError, UnsupportedError
from dflash_moe.protocol.messages import Hello, HelloReply
from dflash_moe.protocol.paths import TRANSPORTS
from dflash_moe.topology.numerics import CLASSES

DTYPES = tuple(_core.wire_dtypes())
# Hello tells the peer which transports this end has.
CAPABILITIES = tuple(TRANSPORTS)


@dataclass(frozen=True, slots=True)
class Identity:
    """The facts of one end of a session."""

    worker: str
    model_fingerprint: str
    wire_limits: Mapping[str, int]
    dtypes: tuple[str, ...]


def local_identity(worker: str, model_fingerprint: str) -> Identity:
    """Returns the facts of this process for a session with `worker`."""
    return Identity(worker, model_fingerprint, _core.wire_limits(), DTYPES)


def identity_of(message: Hello | HelloReply) -> Identity:
    """Returns the facts of the peer as its message states them."""
    return Identity(message.worker, message.model_fingerprint, message.wire_limits, tuple(message.dtypes))


def require_equal(host: Identity, worker: Identity, *, name: str) -> None:
    """Raises ProtocolError where host and worker differ, naming the first such field and both
    values. `name` is the worker's, for the message.
    """
    for field, hint in (
        ("worker", "check the name in the topology and on the command line"),
        ("model_fingerprint", "both ends must read the same checkpoint"),
        ("dtypes", "install the same dflash_moe on both ends"),
    ):
        ours, theirs = getattr(host, field), getattr(worker, field)
        if ours != theirs:
            raise ProtocolError(f"worker {name}: {field}: the host has {ours}, the worker has {theirs}; {hint}")
    for limit in sorted({*host.wire_limits, *worker.wire_limits}):
        ours, theirs = host.wire_limits.get(limit), worker.wire_limits.get(limit)
        if ours != theirs:
            raise ProtocolError(f"worker {name}: wire_limits.{limit}: the host has {ours}, the worker has {theirs}")


def choose_numerics(
    asked: str, isa: str, *, name: str, device: _core.BackendDevice | None = None
) -> tuple[str, tuple[str, ...]]:
    """Returns the numerics class that `asked` means on `device`, or where that is None with the
    kernel set `isa`, and all classes that it computes.

    `asked` is the name of a class, or a word of `activations`, which means the first offered class
    that answers to it. Raises UnsupportedError naming the worker, the device or kernel set, the
    class and those that are offered.
    """
    offered = tuple(_core.numerics_classes(isa) if device is None else device.numerics_classes())
    chosen = next((name for name in offered if asked in (name, CLASSES[name].activations)), asked)
    if chosen not in offered:
        kernels = f"kernel set {isa}" if device is None else f"device {device.label}"
        raise UnsupportedError(
            f"worker {name}: its {kernels} does not compute numerics class {asked}; it offers {', '.join(offered)}: "
            "give it other `activations`, or place it on a machine that computes this class"
        )
    return chosen, offered
