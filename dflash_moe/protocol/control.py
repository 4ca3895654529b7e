"""Orders from the command line to a running host: where its socket is, and the lines that travel.

A host listens at a Unix address of the abstract kind, which is no file, so that nothing is left of
it whatever becomes of the host. The kernel says at both ends which user the other one runs as, and
another user's process gets nothing. One request and one answer are a line of JSON each.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dflash_moe import errors
from dflash_moe.errors import ConfigError, DflashError, ProtocolError
from dflash_moe.protocol.failures import system_failure
from dflash_moe.protocol.framing import require_same_user

# A longer line is refused, so that no peer fills this process's memory. The longest that is sent
# lists all holders, which are at most 256 workers and as many stand-ins of the host: some 300 bytes
# for each, and the reason for which one was lost, which may quote 4 KiB of its log. It would be too
# long only where nearly all workers were lost with such logs.
MAX_LINE_BYTES = 1 << 20
# A host answers its socket within this time; what an order takes, the client says itself.
ANSWER_S = 5.0
# A caller at a busy socket tries again after this pause.
BUSY_S = 0.01
# The system's list of Unix sockets, in which names of abstract ones begin with "@".
UNIX_SOCKETS = Path("/proc/net/unix")
_UCRED = struct.Struct("3i")


def listen() -> socket.socket:
    """Opens a listening socket for this process at a fresh address. Raises DflashError naming what
    the system refused.
    """
    with ExitStack() as undo:
        try:
            listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(f"\0{_prefix()}{os.getpid()}.{secrets.token_hex(4)}")
            listener.listen(8)
            listener.setblocking(False)
        except OSError as error:
            raise system_failure("the socket for orders could not be made", error) from None
        undo.pop_all()
        return listener


def running_hosts() -> dict[int, list[str]]:
    """Returns the addresses of this user's hosts by process id, as this process sees it."""
    try:
        names = [line.rpartition(" ")[2].rstrip("\n") for line in UNIX_SOCKETS.open(encoding="utf-8", errors="replace")]
    except OSError:
        return {}
    found: dict[int, list[str]] = {}
    for name in sorted({name for name in names if name.startswith("@" + _prefix())}):
        try:
            with dial(name[1:]) as sock:
                found.setdefault(_peer_pid(sock), []).append(name[1:])
        except (OSError, ProtocolError):  # it is gone, or somebody else took such a name
            continue
    return found


def ask(pid: int | None, request: dict[str, Any], *, timeout_s: float) -> Any:
    """Sends a request to the host of this process id, or where that is None to the only one there
    is, and returns its answer. Raises the error that the host answers with; ConfigError where there
    is no such host or several; DflashError where it does not answer in time.
    """
    return ask_at(find_host(pid)[1], request, timeout_s=timeout_s)


def find_host(pid: int | None) -> tuple[int, str]:
    """Returns process id and address of the host of this process id, or where that is None of the
    only one there is. Raises ConfigError where there is no such host or several.
    """
    hosts = running_hosts()
    name = _address_of(pid, hosts)
    return next(found for found, names in hosts.items() if name in names), name


def ask_at(name: str, request: dict[str, Any], *, timeout_s: float) -> Any:
    """As `ask`, of the host at an address."""
    try:
        with dial(name) as sock:
            sock.settimeout(timeout_s)
            send_line(sock, request, timeout_s=ANSWER_S)
            answer = receive_line(sock, timeout_s=timeout_s)
    except TimeoutError:
        raise DflashError(f"the host has not answered within {timeout_s:g} s; it goes on with what was asked") from None
    except OSError as error:
        raise DflashError(f"the host hung up ({error.strerror or error}); it may have ended") from None
    if "error" in answer:
        raise _error_of(answer["error"])
    return answer.get("result")


def _address_of(pid: int | None, hosts: dict[int, list[str]]) -> str:
    known = ", ".join(map(str, sorted(hosts))) or "none"
    if pid is None and len(hosts) != 1:
        raise ConfigError(
            f"hosts that run: {known}; name one by its process id (--pid), which `ps` shows" if hosts else NO_HOST
        )
    names = hosts.get(next(iter(hosts)) if pid is None else pid)
    if names is None:
        raise ConfigError(f"--pid {pid}: no running host of this user has this process id; hosts that run: {known}")
    if len(names) > 1:
        raise ConfigError(f"process {pid or next(iter(hosts))} runs {len(names)} hosts; orders can be given to one alone")
    return names[0]


NO_HOST = "no host of this user runs here; `dflash-moe serve`, `generate`, `chat`, or a program with an ExpertRuntime is one"


def send_line(sock: socket.socket, value: Any, *, timeout_s: float) -> None:
    """Sends one line. Raises OSError."""
    sock.settimeout(timeout_s)
    sock.sendall(json.dumps(value).encode() + b"\n")


def receive_line(sock: socket.socket, *, timeout_s: float) -> dict[str, Any]:
    """Receives one line, all of it within `timeout_s`. Raises OSError, and ProtocolError for a line
    that is too long or no JSON object.
    """
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        part = sock.recv(65536)
        if not part:
            raise ConnectionResetError("the other end hung up")
        line += part
        if len(line) > MAX_LINE_BYTES:
            raise ProtocolError(f"a line of more than {MAX_LINE_BYTES} bytes came")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a line came that is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ProtocolError(f"expected a JSON object, found {type(value).__name__}")
    return value


def error_fields(error: DflashError) -> dict[str, str]:
    """Returns an error as it travels in an answer."""
    return {"kind": type(error).__name__, "text": str(error)}


def _error_of(fields: Any) -> DflashError:
    if not isinstance(fields, dict):
        raise ProtocolError("the host answered with an error that says nothing")
    kind = getattr(errors, str(fields.get("kind")), DflashError)
    is_ours = isinstance(kind, type) and issubclass(kind, DflashError)
    return (kind if is_ours else DflashError)(str(fields.get("text")))


def _prefix() -> str:
    return f"dflash-moe.{os.geteuid()}."


def dial(name: str) -> socket.socket:
    """Returns a connection to the host at an address, the caller's to close. Raises OSError, also
    where too many wait there for ANSWER_S, and ProtocolError for another user's process.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(ANSWER_S)
        _connect(sock, name, time.monotonic() + ANSWER_S)
        require_same_user(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect(sock: socket.socket, name: str, deadline: float) -> None:
    while True:
        try:
            sock.connect("\0" + name)
            return
        except BlockingIOError:  # as many callers as may wait
            if time.monotonic() > deadline:
                raise
            time.sleep(BUSY_S)


def _peer_pid(sock: socket.socket) -> int:
    return int(_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0])
