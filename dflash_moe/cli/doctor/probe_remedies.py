"""What `doctor` and `plan` tell of lost workers: who answers for them, and whether paths to other
machines can be encrypted.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_moe import _core
from dflash_moe.errors import DflashError
from dflash_moe.placement.remedies import worker_remedies

if TYPE_CHECKING:
    from dflash_moe.config import Settings
    from dflash_moe.topology import Topology


def probe_remedies(topology: Topology, settings: Settings) -> list[str]:
    """Returns a line for all workers with the same remedies; the reason where they cannot be
    said.
    """
    try:
        return worker_remedies(topology, settings)
    except DflashError as error:
        return [f"unknown: {error}"]


def probe_libssl() -> dict[str, Any]:
    """Returns whether this machine has the library that encrypts TCP paths, its `version`, and the
    `reason` where it has not, which names what to install.
    """
    try:
        return {"available": True, "version": _core.libssl_version(), "reason": ""}
    except DflashError as error:
        return {"available": False, "version": "", "reason": str(error)}


def remedy_lines(remedies: list[str], libssl: dict[str, Any]) -> list[str]:
    """Returns the lines of the report as text."""
    found = [f"remedies   {remedies[0]}", *(f"           {line}" for line in remedies[1:])]
    encrypted = f"{libssl['version']} encrypts TCP paths to other machines" if libssl["available"] else libssl["reason"]
    return [*found, f"libssl     {encrypted}"]
