"""Somebody without the key, in a process of its own, tries COUNT handshakes with a worker, and
prints a line of JSON for each:

    python -m bench.campaigns.faults.bad_handshakes HOST PORT COUNT RECORDED

RECORDED is a folder with what a real host sent on its connections, a file for each. The process is
as nice as can be, since strangers compute elsewhere.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

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
NICE = 19


def main(host: str, port: str, count: str, recorded: str) -> None:
    """Tries as many handshakes, of all kinds in turn."""
    os.nice(NICE)
    sent = [path.read_bytes() for path in sorted(Path(recorded).iterdir())]
    kinds: dict[str, Callable[[socket.socket], bool]] = {
        "wrong key": _wrong_key, "certificates": _certificates, "garbage": _garbage, "replay": _replay_of(sent),
    }  # fmt: skip
    for number in range(int(count)):
        kind = list(kinds)[number % len(kinds)]
        with socket.create_connection((host, int(port)), timeout=ANSWER_S) as stranger:
            was_accepted = kinds[kind](stranger)
        sys.stdout.write(json.dumps({"kind": kind, "accepted": was_accepted}) + "\n")


def _wrong_key(sock: socket.socket) -> bool:
    keys = [(identity_of("control", "far"), secrets.token_bytes(32))]
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
