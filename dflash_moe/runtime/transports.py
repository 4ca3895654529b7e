"""Which transport a worker gets: its address in the topology and the `transport` setting together decide.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.topology.addresses import Address

# (how the worker is reached, setting) -> channel kind; a named transport that cannot be had is an error.
_KINDS = {
    ("shared", "auto"): "shared",
    ("shared", "shared"): "shared",
    ("shared", "stream"): "unix",
    ("unix", "auto"): "unix",
    ("unix", "stream"): "unix",
    ("unix path", "auto"): "shared",
    ("unix path", "shared"): "shared",
    ("unix path", "stream"): "unix",
    ("tcp", "auto"): "tcp",
    ("tcp", "stream"): "tcp",
}


def choose_transport(worker: str, address: Address, setting: str) -> str:
    """Returns "loopback", "shared", "unix" or "tcp". UnsupportedError for fabric, ConfigError for a pair that cannot be.

    `loopback` is a worker without a process, so the setting does not concern it.
    """
    if setting == "fabric":
        raise UnsupportedError("transport fabric: this version has no fabric transport yet; use auto, shared or stream")
    if address.kind == "loopback":
        return "loopback"
    kind = _KINDS.get(("unix path" if address.path else address.kind, setting))
    if kind is None:
        raise ConfigError(
            f"transport {setting}: worker {worker} is reached by {address}, which does not offer it; "
            "take transport auto or change the worker's address"
        )
    return kind
