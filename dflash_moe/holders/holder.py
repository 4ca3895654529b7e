"""One holder of experts as the running runtime knows it: who it is, how it is reached, what it
computes with, and how it lives.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.config.remedies import brings_workers_back
from dflash_moe.errors import ConfigError
from dflash_moe.holders.local_worker import LocalWorker
from dflash_moe.holders.membership import Life, RestartPolicy, State
from dflash_moe.holders.session import HostSession
from dflash_moe.protocol.devices import DeviceChoice
from dflash_moe.protocol.messages import SESSION_ID_BYTES, HelloReply
from dflash_moe.topology.addresses import Address

if TYPE_CHECKING:
    import threading

    from dflash_moe.config import CacheSettings, Settings
    from dflash_moe.topology import WorkerSpec

# Why a worker is not there any more that said so itself.
TOLD_TO_STOP = "it was told to stop"
_WAYS = {"shared": "shared memory", "unix": "a Unix socket", "loopback": "the host's own process"}


@dataclass(frozen=True, slots=True)
class WorkerState:
    """How one holder of experts stands: a state of membership.State, why it is not ready, for how
    many seconds it has been so, how often it died since the start, and of a waiting one in how many
    seconds it is tried again.
    """

    name: str
    state: str
    reason: str
    since_s: float
    deaths: int
    next_try_s: float | None


@dataclass(frozen=True, slots=True)
class Parting:
    """How a worker is let go that is removed, or ended to be started anew. The keeper calls `end`
    when it has drained, before its session ends, and `gone` once it is no member any more. A worker
    that was not ready has nothing to end.

    What is in flight after `drain_s` is asked of other holders, or fails where there are none.
    """

    drain_s: float
    end: Callable[[Holder], None]
    gone: Callable[[Holder], None]


def asked_layout(decided: str, spec: WorkerSpec | None, device: DeviceChoice, cache: CacheSettings) -> str:
    """Returns the layout that a holder is asked for, as Hello.weights_layout has it. The placement
    has `decided` between packed and mapped, or this process on panels alone; `spec` is None for
    experts in the host's own process.

    Panels on disk are for processors, and none are used where this host's settings say so.
    """
    if decided != "packed" or not device.is_processor or not cache.has_panels:
        return decided
    return spec.weights_layout if spec is not None else "auto"


def restart_policy(settings: Settings, *, retries_unfit: bool) -> RestartPolicy:
    """Returns the policy that the settings state."""
    first, longest = settings.restart_backoff_ms
    return RestartPolicy(
        (first / 1000, longest / 1000),
        settings.restart_deaths,
        settings.restart_window_s,
        brings_workers_back(settings),
        retries_unfit,
    )


@dataclass(slots=True, eq=False)
class Holder:
    """One holder of experts. Once it is started, exactly one of `session` (for another process) and
    `local` (for this one) is set. `Fleet.new_holder` makes it.
    """

    # Who it is.
    name: str
    address: Address
    transport: str
    # All shards of a member have one class. Once it was greeted, this is the class of its card.
    numerics: str
    # All shards of a member have one layout: packed or mapped, or packed and maybe mapped from
    # panels on disk (auto, stored), as Hello.weights_layout has it.
    layout: str

    # How it lives: gone until the keeper of workers adopts it, and for ever where it computes in
    # this process. The keeper's thread alone changes it, under the keeper's lock.
    life: Life

    # The bytes of memory for experts of a member that reads them from panels into slots, else 0.
    slots_bytes: int = 0
    # The member that stands for the experts kept at the host has no entry among the workers.
    spec: WorkerSpec | None = None
    # This is the device that it computes on.
    device: DeviceChoice = DeviceChoice()
    # All sessions with it have this id, by which a worker started by hand knows its host again.
    session_id: bytes = field(default_factory=partial(secrets.token_bytes, SESSION_ID_BYTES))
    # The client knows the member by this number, and -1 means not yet (PathKeeper.introduce).
    client_index: int = -1

    # How it is reached, which whoever starts it, makes its path or ends it writes: the session, or
    # the worker in this process; what another process said of itself when it was greeted last,
    # since one that is lost meanwhile is still of that kind for those that join; the slots of its
    # data path, None until it is attached; and how its former process ended and what that logged
    # last.
    session: HostSession | None = None
    local: LocalWorker | None = None
    last_hello: HelloReply | None = None
    slots: _core.SlotPlan | None = None
    last_exit: str = ""

    # Of a worker that registers: it said goodbye when it left, so that nobody waits for it.
    has_left: bool = False
    # What people were told of it last: the level of its going, 0 that it is there, None nothing.
    told_gone: int | None = None
    # Set by who lets it go, before the keeper hears of that.
    parting: Parting | None = None
    # Only the keeper's thread touches these: what is under way for it, or was last; what becomes
    # readable once the process that the host started has ended, -1 where there is none; and when a
    # draining one is ended at the latest.
    errand: threading.Thread | None = None
    pidfd: int = -1
    drained_by: float = 0.0

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
        """False for workers behind a TCP address of their own, and where they register from."""
        if self.address.is_registered:
            return self.session is not None and self.session.is_local
        return not self.address.may_be_elsewhere

    @property
    def way(self) -> str:
        """How it is reached, for people, and over TCP whether that is encrypted."""
        if self.transport != "tcp" or self.session is None:
            return _WAYS.get(self.transport, self.transport)
        return f"TCP, {'encrypted' if self.session.is_encrypted else 'not encrypted'}"

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

    def open_pidfd(self) -> None:
        """Has `pidfd` tell when the process ends that the host started."""
        started = self.session.started if self.session is not None else None
        if self.pidfd < 0 and started is not None and started.process.poll() is None:
            # Without it, the control connection tells.
            with suppress(OSError, AttributeError):
                self.pidfd = os.pidfd_open(started.process.pid)

    def close_pidfd(self) -> None:
        """Closes `pidfd`; it may be closed already."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def next_look(self) -> float | None:
        """Returns when it has to be looked at again without an event: it waits for its next try, or
        its time to drain is over. None means never.
        """
        if self.life.state is State.WAITING:
            return self.life.next_try
        return self.drained_by if self.life.state is State.DRAINING and self.life.serves else None

    def stands(self, now: float) -> WorkerState:
        """Returns how it stands. The caller holds the lock that guards its life."""
        if self.session is None:
            return WorkerState(self.name, State.READY.value, "", 0.0, 0, None)
        life = self.life
        until = max(0.0, life.next_try - now) if life.state is State.WAITING else None
        reason = "" if life.state in (State.READY, State.DRAINING) else life.reason
        return WorkerState(self.name, life.state.value, reason, now - life.since, life.num_deaths, until)
