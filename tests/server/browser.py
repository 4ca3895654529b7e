"""A headless Chromium that a test looks through, by the DevTools protocol over a pair of pipes: no
driver, no port, no package. https://chromedevtools.github.io/devtools-protocol

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
WAIT_S = 60.0
# The keys that tests press: name, code, text.
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}


def program() -> str | None:
    """Where a Chromium is, None without."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Tab:
    """One page. `errors` are what its scripts and its policy have complained of."""

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self._write_fd, self._read_fd = write_fd, read_fd
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        # The password that a challenge is answered with, and how many there were.
        self.password: str | None = None
        self.num_challenges = 0
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Does something and returns its result. Fails for what cannot be done."""
        number = self._send(method, parameters)
        while True:
            message = self._next()
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _send(self, method: str, parameters: dict[str, Any]) -> int:
        self._number += 1
        session = {} if self._session is None else {"sessionId": self._session}
        os.write(
            self._write_fd, json.dumps({"id": self._number, "method": method, "params": parameters, **session}).encode() + b"\0"
        )
        return self._number

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_S
        while b"\0" not in self._received:
            assert select.select([self._read_fd], [], [], max(0.0, deadline - time.monotonic()))[0], "the browser says nothing"
            received = os.read(self._read_fd, 1 << 20)
            assert received, "the browser has ended"
            self._received += received
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        given = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(given["exceptionDetails"].get("exception", {}).get("description") or str(given))
        elif message.get("method") == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.errors.append(given["entry"]["text"])
        elif message.get("method") == "Fetch.requestPaused":
            self._send("Fetch.continueRequest", {"requestId": given["requestId"]})
        elif message.get("method") == "Fetch.authRequired":
            self.num_challenges += 1
            answer = {"response": "ProvideCredentials", "username": "", "password": self.password}
            self._send("Fetch.continueWithAuth", {"requestId": given["requestId"], "authChallengeResponse": answer})

    def open(self, url: str) -> None:
        """Goes to a page, and returns once its scripts have run."""
        if self.password is not None:
            self.do("Fetch.enable", handleAuthRequests=True)
        self.do("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript, or of what it promises."""
        found = self.do("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self, selector: str) -> str | None:
        """What stands in the last element of a selector, None where there is none."""
        return self.value(f"[...document.querySelectorAll({json.dumps(selector)})].at(-1)?.textContent ?? null")

    def wait(self, expression: str) -> None:
        """Waits until an expression is true."""
        deadline = time.monotonic() + WAIT_S
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < deadline, (expression, self.errors, self.value("document.body.innerText"))
            time.sleep(0.05)

    def type(self, text: str) -> None:
        """Types a text where the focus is."""
        self.do("Input.insertText", text=text)

    def press(self, key: str, *, has_shift: bool = False) -> None:
        """Presses a key and lets it go."""
        code, text = _KEYS[key]
        given = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if has_shift else 0}
        self.do("Input.dispatchKeyEvent", type="keyDown", **given, **({"text": text} if text else {}))
        self.do("Input.dispatchKeyEvent", type="keyUp", **given)

    def picture(self, path: Path) -> None:
        """Keeps how the page looks as a PNG."""
        path.write_bytes(base64.b64decode(self.do("Page.captureScreenshot")["data"]))


@contextmanager
def browsing(profile: Path) -> Iterator[Tab]:
    """A browser with one tab. `profile` is an empty folder of its own."""
    found = program()
    assert found is not None
    their_read, our_write = os.pipe()
    our_read, their_write = os.pipe()

    def put_in_place() -> None:
        # The browser reads from descriptor 3 and writes to 4; either end may lie there already.
        high_read, high_write = os.dup(their_read), os.dup(their_write)
        os.dup2(high_read, 3)
        os.dup2(high_write, 4)

    flags = [
        "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(
        [found, *flags], preexec_fn=put_in_place, pass_fds=(3, 4, their_read, their_write), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(their_read)
    os.close(their_write)
    try:
        yield Tab(our_write, our_read)
    finally:
        process.kill()
        process.wait(WAIT_S)
        os.close(our_write)
        os.close(our_read)
