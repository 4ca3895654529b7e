"""A worker that does not answer is dialled for no longer than its caller has time.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_moe.errors import WorkerTimeout
from dflash_moe.holders.dialing import CallOff, Credentials, connect_authenticated
from dflash_moe.protocol.messages import Role
from dflash_moe.topology.addresses import Address

# Of these so many wait at a listener that takes one, and whoever comes next gets no answer.
WAITING = 4


@contextlib.contextmanager
def crowded(listener: socket.socket, target: object) -> Iterator[None]:
    """Has a listener that accepts nobody be full."""
    with contextlib.ExitStack() as held:
        listener.listen(0)
        for _ in range(WAITING):
            waiting = held.enter_context(socket.socket(listener.family, socket.SOCK_STREAM))
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(target)  # type: ignore[arg-type]
        yield


def dial(address: Address, seconds: float) -> None:
    connect_authenticated(
        "far", address, Credentials(Role.CONTROL, b"k" * 32, b"s" * 16), deadline=time.monotonic() + seconds, call_off=CallOff()
    )


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "within 0.2 s"), (-1.0, "within 0.0 s")])
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_listener_that_takes_nobody_is_dialled_until_the_deadline(
    tmp_path: Path, kind: str, seconds: float, text: str
) -> None:
    with socket.socket(socket.AF_INET if kind == "tcp" else socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0) if kind == "tcp" else str(tmp_path / "far.sock"))
        target = listener.getsockname()
        address = Address("tcp", host=target[0], port=target[1]) if kind == "tcp" else Address("unix", path=target)
        with crowded(listener, target), pytest.raises(WorkerTimeout, match=f"did not accept a connection {text}"):
            dial(address, seconds)
