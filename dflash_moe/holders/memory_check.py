"""Whether the weights that each holder shall load fit into memory, asked before any is loaded.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dflash_moe.errors import ConfigError
from dflash_moe.telemetry.machine import memory_available

if TYPE_CHECKING:
    from dflash_moe.holders.holder import Holder
    from dflash_moe.placement.held_shards import HeldShard

UNSTATED_SHARE = 0.5
# Errors about missing memory begin so.
SHORTFALL = "memory: "


def check_memory(
    members: Mapping[str, Holder], bytes_by_holder: Mapping[str, int], held: Mapping[str, Sequence[HeldShard]]
) -> None:
    """Checks that the weights fit into the memory of this machine and of every member, which have
    been greeted. Raises ConfigError with the shortfall and how many experts fit.
    """
    local = [member.name for member in members.values() if member.is_on_this_machine and not member.device.has_own_memory]
    needed = sum(bytes_by_holder.get(name, 0) for name in local)
    available = memory_available() + sum(_kept_bytes(members[name]) for name in local)
    if needed > available:
        num_experts = sum(len(shard.experts) for name in local for shard in held[name])
        raise ConfigError(_shortfall_text(f"{', '.join(local)} on this machine", needed, available, num_experts))
    for member in members.values():
        bounds = _memory_bounds(member)
        if bounds and bytes_by_holder.get(member.name, 0) > min(bounds):
            num_experts = sum(len(shard.experts) for shard in held[member.name])
            raise ConfigError(_shortfall_text(_holder_text(member), bytes_by_holder[member.name], min(bounds), num_experts))


def room_of(member: Holder, stated: int | None) -> int | None:
    """Returns how many bytes of weights a greeted worker that joins a running runtime may take.
    Where nobody `stated` that, it is UNSTATED_SHARE of what is free: others need memory too. None
    means that nobody knows.
    """
    free = _memory_bounds(member)
    if member.is_on_this_machine and not member.device.has_own_memory:
        free.append(memory_available())
    if not free:
        return stated
    return min(stated, *free) if stated is not None else int(min(free) * UNSTATED_SHARE)


def _memory_bounds(member: Holder) -> list[int]:
    """Returns every bound, in bytes, on the weights of a member. A member in the host's own process
    has only the bound of its card, if it computes on one.
    """
    if member.local is not None:
        return [member.local.memory_available] if member.local.has_own_memory else []
    hello = member.session.hello if member.session is not None else None
    if hello is None:
        return []
    return [hello.memory_available + hello.kept_bytes] + ([hello.memory_limit] if hello.memory_limit else [])


def _kept_bytes(member: Holder) -> int:
    """Returns the bytes of weights that a worker still has from a former session."""
    hello = member.session.hello if member.session is not None else None
    return hello.kept_bytes if hello is not None else 0


def _holder_text(member: Holder) -> str:
    hello = member.session.hello if member.session is not None else None
    return f"worker {member.name}" + (f" on device {hello.device}" if hello is not None and hello.device else "")


def _shortfall_text(who: str, needed: int, available: int, num_experts: int) -> str:
    gib = 1 << 30
    fitting = available * num_experts // needed
    return (
        f"{SHORTFALL}{who} need {needed / gib:.2f} GiB for the placed experts, {available / gib:.2f} GiB are "
        f"available: {(needed - available) / gib:.2f} GiB short, {fitting} of the {num_experts} experts fit; place "
        "fewer experts there, add workers, or use a smaller dtype"
    )
