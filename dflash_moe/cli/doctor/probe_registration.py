"""What `doctor` tells of workers that register: where, who may, and what their keys allow.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_moe.topology import Topology


def probe_registration(topology: Topology) -> dict[str, Any]:
    """Returns `listen`, the `names` that may register and `keys`, which says what the keys that
    they come with allow; nothing where no worker registers.
    """
    found = topology.registration
    if found is None:
        return {}
    listed = [worker.name for worker in topology.registered_workers()]
    return {
        "listen": found.listen,
        "names": list(dict.fromkeys([*listed, *(found.names or ())])),
        "keys": "a key of its own each, good for that name alone; who has the group's, which only this host needs, makes any"
        if found.require_key_per_worker
        else "the group's key or one of its own each; who has the group's can be any worker, and this host to all of them: "
        "registration.require_key_per_worker keeps it here",
    }


def registration_lines(found: dict[str, Any]) -> list[str]:
    """Returns the lines of the report as text."""
    if not found:
        return []
    return [f"register   {', '.join(found['names'])} at {found['listen']}, with {found['keys']}"]
