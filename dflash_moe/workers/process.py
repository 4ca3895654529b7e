"""The lives of a worker process: a host starts it and speaks over an inherited control socket, or
somebody starts it by hand, and it waits behind a listener or dials its host.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import gc
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from dflash_moe.config.cache import NO_CACHE, CacheSettings
from dflash_moe.errors import ConfigError, DflashError
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.protocol.auth import HANDSHAKE_S, KEY_BYTES, Peer, authenticate_host
from dflash_moe.protocol.encryption import Encryption, require_library
from dflash_moe.protocol.failures import to_refusal
from dflash_moe.protocol.framing import Connection, PeerGone
from dflash_moe.protocol.keys import FileKey
from dflash_moe.protocol.mailbox import Mailbox
from dflash_moe.protocol.tcp_sockets import open_tcp_listener
from dflash_moe.telemetry.logs import set_up_worker_logging
from dflash_moe.telemetry.machine import usable_cores
from dflash_moe.telemetry.stop_signals import told_by_signals
from dflash_moe.topology.addresses import Address
from dflash_moe.workers import lifeline
from dflash_moe.workers.listener import Caller, Listener, open_listener
from dflash_moe.workers.registration import Registrant
from dflash_moe.workers.resident import KEEP_S, ResidentWeights
from dflash_moe.workers.session import PATIENCE_S, WorkerIdentity, WorkerSession

log = logging.getLogger(__name__)

# The key must come within this time. The host wrote it before it started this process.
KEY_PIPE_S = 10.0
# A worker that leaves waits so long for what its sessions compute.
LEAVE_S = 600.0
# A shell reports this for Ctrl-C; SIGTERM is the same wish here.
EXIT_INTERRUPTED = 130


def run_started_worker(
    *, name: str, model: Path, control_fd: int, key_fd: int, parent_pid: int, cache: CacheSettings = NO_CACHE
) -> int:
    """Serves the host that started this process and leaves with it. It returns the exit code where
    no session began, and ends the process itself after one.

    The descriptors `control_fd` and `key_fd` are inherited and owned here; the key is read once and
    its pipe closed. `cache` is what the host says of the disk, which is also its own.
    """
    lifeline.tie_to_parent(parent_pid)
    lifeline.guard_signals()
    set_up_worker_logging()
    connection = Connection(socket.socket(fileno=control_fd))
    key = _read_key(key_fd)
    try:
        peer = authenticate_host(connection, key_for=lambda _: key, deadline=time.monotonic() + HANDSHAKE_S)
        identity = _identify(name, model, threads=None, memory_limit=0, isa="", cache=cache)
    except PeerGone:
        return 0
    except DflashError as error:
        log.error("%s", error)
        _tell(connection, error)
        return error.exit_code
    mailbox = Mailbox(peer.session_id, peer.session_key)
    private: list[Listener] = []

    def listen(buffer_bytes: int) -> int:
        if not private:
            # The host that started this process decides what is encrypted on the way to it.
            sock = open_tcp_listener("127.0.0.1", 0, buffer_bytes)
            private.append(Listener(sock, worker=name, key=None, encryption=Encryption("auto", key)))
            private[0].use_mailbox(mailbox)
        return private[0].port

    session = WorkerSession(connection, identity, mailbox, listen)
    reason = session.run()
    log.info("worker %s leaves: %s", name, reason)
    # There is no orderly teardown: the host is done with this process, and a call that is being
    # computed must not delay its end.
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)


def run_hand_started_worker(
    *,
    name: str,
    model: Path,
    address: Address,
    key: bytes | None,
    threads: int | None = None,
    memory_limit: int = 0,
    max_sessions: int = 1,
    isa: str = "",
    is_once: bool = False,
    buffer_bytes: int = 0,
    encryption: str = "auto",
    keep_s: float = KEEP_S,
    cache: CacheSettings = NO_CACHE,
    on_ready: Callable[[Address], Any] = lambda _: None,
) -> int:
    """Listens and serves up to `max_sessions` hosts at a time until SIGINT or SIGTERM, or with
    `is_once` one host until it has left. Returns the exit code. It must run in the main thread,
    which takes signals.

    `threads` None takes all usable cores. `memory_limit` bounds the bytes of the weights of all
    hosts; 0 is no limit. `buffer_bytes` sizes the buffers of TCP connections; 0 keeps the system's
    own. `encryption` is the setting of this name. Weights are kept for `keep_s` seconds after their
    last host; 0 frees them at the end of its session. `cache` says what may be kept on this
    machine's disk, whatever the hosts' settings are. `on_ready` is called with the address and its
    real port once hosts may call. Until then ConfigError and CheckpointError are raised.
    """
    set_up_worker_logging()
    resident = ResidentWeights(0.0 if is_once else keep_s)
    # The listener is opened first, so that what is wrong with its address is known at once.
    listener = open_listener(
        address, worker=name, key=key, buffer_bytes=buffer_bytes, encryption=encryption,
        max_sessions=1 if is_once else max_sessions,
    )  # fmt: skip
    try:
        with told_by_signals(listener.stop) as stopped:
            threads = threads or usable_cores()
            identity = _identify(
                name, model, threads=threads, memory_limit=memory_limit, isa=isa, cache=cache, encryption=encryption
            )
            on_ready(Address(address.kind, host=address.host, port=listener.port, path=address.path))
            serve = partial(_serve_caller, identity=identity, listener=listener, resident=resident)
            _serve_callers(listener, serve, stopped, is_once=is_once)
        return EXIT_INTERRUPTED if stopped.is_set() else 0
    finally:
        listener.close()
        resident.drop()


def _serve_callers(listener: Listener, serve: Callable[[Caller], str], stopped: threading.Event, *, is_once: bool) -> None:
    """Serves every caller in a thread of its own until the listener is stopped, or with `is_once`
    the first one is done. Raises the error of a session that could not be ended: its computation
    hangs, and with it those of all others.
    """
    sessions: list[threading.Thread] = []
    failures: list[DflashError] = []

    def run(caller: Caller) -> None:
        try:
            reason = serve(caller)
            log.info("a session ends: %s", "this worker was told to stop" if stopped.is_set() else reason)
            # Weights that are not kept are freed before those of the next host come.
            gc.collect()
            listener.end_session(caller)
        except DflashError as error:
            failures.append(error)
            listener.stop()
        except Exception:
            # It is one host's, and the others shall not notice.
            log.exception("a session ends by an error of this program")
            listener.end_session(caller)
        if is_once:
            listener.stop()

    while (caller := listener.next_caller()) is not None:
        sessions = [one for one in sessions if one.is_alive()]
        session = threading.Thread(target=run, args=(caller,), name="session", daemon=True)
        try:
            session.start()
        except RuntimeError as error:  # as many threads as the system allows
            log.warning("a host is sent away: %s", error)
            caller.connection.hang_up()
            caller.connection.close()
            listener.end_session(caller)
            continue
        sessions.append(session)
    for session in sessions:
        # What a session computes ends first, as long as it gets on (STOP_S).
        session.join(LEAVE_S)
    if failures:
        raise failures[0]


def run_registered_worker(
    *, name: str, model: Path, heads: Sequence[tuple[Address, FileKey]], threads: int | None = None,
    memory_limit: int = 0, isa: str = "", is_once: bool = False, keep_s: float = KEEP_S,
    cache: CacheSettings = NO_CACHE, encryption: str = "auto", on_ready: Callable[[Address], Any] = lambda _: None,
) -> int:  # fmt: skip
    """Registers at the hosts at `heads`, each with its key, again and again, and serves each of
    them whenever it takes this worker; it ends and returns as `run_hand_started_worker` does, whose
    arguments these are. Its connections are always encrypted; with `encryption` on it also takes no
    fabric beside them.

    A host that refuses this worker for good is given up, and the others are served on. Errors:
    ConfigError, CheckpointError, and where no host is left the first one's refusal for good, as the
    error that it names: ConfigError, ProtocolError, UnsupportedError.
    """
    set_up_worker_logging()
    for head, _ in heads:
        require_library("on", head, who=f"worker {name}")
    resident = ResidentWeights(0.0 if is_once else keep_s)
    identity = _identify(
        name, model, threads=threads or usable_cores(), memory_limit=memory_limit, isa=isa, cache=cache, encryption=encryption
    )
    registrants = [Registrant(name, head, key) for head, key in heads]

    def stop() -> None:
        for registrant in registrants:
            registrant.stop()

    def attend(registrant: Registrant) -> None:
        while (taken := _next_host(registrant, name, is_alone=len(registrants) == 1)) is not None:
            try:
                reason = _serve_host(*taken, identity, registrant, resident)
            except BaseException:
                stop()  # a computation hangs, and with it those for all other hosts
                raise
            log.info("worker %s ends a session: %s", name, "it was told to stop" if stopped.is_set() else reason)
            # Weights that are not kept are freed before those of the next host come.
            gc.collect()
            if is_once:
                break

    try:
        with told_by_signals(stop) as stopped, ThreadPoolExecutor(len(registrants), "head") as pool:
            for head, _ in heads:
                on_ready(head)
            attended = [pool.submit(attend, registrant) for registrant in registrants]
            failures = [error for one in attended if (error := one.exception()) is not None]
        if failures and not stopped.is_set():
            raise failures[0]
        return EXIT_INTERRUPTED if stopped.is_set() else 0
    finally:
        resident.drop()


def _next_host(registrant: Registrant, name: str, *, is_alone: bool) -> tuple[Connection, Peer] | None:
    try:
        return registrant.next_host()
    except DflashError as error:
        if not is_alone:
            log.error("worker %s is refused for good at %s, and serves any others: %s", name, registrant.head, error)
        raise


def _serve_host(
    connection: Connection, peer: Peer, identity: WorkerIdentity, registrant: Registrant, resident: ResidentWeights
) -> str:
    mailbox = Mailbox(peer.session_id, peer.session_key, is_encrypted=True)
    registrant.serve(mailbox)
    session = WorkerSession(
        connection, identity, mailbox, lambda _: 0, patience_s=PATIENCE_S, dial=registrant.dial, resident=resident
    )
    try:
        return session.run()
    finally:
        session.close()


def _serve_caller(caller: Caller, identity: WorkerIdentity, listener: Listener, resident: ResidentWeights) -> str:
    session = WorkerSession(
        caller.connection, identity, caller.mailbox, lambda _: listener.port, patience_s=PATIENCE_S, resident=resident
    )
    try:
        return session.run()
    finally:
        session.close()


def _identify(
    name: str, model: Path, *, threads: int | None, memory_limit: int, isa: str, cache: CacheSettings = NO_CACHE,
    encryption: str = "auto",
) -> WorkerIdentity:  # fmt: skip
    checkpoint = Checkpoint.open(model)
    checkpoint.refuse_stub()
    return WorkerIdentity(name, checkpoint, checkpoint.fingerprint(), threads, memory_limit, isa, cache, encryption)


def _read_key(descriptor: int) -> bytes:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    until = time.monotonic() + KEY_PIPE_S
    key = b""
    with os.fdopen(descriptor, "rb", buffering=0) as pipe:
        while len(key) < KEY_BYTES:
            remaining = until - time.monotonic()
            part = pipe.read(KEY_BYTES - len(key)) if remaining > 0 and poller.poll(remaining * 1000) else b""
            if not part:
                raise ConfigError(f"the session key did not arrive on descriptor {descriptor}: this mode is for the host's use")
            key += part
    return key


def _tell(connection: Connection, error: DflashError) -> None:
    try:
        connection.send(to_refusal(error), deadline=time.monotonic() + 1.0)
    except DflashError:
        log.info("the host hung up before it could be told")
