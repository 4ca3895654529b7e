"""An OpenAI-compatible server whose answers a test writes byte by byte.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

WAIT_S = 60.0
# Takes the body of a request and a function that sends bytes.
Script = Callable[[dict[str, Any], Callable[[bytes], None]], None]
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """A part of a body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str | None = None, *, usage: Any = None, **choice: Any) -> bytes:
    """An event of a completion; without a text it has no choice."""
    choices = [] if text is None else [{"index": 0, "text": text, **choice}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


def usage(tokens: int, prompt: int = 10, **more: Any) -> dict[str, Any]:
    """The count of an answer."""
    return {"prompt_tokens": prompt, "completion_tokens": tokens, **more}


def answer(*events: bytes, done: bytes = b"data: [DONE]\n\n") -> bytes:
    """A whole answer, each event in a part of its own."""
    return STREAM + b"".join(chunk(one) for one in (*events, done) if one) + b"0\r\n\r\n"


def refusal(status: int, message: str, *headers: str) -> bytes:
    """An answer that is an error."""
    body = json.dumps({"error": {"message": message}}).encode()
    lines = [f"HTTP/1.1 {status} No", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def tokens(count: int, **more: Any) -> bytes:
    """An answer of so many tokens, each in its event."""
    return answer(*[event("x")] * count, event(usage=usage(count, **more)))


class ScriptedServer:
    """Listens at `url`, and has `script` answer each request. It keeps bodies and heads."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.num_open = self.most_open = 0
        self.is_over = threading.Event()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """Ends all threads."""
        self.is_over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(sock,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, ValueError):
            sock.settimeout(WAIT_S)
            received = b""
            while b"\r\n\r\n" not in received:
                received += sock.recv(1 << 16) or b"\r\n\r\n"
            head, _, body = received.partition(b"\r\n\r\n")
            if head.startswith(b"GET"):
                listed = b'{"data": [{"id": "scripted"}]}'
                sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(listed), listed))
                return
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            while len(body) < length:
                body += sock.recv(1 << 16)
            asked = json.loads(body)
            with self._lock:
                self.heads.append(head.decode())
                self.bodies.append(asked)
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
            try:
                self.script(asked, sock.sendall)
            finally:
                with self._lock:
                    self.num_open -= 1


@contextlib.contextmanager
def scripted(script: Script | bytes) -> Iterator[ScriptedServer]:
    """A server for the length of the block; bytes answer every request."""
    given = script if callable(script) else lambda _body, send: send(script)
    server = ScriptedServer(given)
    try:
        yield server
    finally:
        server.close()
