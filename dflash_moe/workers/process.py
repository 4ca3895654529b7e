"""The two lives of a worker process: a host starts it and speaks over an inherited control socket,
or somebody starts it by hand and it waits behind a listener.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import gc
import logging
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_moe.errors import ConfigError, DflashError
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.protocol.auth import HANDSHAKE_S, KEY_BYTES, authenticate_host
from dflash_moe.protocol.encryption import Encryption
from dflash_moe.protocol.failures import to_refusal
from dflash_moe.protocol.framing import Connection, PeerGone
from dflash_moe.telemetry.logs import set_up_worker_logging
from dflash_moe.telemetry.machine import usable_cores
from dflash_moe.telemetry.stop_signals import told_by_signals
from dflash_moe.topology.addresses import Address
from dflash_moe.workers import lifeline
from dflash_moe.workers.listener import Caller, Listener, open_listener, open_tcp_listener
from dflash_moe.workers.mailbox import Mailbox
from dflash_moe.workers.resident import KEEP_S, ResidentWeights
from dflash_moe.workers.session import PATIENCE_S, WorkerIdentity, WorkerSession

log = logging.getLogger(__name__)

# The key must come within this time. The host wrote it before it started this process.
KEY_PIPE_S = 10.0
# A shell reports this for Ctrl-C; SIGTERM is the same wish here.
EXIT_INTERRUPTED = 130


def run_started_worker(*, name: str, model: Path, control_fd: int, key_fd: int, parent_pid: int) -> int:
    """Serves the host that started this process and leaves with it. It returns the exit code where
    no session began, and ends the process itself after one.

    The descriptors `control_fd` and `key_fd` are inherited and owned here; the key is read once and
    its pipe closed.
    """
    lifeline.tie_to_parent(parent_pid)
    lifeline.guard_signals()
    set_up_worker_logging()
    connection = Connection(socket.socket(fileno=control_fd))
    key = _read_key(key_fd)
    try:
        peer = authenticate_host(connection, key_for=lambda _: key, deadline=time.monotonic() + HANDSHAKE_S)
        identity = _identify(name, model, threads=None, memory_limit=0, isa="")
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
    isa: str = "",
    is_once: bool = False,
    buffer_bytes: int = 0,
    encryption: str = "auto",
    keep_s: float = KEEP_S,
    on_ready: Callable[[Address], Any] = lambda _: None,
) -> int:
    """Listens and serves one host after the other until SIGINT or SIGTERM, or with `is_once` until
    the first one left. Returns the exit code. It must run in the main thread, which takes signals.

    `threads` None takes all usable cores. `memory_limit` bounds the bytes of weights; 0 is no
    limit. `buffer_bytes` sizes the buffers of TCP connections; 0 keeps the system's own.
    `encryption` is the setting of this name. Weights are kept for `keep_s` seconds without a host;
    0 frees them at the end of each session. `on_ready` is called with the address and its real
    port once hosts may call. Until then ConfigError and CheckpointError are raised.
    """
    set_up_worker_logging()
    resident = ResidentWeights(0.0 if is_once else keep_s)
    # The listener is opened first, so that what is wrong with its address is known at once.
    listener = open_listener(address, worker=name, key=key, buffer_bytes=buffer_bytes, encryption=encryption)
    try:
        with told_by_signals(listener.stop) as stopped:
            identity = _identify(name, model, threads=threads or usable_cores(), memory_limit=memory_limit, isa=isa)
            on_ready(Address(address.kind, host=address.host, port=listener.port, path=address.path))
            while (caller := listener.next_caller()) is not None:
                reason = _serve_caller(caller, identity, listener, resident)
                log.info("worker %s ends a session: %s", name, "it was told to stop" if stopped.is_set() else reason)
                listener.end_session()
                # Weights that are not kept are freed before those of the next host come.
                gc.collect()
                if is_once:
                    break
        return EXIT_INTERRUPTED if stopped.is_set() else 0
    finally:
        listener.close()
        resident.drop()


def _serve_caller(caller: Caller, identity: WorkerIdentity, listener: Listener, resident: ResidentWeights) -> str:
    mailbox = Mailbox(caller.peer.session_id, caller.peer.session_key, is_encrypted=caller.connection.is_encrypted)
    listener.use_mailbox(mailbox)
    session = WorkerSession(
        caller.connection, identity, mailbox, lambda _: listener.port, patience_s=PATIENCE_S, resident=resident
    )
    try:
        return session.run()
    finally:
        session.close()


def _identify(name: str, model: Path, *, threads: int | None, memory_limit: int, isa: str) -> WorkerIdentity:
    checkpoint = Checkpoint.open(model)
    checkpoint.refuse_stub()
    return WorkerIdentity(name, checkpoint, checkpoint.fingerprint(), threads, memory_limit, isa)


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
