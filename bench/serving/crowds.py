"""Crowds of callers that are unkind to a server, and what it has afterwards.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.requests.clients import Trace
from bench.serving.servers import Server
from dflash_moe.bench.streaming.load import Load, Schedule, run_load

# Between two looks at the memory of a server.
LOOK_S = 0.05
# What the kernel keeps for a reader that takes nothing is to be little.
RECEIVE_BYTES = 4096
READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Standing:
    """What a server has: blocks that are not free, and threads and descriptors of all its
    processes.
    """

    blocks: int
    threads: int
    descriptors: int

    def fields(self) -> dict[str, int]:
        """Returns the counts by their names."""
        return dataclasses.asdict(self)


def standing(server: Server, engine: Mapping[str, Any]) -> Standing:
    """Returns what a server has now, with the counts of its engine."""
    blocks, pids = engine["blocks"], list(server.tree())
    threads, descriptors = (sum(len(os.listdir(f"/proc/{pid}/{name}")) for pid in pids) for name in ("task", "fd"))
    return Standing(blocks["total"] - blocks["free"], threads, descriptors)


def overloaded(server: Server, requests: Sequence[bytes], schedule: Schedule, timeout_s: float) -> tuple[Load, Trace]:
    """Sends requests as a schedule has them, and watches the memory of the server meanwhile."""
    trace, has_ended = Trace(), threading.Event()
    pids, began = list(server.tree()), time.monotonic()

    def watch() -> None:
        while not has_ended.wait(LOOK_S):
            trace.look(0, time.monotonic() - began, sum(map(_anonymous_bytes, pids)))

    watcher = threading.Thread(target=watch, name="memory")
    watcher.start()
    try:
        return run_load(server.endpoint, requests, schedule, timeout_s), trace
    finally:
        has_ended.set()
        watcher.join()


def _anonymous_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))


def vanish(server: Server, requests: Sequence[bytes], timeout_s: float) -> int:
    """Sends all requests at once, and hangs up on each as soon as its first event has come. Returns
    how many of them had one within `timeout_s`.
    """

    async def one(request: bytes) -> None:
        reader, writer = await asyncio.open_connection(server.endpoint.host, server.endpoint.port)
        try:
            writer.write(request)
            await reader.readuntil(b"data: {")
        finally:
            writer.transport.abort()

    async def all_of_them() -> int:
        tasks = [asyncio.wait_for(one(request), timeout_s) for request in requests]
        return sum(found is None for found in await asyncio.gather(*tasks, return_exceptions=True))

    return asyncio.run(all_of_them())


@contextmanager
def silent_readers(server: Server, requests: Sequence[bytes], *, is_read: bool) -> Iterator[None]:
    """Has other requests under way for the length of the block. Their answers are read and dropped,
    or with `is_read` false not read at all.
    """
    with ExitStack() as open_sockets:
        readers = []
        for request in requests:
            reader = open_sockets.enter_context(socket.socket())
            if not is_read:
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            reader.connect((server.endpoint.host, server.endpoint.port))
            reader.sendall(request)
            readers.append(reader)
        has_ended = threading.Event()
        thread = threading.Thread(target=_read, args=(readers if is_read else [], has_ended), name="readers")
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()


def _read(readers: Sequence[socket.socket], has_ended: threading.Event) -> None:
    with selectors.DefaultSelector() as selector:
        for reader in readers:
            selector.register(reader, selectors.EVENT_READ)
        # Seldom, so that reading takes nothing from the client that is measured.
        while not has_ended.wait(LOOK_S):
            for key, _ in selector.select(0):
                if not key.fileobj.recv(READ_BYTES):  # type: ignore[union-attr]
                    selector.unregister(key.fileobj)
