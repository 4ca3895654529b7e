"""The host's door for workers that register: they dial, and the host never does. It says who may
come, keeps those whom nobody has taken yet, and gives a session the connections of its paths.

What a control connection under each name gets stands in
docs/decisions/0077-workers-may-dial-the-host.md.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_moe.errors import ConfigError, DflashError, ProtocolError, WorkerError, WorkerLost, WorkerTimeout
from dflash_moe.protocol.auth import Peer, authenticate_to_worker
from dflash_moe.protocol.doorway import DoorTerms, Doorway
from dflash_moe.protocol.failures import to_refusal
from dflash_moe.protocol.framing import Connection
from dflash_moe.protocol.mailbox import Mailbox
from dflash_moe.protocol.messages import Role
from dflash_moe.protocol.registering import Claim, answer_registered, key_of
from dflash_moe.protocol.tcp_sockets import open_tcp_listener

if TYPE_CHECKING:
    from dflash_moe.protocol.strangers import Stranger
    from dflash_moe.topology.registration import RegistrationSpec

log = logging.getLogger(__name__)
log_notices = logging.getLogger("dflash_moe.notices")

# Whoever waits for a worker looks so often whether it still shall.
LOOK_S = 0.05
# People are told who is missing this often.
TELL_EVERY_S = 5.0
SEND_S = 1.0


@dataclass(frozen=True, slots=True)
class _Expected:
    """A connection that a session waits for: what the host proves on it, and where it goes."""

    peer: Peer
    generation: int
    mailbox: Mailbox


class RegistrationDesk:
    """Listens from `start` to `close`, which end all connections that no session has taken. Any
    thread may call.
    """

    def __init__(
        self, spec: RegistrationSpec, key: bytes, check_member: Callable[[str], bool], buffer_bytes: int = 0,
    ) -> None:  # fmt: skip
        """`key` is the group's. `check_member` says whether a name is that of a member or of one
        that is being added, and raises ConfigError or WorkerError where no worker may take it for
        good or for now. Raises ConfigError where the address cannot be had.
        """
        self.spec = spec
        self._key = key
        self._check_member = check_member
        self._changed = threading.Condition()
        # By name, what is guarded by the condition: who waits to be taken, and what is awaited.
        self._waiting: dict[str, tuple[Connection, Claim]] = {}
        self._expected: dict[tuple[str, Role], _Expected] = {}
        # Why a newcomer could not be added, until somebody adds it by name.
        self._refused: dict[str, DflashError] = {}
        # Names of newcomers in their order, at most `max_pending`; None ends who takes them.
        self.newcomers: queue.Queue[str | None] | None = None
        address = spec.address
        sock = open_tcp_listener(address.host, address.port, buffer_bytes, remedy="check registration.listen in the topology")
        terms = DoorTerms("the host", "a worker", spec.max_pending, spec.handshake_s)
        self._door = Doorway(sock, self._welcome, terms)
        self._is_closed = False

    def start(self) -> None:
        """Begins to listen."""
        self._door.start()

    def close(self) -> None:
        """Stops listening and ends what waits; it may be called again, and never raises."""
        with self._changed:
            self._is_closed = True
            waiting, self._waiting = self._waiting, {}
            self._changed.notify_all()
        for connection, _ in waiting.values():
            connection.close()
        self._door.close()

    # -- what sessions ask for ---------------------------------------------------------------------

    def await_all(self, names: Sequence[str], *, timeout_s: float, limit: str) -> None:
        """Waits until all these workers are there, and tells people who is missing meanwhile.
        Raises WorkerTimeout naming all that are missing.
        """
        until, told = time.monotonic() + timeout_s, 0.0
        while missing := self._missing(names):
            now = time.monotonic()
            listed = ", ".join(missing)
            if now >= until:
                raise WorkerTimeout(
                    f"worker {missing[0]} has not registered: {len(missing)} of {len(names)} are missing at "
                    f"{self.spec.listen} after {timeout_s:g} s ({limit}): {listed}; start each with "
                    "`dflash-moe worker --register ...`",
                    worker=missing[0],
                )
            if now >= told:
                told = now + TELL_EVERY_S
                log_notices.info("waiting at %s for workers to register: %s (of %d)", self.spec.listen, listed, len(names))
            with self._changed:
                if self._is_closed:
                    raise WorkerLost("the runtime was closed while workers registered")
                self._changed.wait(LOOK_S)

    def _missing(self, names: Sequence[str]) -> list[str]:
        with self._changed:
            return [name for name in names if name not in self._waiting]

    def take(self, name: str, *, deadline: float, is_given_up: Callable[[], bool]) -> tuple[Connection, bytes]:
        """Waits for a worker to register, and returns its control connection, on which nothing was
        said yet, and the key to prove on it. The caller owns the connection.

        Errors: WorkerTimeout at `deadline`, WorkerLost where it is given up or the desk closed.
        """
        with self._changed:
            while True:
                if self._is_closed or is_given_up():
                    raise WorkerLost(f"worker {name} is not waited for any more", worker=name)
                found = self._waiting.pop(name, None)
                if found is not None and not found[0].has_news():
                    return found[0], key_of(found[1], self._key)
                if found is not None:
                    found[0].close()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise WorkerTimeout(
                        f"worker {name} has not registered at {self.spec.listen} in time; start it with `dflash-moe "
                        f"worker --register ... --name {name}`",
                        worker=name,
                    )
                self._changed.wait(min(left, LOOK_S))

    @contextmanager
    def expecting(self, name: str, peer: Peer, roles: Sequence[tuple[Role, int]]) -> Iterator[Mailbox]:
        """Takes the connections of these (role, generation) of the worker's session within the
        block, and leaves them in the mailbox.
        """
        mailbox = Mailbox(peer.session_id, peer.session_key, is_encrypted=True)
        expected = {(name, role): _Expected(peer, generation, mailbox) for role, generation in roles}
        with self._changed:
            self._expected |= expected
        try:
            yield mailbox
        finally:
            with self._changed:
                for key, one in expected.items():
                    if self._expected.get(key) is one:
                        del self._expected[key]
            mailbox.close()

    def has(self, name: str) -> bool:
        """Whether a worker of this name waits to be taken."""
        with self._changed:
            return name in self._waiting

    def refuse(self, name: str, error: DflashError) -> None:
        """Turns a newcomer away that cannot be added, now and when it comes again."""
        with self._changed:
            waiting = self._waiting.pop(name, None)
            self._refused[name] = error
            while len(self._refused) > self.spec.max_pending:
                del self._refused[next(iter(self._refused))]
        if waiting is not None:
            _turn_away(waiting[0], error)

    def forgive(self, name: str) -> None:
        """Forgets why a newcomer was turned away: somebody adds it by name."""
        with self._changed:
            self._refused.pop(name, None)

    # -- who dials ---------------------------------------------------------------------------------

    def _welcome(self, stranger: Stranger, deadline: float) -> None:
        connection = stranger.connection
        claim = answer_registered(connection, self._key, deadline=deadline)
        if claim.role is not Role.CONTROL:
            self._deliver(stranger, claim, deadline)
            return
        self._door.admit_proven(stranger)
        try:
            is_member = self._check(claim)
        except DflashError as error:
            self._door.complain(f"worker {claim.worker} may not register now: {error}")
            _turn_away(connection, error)
            return
        self._keep(connection, claim, is_member=is_member)

    def _deliver(self, stranger: Stranger, claim: Claim, deadline: float) -> None:
        """Takes a data or pulse connection that a session of its worker waits for."""
        with self._changed:
            expected = self._expected.get((claim.worker, claim.role))
        if expected is None:
            raise ProtocolError(f"role: no {claim.role.name.lower()} connection of worker {claim.worker} is awaited")
        authenticate_to_worker(
            stranger.connection, worker=claim.worker, role=claim.role, key=expected.peer.session_key,
            session_id=expected.peer.session_id, generation=expected.generation, deadline=deadline,
        )  # fmt: skip
        self._door.admit_proven(stranger)
        expected.mailbox.deliver(claim.role, expected.generation, stranger.connection.detach())

    def _check(self, claim: Claim) -> bool:
        """Returns whether a control connection is that of a member. Raises the error with which it
        is refused: ConfigError for good, and WorkerError for now.
        """
        name = claim.worker
        if self.spec.require_key_per_worker and not claim.has_own_key:
            raise ConfigError(
                f"worker {name}: registration.require_key_per_worker: it came with the group's key; make one of its "
                f"own with `dflash-moe key make FILE --worker {name} --from GROUP`, and give it that"
            )
        is_member = self._check_member(name)
        if not is_member:
            self._check_newcomer(name)
        return is_member

    def _check_newcomer(self, name: str) -> None:
        with self._changed:
            refused = self._refused.get(name)
        if refused is not None:
            raise refused
        if not self.spec.allows(name):
            raise ConfigError(f"worker {name}: name: it is not among those that may register; see registration.names")

    def _keep(self, connection: Connection, claim: Claim, *, is_member: bool) -> None:
        name = claim.worker
        with self._changed:
            former = self._waiting.get(name)
            is_taken = former is not None and not former[0].has_news()
            is_queued = is_member or is_taken or self._queue(name)
            is_kept = is_queued and not is_taken and not self._is_closed
            if is_kept:
                self._waiting[name] = (connection, claim)
                self._changed.notify_all()
        if is_kept and former is not None:
            former[0].close()
        elif is_taken:
            _turn_away(connection, WorkerError(f"worker {name}: name: another worker waits under it", worker=name))
        elif not is_kept:
            _turn_away(connection, WorkerError(f"worker {name}: newcomers are not taken now; it may come again", worker=name))

    def _queue(self, name: str) -> bool:
        """Puts a newcomer among those who will be added; False where that is not possible."""
        if self.newcomers is None:
            return False
        with contextlib.suppress(queue.Full):
            self.newcomers.put_nowait(name)
            return True
        return False


def _turn_away(connection: Connection, error: DflashError) -> None:
    with contextlib.suppress(DflashError):
        connection.send(to_refusal(error), deadline=time.monotonic() + SEND_S)
    connection.close()
