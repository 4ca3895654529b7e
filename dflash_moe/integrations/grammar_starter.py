"""The process that starts one for each grammar (grammar_process.py): it is started when the first
one comes, and again if somebody has ended it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_moe.errors import DflashError, printable
from dflash_moe.holders.launcher import ISOLATION, OWN_GROUP
from dflash_moe.integrations import grammar_process
from dflash_moe.integrations.grammar_process import GRAMMAR, LENGTH
from dflash_moe.integrations.limited_process import child_environment

# A tokenizer of 150,000 words takes 1.5 s to read, on an idle machine.
START_S = 60.0
REAP_S = 5.0
_SAID_BYTES = 1 << 16


class GrammarStarter:
    """Starts processes. One thread uses it."""

    def __init__(self, told: Mapping[str, Any], tokenizer: str) -> None:
        """`told` and the JSON of a tokenizer, which may be empty, are what grammar_process.py reads
        first.
        """
        self._messages = (json.dumps(told).encode(), tokenizer.encode("utf-8", "surrogatepass"))
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The process id, None where there is no process."""
        return None if self._process is None else self._process.pid

    def hand_over(self, descriptors: Sequence[int]) -> None:
        """Starts a process that has these descriptors: its socket and its pipe. Raises DflashError
        where that cannot be.
        """
        for _ in range(2):
            link = self._link or self._start()
            try:
                socket.send_fds(link, [b"!"], descriptors)
            except OSError:
                self.close()  # somebody has killed it
            else:
                return
        raise DflashError("the process that starts those of grammars ends again and again; see what the kernel says of it")

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.settimeout(START_S)
        self._link = ours
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, *ISOLATION, str(Path(grammar_process.__file__).resolve())],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=child_environment(),
                    cwd="/",
                    # It ends with the socket.
                    **OWN_GROUP,
                )
            except OSError as error:
                self.close()
                raise DflashError(f"the process that follows grammars cannot be started: {error.strerror}") from None
        try:
            for message in self._messages:
                ours.sendall(LENGTH.pack(len(message)) + message)
            said = ours.recv(_SAID_BYTES)
        except OSError:
            said = b""
        if said[LENGTH.size : LENGTH.size + 1] != GRAMMAR:
            self.close()
            reason = printable(said[LENGTH.size + 1 :].decode("utf-8", "replace")) or "it ended"
            raise DflashError(
                f"the process that follows grammars did not start: {reason}; is llguidance installed? "
                "`pip install 'dflash-moe[serve]'`"
            )
        return ours

    def close(self) -> None:
        """Ends it. It may be called twice; what it has started goes on."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(REAP_S)
            self._process = None
