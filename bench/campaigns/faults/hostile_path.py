"""Somebody on the path between a host and a worker: a TCP proxy that keeps what passes and can flip
one bit of it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from types import TracebackType

from dflash_moe.protocol.failures import is_descriptor_limit

# A proxy that is told to end has its connections closed a line before.
END_S = 20.0
# Where this process has no descriptor left, the next connection is taken after this time.
AGAIN_S = 0.05


class HostilePath:
    """Listens on the loopback interface and passes every connection on to `host`:`port`. It owns
    its threads and sockets until the end of the `with` block; those of a connection go with it.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._recorded = bytearray()
        # What the dialling end of each connection sent while it was recorded.
        self._dialled: dict[int, bytearray] = {}
        self._is_recording = False
        # A bit of the so-many-th byte from now on is flipped, None where none is.
        self._flip: tuple[int, int] | None = None
        # The sockets of each connection, and how many of its two threads still run.
        self._connections: dict[int, tuple[socket.socket, socket.socket]] = {}
        self._running: dict[int, int] = {}
        self._threads: dict[threading.Thread, None] = {}
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def flip(self, offset: int, bit: int) -> None:
        """Flips `bit` of the byte that is `offset` bytes ahead, in the order in which they pass, in
        whichever direction and connection that is.
        """
        with self._lock:
            self._flip = (offset, bit)

    @property
    def has_flipped(self) -> bool:
        """Whether the bit asked for was flipped."""
        return self._flip is None

    def record(self) -> None:
        """Keeps what passes from now on."""
        with self._lock:
            self._is_recording = True

    @property
    def recorded(self) -> bytes:
        """What passed since `record`."""
        with self._lock:
            return bytes(self._recorded)

    def write_dialled(self, folder: Path) -> None:
        """Writes what the dialling end of each connection has sent since `record`, a file for each
        in `folder`, which is made.
        """
        with self._lock:
            dialled = [bytes(sent) for sent in self._dialled.values()]
        folder.mkdir()
        for number, sent in enumerate(dialled):
            (folder / f"{number}.bin").write_bytes(sent)

    def _accept(self) -> None:
        number = 0
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError as error:
                if not is_descriptor_limit(error):
                    return
                time.sleep(AGAIN_S)
                continue
            try:
                far = socket.create_connection(self._target, timeout=END_S)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            number += 1
            threads = [
                threading.Thread(target=self._pass, args=(number, near, far, True)),
                threading.Thread(target=self._pass, args=(number, far, near, False)),
            ]
            with self._lock:
                self._connections[number], self._running[number] = (near, far), 2
                self._threads |= dict.fromkeys(threads)
            for thread in threads:
                thread.start()

    def _pass(self, number: int, source: socket.socket, to: socket.socket, is_dialled: bool) -> None:
        with contextlib.suppress(OSError):
            while received := source.recv(65536):
                self._forward(number, bytearray(received), to, is_dialled)
        for end in (source, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._running[number] -= 1
            is_last = self._running[number] == 0
            if is_last:
                del self._running[number], self._connections[number]
            self._threads.pop(threading.current_thread(), None)
        if is_last:
            source.close()
            to.close()

    def _forward(self, number: int, received: bytearray, to: socket.socket, is_dialled: bool) -> None:
        """Passes on what one end of a connection has sent; `is_dialled` says whether it dialled."""
        to.sendall(self._changed(number, received, is_dialled))

    def _changed(self, number: int, received: bytearray, is_dialled: bool) -> bytearray:
        with self._lock:
            if self._is_recording:
                self._recorded += received
                if is_dialled:
                    self._dialled.setdefault(number, bytearray()).extend(received)
            if self._flip is not None:
                offset, bit = self._flip
                if offset < len(received):
                    received[offset] ^= 1 << bit
                    self._flip = None
                else:
                    self._flip = (offset - len(received), bit)
        return received

    def __enter__(self) -> HostilePath:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join(END_S)
        with self._lock:
            ends = [end for pair in self._connections.values() for end in pair]
            threads = list(self._threads)
            for end in ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(END_S)
            if thread.is_alive():
                raise TimeoutError("a connection of the proxy does not end")
