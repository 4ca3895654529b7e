"""Callers of a server that know what they must hear: threads that ask for texts, one after another,
and compare each answer with what the engine alone gives.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import http.client
import itertools
import json
import threading
from dataclasses import dataclass, field
from types import TracebackType

from bench.serving.servers import Server

# Nothing comes for so long only where the server hangs.
SILENCE_S = 60.0
# A caller ends after the answer that it reads.
JOIN_S = 120.0
# A run with so many surprises has said enough of them.
MOST_SHOWN = 20


@dataclass(slots=True)
class Callers:
    """So many threads that ask for the completions of prompts, of which `texts` has the right ones.
    An answer is whole, or cut off where its connection ended before; a text that is neither the
    right one nor, cut off, its beginning is wrong. Anything else is refused.
    """

    server: Server
    texts: dict[str, str]
    new_tokens: int
    num_threads: int
    whole: int = 0
    cut: int = 0
    wrong: int = 0
    refused: int = 0
    surprises: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_ending: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Callers:
        for place in range(self.num_threads):
            self._threads.append(threading.Thread(target=self._call, args=(place,), name=f"caller {place}"))
            self._threads[-1].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_ending.set()
        for thread in self._threads:
            thread.join(JOIN_S)

    def _call(self, place: int) -> None:
        prompts = itertools.cycle(self.texts)
        for _ in range(place):
            next(prompts)
        while not self._is_ending.is_set():
            prompt = next(prompts)
            try:
                status, text, is_whole = self._ask(prompt)
            except (OSError, http.client.HTTPException, ValueError) as error:
                # The front was away before it had answered anything.
                status, text, is_whole = 0, type(error).__name__, False
            self._judge(prompt, status, text, is_whole=is_whole)

    def _ask(self, prompt: str) -> tuple[int, str, bool]:
        """Returns the status, the text of the answer and whether it came to its end."""
        body = {"prompt": prompt, "max_tokens": self.new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.server.endpoint.port, timeout=SILENCE_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body).encode())
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                return answer.status, answer.read().decode(errors="replace"), False
            return 200, *self._streamed(answer)
        finally:
            connection.close()

    def _streamed(self, answer: http.client.HTTPResponse) -> tuple[str, bool]:
        text = ""
        try:
            for line in answer:
                if line.startswith(b"data: [DONE]"):
                    return text, True
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return event["error"]["message"], True
                    text += "".join(choice["text"] for choice in event["choices"])
        except (OSError, http.client.HTTPException, ValueError):
            # A connection that ended, in the middle of an event as well.
            pass
        return text, False

    def _judge(self, prompt: str, status: int, text: str, *, is_whole: bool) -> None:
        right = self.texts[prompt]
        with self._lock:
            if status != http.HTTPStatus.OK:
                self.refused += 1
            elif is_whole and text == right:
                self.whole += 1
            elif not is_whole and right.startswith(text):
                self.cut += 1
                return
            else:
                self.wrong += 1
            if (status, text) != (http.HTTPStatus.OK, right) and len(self.surprises) < MOST_SHOWN:
                self.surprises.append(f"status {status}: {text[:200]}")
