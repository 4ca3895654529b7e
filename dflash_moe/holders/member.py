"""One holder of experts as the running runtime knows it: who it is, how it is reached, and what it
computes with.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.errors import ConfigError
from dflash_moe.holders.local_worker import LocalWorker
from dflash_moe.holders.session import HostSession
from dflash_moe.protocol.devices import DeviceChoice
from dflash_moe.protocol.messages import SESSION_ID_BYTES, HelloReply
from dflash_moe.topology.addresses import Address

if TYPE_CHECKING:
    from dflash_moe.topology import WorkerSpec


@dataclass(slots=True)
class Member:
    """One holder of experts as the running runtime knows it. Once it is started, exactly one of
    `session` (for another process) and `local` (for this one) is set.
    """

    name: str
    address: Address
    transport: str
    # All shards of a member have one class. Once it was greeted, this is the class of its card.
    numerics: str
    # All shards of a member have one layout, packed or mapped.
    layout: str
    session: HostSession | None = None
    local: LocalWorker | None = None
    # The member that stands for the experts kept at the host has no entry among the workers.
    spec: WorkerSpec | None = None
    # What another process said of itself when it was greeted last. One that is lost meanwhile is
    # still of that kind for those that join.
    last_hello: HelloReply | None = None
    # The client knows the member by this number, and -1 means not yet.
    client_index: int = -1
    # All sessions with it have this id, by which a worker started by hand knows its host again.
    session_id: bytes = field(default_factory=partial(secrets.token_bytes, SESSION_ID_BYTES))
    # These are the slots of its data path, None until it is attached.
    slots: _core.SlotPlan | None = None
    # This is the device that it computes on.
    device: DeviceChoice = DeviceChoice()
    # How its former process ended and what that logged last, once it was lost.
    last_exit: str = ""
    # Its numbers were found wrong before, so that it computes a row of every expert when it joins.
    is_doubted: bool = False

    @property
    def offered(self) -> tuple[str, ...]:
        """The numerics classes that it said it computes, once it was greeted."""
        if self.local is not None:
            return self.local.offered
        hello = self.last_hello
        return (hello.numerics_offered or (hello.numerics_class,)) if hello is not None else ()

    @property
    def architecture(self) -> str:
        """What it computes with: a kernel set, or the architecture of a card. It is empty before
        the member was greeted.
        """
        if self.local is not None:
            return self.local.isa
        return self.last_hello.isa if self.last_hello is not None else ""

    @property
    def is_on_this_machine(self) -> bool:
        """False for workers behind a TCP address of their own."""
        return not self.address.host or self.address.is_loopback

    @property
    def slowdown(self) -> float:
        """How many times slower than it can it shall compute, 1 where nothing is emulated."""
        emulate = self.spec.emulate if self.spec is not None else None
        return float(emulate.slowdown or 1.0) if emulate is not None else 1.0

    def require_session(self) -> HostSession:
        """Returns the session with another process. Raises ConfigError where there is none."""
        if self.session is None:
            raise ConfigError(f"worker {self.name} has no session: the runtime is closed or still starting")
        return self.session
