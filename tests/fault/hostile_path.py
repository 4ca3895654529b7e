"""Somebody on the path between a host and a worker: a TCP proxy that keeps what passes and can flip
one bit of it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

# A proxy that is told to end has its connections closed a line before.
END_S = 20.0


class HostilePath:
    """Listens on the loopback interface and passes every connection on to `host`:`port`. It owns
    its threads and sockets until the end of the `with` block.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._recorded = bytearray()
        self._is_recording = False
        # A bit of the so-many-th byte from now on is flipped, None where none is.
        self._flip: tuple[int, int] | None = None
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

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

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, timeout=END_S)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [near, far]
            for source, to in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pass, args=(source, to))
                self._threads.append(thread)
                thread.start()

    def _pass(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while received := source.recv(65536):
                to.sendall(self._changed(bytearray(received)))
        for end in (source, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _changed(self, received: bytearray) -> bytearray:
        with self._lock:
            if self._is_recording:
                self._recorded += received
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
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(END_S)
            assert not thread.is_alive()
        for end in self._sockets:
            end.close()
