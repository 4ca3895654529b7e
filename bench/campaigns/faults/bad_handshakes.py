"""Somebody without the key, in a process of its own, tries COUNT handshakes with whoever listens,
and prints a line of JSON for each:

    python -m bench.campaigns.faults.bad_handshakes HOST PORT LABEL COUNT RECORDED

LABEL is what a connection with a wrong key says that it is for. RECORDED is a folder with what a
real dialler sent on its connections, a file for each. A connection that stays half open sends the
beginning of one and is kept until many newer ones are. The process is as nice as can be, since
strangers compute elsewhere.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import secrets
import socket
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dflash_moe import _core
from dflash_moe.errors import DflashError
from dflash_moe.protocol.encryption import identity_of

ANSWER_S = 10.0
# So many half-open connections are kept at a time, more than anybody who listens keeps.
HALF_OPEN = 200
NICE = 19


def main(host: str, port: str, label: str, count: str, recorded: str) -> None:
    """Tries as many handshakes, of all kinds in turn."""
    os.nice(NICE)
    sent = [path.read_bytes() for path in sorted(Path(recorded).iterdir())]
    kinds: dict[str, Callable[[socket.socket], bool]] = {
        "wrong key": _wrong_key_for(label), "certificates": _certificates, "garbage": _garbage, "replay": _replay_of(sent),
        "half open": _half_open_of(sent),
    }  # fmt: skip
    for number in range(int(count)):
        kind = list(kinds)[number % len(kinds)]
        with socket.create_connection((host, int(port)), timeout=ANSWER_S) as stranger:
            was_accepted = kinds[kind](stranger)
        sys.stdout.write(json.dumps({"kind": kind, "accepted": was_accepted}) + "\n")


def _wrong_key_for(label: str) -> Callable[[socket.socket], bool]:
    def wrong_key(sock: socket.socket) -> bool:
        keys = [(identity_of(label, "far"), secrets.token_bytes(32))]
        secure = _core.SecureSocket(sock.detach(), is_dialling=True, keys=keys)
        try:
            with contextlib.suppress(DflashError):
                until = time.monotonic() + ANSWER_S
                while time.monotonic() < until:
                    if secure.handshake():
                        return True
                    time.sleep(0.001)
            return False
        finally:
            secure.close()

    return wrong_key


def _certificates(sock: socket.socket) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_socket(sock).close()
    except OSError:
        return False
    return True


def _garbage(sock: socket.socket) -> bool:
    """A TLS record of random content, or random bytes: a hang-up or an alert follows."""
    beginning = b"\x16\x03\x01\x00\xf0" if secrets.randbelow(2) else b""
    return _is_kept(sock, beginning + secrets.token_bytes(240))


def _replay_of(recorded: list[bytes]) -> Callable[[socket.socket], bool]:
    def replay(sock: socket.socket) -> bool:
        return _is_kept(sock, secrets.choice(recorded))

    return replay


def _half_open_of(recorded: list[bytes]) -> Callable[[socket.socket], bool]:
    kept: collections.deque[socket.socket] = collections.deque()

    def half_open(sock: socket.socket) -> bool:
        half = secrets.choice(recorded)
        sock.sendall(half[: secrets.randbelow(min(len(half), 100))])
        kept.append(socket.socket(fileno=sock.detach()))
        if len(kept) > HALF_OPEN:
            kept.popleft().close()
        return False

    return half_open


def _is_kept(sock: socket.socket, sent: bytes) -> bool:
    """Sends these bytes, and returns whether the worker does not hang up on it."""
    try:
        sock.sendall(sent)
        while sock.recv(4096):
            pass
    except TimeoutError:
        return True
    except OSError:
        return False
    return False


if __name__ == "__main__":
    main(*sys.argv[1:])
