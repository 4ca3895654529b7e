"""What a server of watched_server.py says of itself, and how long its tokens took to a client.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.serving.servers import Server
from dflash_moe.bench.streaming.load import Load

# Its main thread, which is idle, writes the file.
LOOK_S = 30.0
# The kernel may hand a signal to a thread that does not wake the main one, whose it is in Python.
ASKED_AGAIN_S = 2.0


def look(server: Server, out: Path) -> dict[str, Any]:
    """Has the server write `out`, and returns what stands there. Raises SystemExit where it does
    not within LOOK_S.
    """
    out.unlink(missing_ok=True)
    began = asked = time.monotonic()
    os.kill(server.pid, signal.SIGUSR1)
    while not out.exists():
        now = time.monotonic()
        if now - began > LOOK_S:
            raise SystemExit(f"the server did not say within {LOOK_S:g} s what it is at")
        if now - asked > ASKED_AGAIN_S:
            os.kill(server.pid, signal.SIGUSR1)
            asked = now
        time.sleep(0.005)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def delays_s(load: Load, steps: Sequence[Sequence[float]]) -> list[float]:
    """Returns for each event of completed requests the time since the step that gave its last
    token, as far as events tell how many they have. `steps` has (number of the request, time of the
    step) for each token; server and client read the same clock. Raises SystemExit where tokens are
    missing on a side.

    Requests are matched by when their first tokens came. Those that begin in one step get all their
    tokens in the same steps.
    """
    began = min(one.submitted for one in load.streamed)
    of_request: dict[float, list[float]] = {}
    for number, moment in steps:
        if moment >= began:
            of_request.setdefault(number, []).append(moment)
    computed = sorted(of_request.values(), key=lambda moments: moments[0])
    streamed = sorted(load.completed, key=lambda one: one.times[0])
    found = []
    if [len(moments) for moments in computed] != [one.tokens for one in streamed]:
        raise SystemExit(f"{len(computed)} requests of the engine are not the {len(streamed)} of the client")
    for moments, one in zip(computed, streamed, strict=True):
        # An event that does not tell its tokens has one, unless a letter ended with a later one.
        if one.tells_counts:
            ends = itertools.accumulate(count or 1 for count in one.counts)
            found += [moment - moments[end - 1] for moment, end in zip(one.times, ends, strict=True)]
    return found
