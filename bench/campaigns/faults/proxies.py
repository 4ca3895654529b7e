"""A proxy between host and worker that goes wrong: it passes handshakes, control and pulse, and
swallows replies, passes half of one, or lets them drip. Calls go on all the while: the first one
waits until somebody takes the worker's place, and the worker is given up, dialled again, and asked
for one thing each time.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import gc
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.campaigns.faults.by_hand import reaching, worker_by_hand
from bench.campaigns.faults.campaign import Campaign, Run, spread
from bench.campaigns.faults.hostile_path import HostilePath
from bench.campaigns.faults.leftovers import belongings, left_since
from bench.campaigns.faults.load import ALONE, Load, is_used, make_model, state_of, wait_until
from dflash_moe.config.settings import MAX_DEATHS
from dflash_moe.errors import ProtocolError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol.keys import write_key_file
from dflash_moe.protocol.messages import CODEC, Open, Role
from dflash_moe.topology import Topology

DROP, HALF, DRIP = "replies dropped", "half a frame", "a drip"
KINDS = (DROP, HALF, DRIP)
# The worker is suspected after this time without an answer, and lost after twice that. A healthy
# replica took up to 1.4 s beside five other programs on two cores.
CALL_TIMEOUT_S = 2.0
# So often it comes back to the bad proxy and is given up again.
RETURNS = 2
# A byte of a drip.
DRIP_S = 0.05
FOUND_GOAL_MS, AFTERWARDS_GOAL_MS = 2e3 * CALL_TIMEOUT_S, 100.0
# Before each frame of a connection's handshake: its length.
_LENGTH = struct.Struct("<I")
# A worker's frames in a handshake: a challenge, and that it accepts.
HANDSHAKE_FRAMES = 2


class StallingProxy(HostilePath):
    """Passes everything on, until `break_replies`: from then on it spoils what comes from the
    worker on data connections, each of which stays spoilt, until `heal`.
    """

    def __init__(self, host: str, port: int) -> None:
        self._kind = ""
        self._data: set[int] = set()
        self._spoilt: set[int] = set()
        # What each end of a connection has sent first, by number and whether it has dialled.
        self._begun: dict[tuple[int, bool], bytearray] = {}
        self._is_whole = threading.Event()
        self._is_whole.set()
        super().__init__(host, port)

    def break_replies(self, kind: str) -> None:
        """Spoils replies from now on: one of KINDS."""
        self._is_whole.clear()
        self._kind = kind

    def heal(self) -> None:
        """Passes everything on again, on connections that are made from now on."""
        self._kind = ""
        self._is_whole.set()

    def _forward(self, number: int, received: bytearray, to: socket.socket, is_dialled: bool) -> None:
        if is_dialled:
            self._note_role(number, received)
        elif number in self._data and (self._kind or number in self._spoilt):
            num_bytes = self._rest_of_handshake(number, received)
            to.sendall(received[:num_bytes])
            if len(received) > num_bytes:
                self._spoil(number, received[num_bytes:], to)
            return
        elif number in self._data:
            self._rest_of_handshake(number, received)
        super()._forward(number, received, to, is_dialled)

    def _spoil(self, number: int, received: bytearray, to: socket.socket) -> None:
        is_first = number not in self._spoilt
        self._spoilt.add(number)
        if self._kind == HALF and is_first:
            to.sendall(received[: len(received) // 2])
        elif self._kind == DRIP:
            for byte in received:
                if self._is_whole.wait(DRIP_S):
                    return
                to.sendall(bytes((byte,)))

    def _note_role(self, number: int, received: bytearray) -> None:
        """Reads in its first frame what a connection is for."""
        begun = self._begun.setdefault((number, True), bytearray())
        if _end_of_frames(begun, 1) is not None:
            return
        begun += received
        end = _end_of_frames(begun, 1)
        if end is None:
            return
        with contextlib.suppress(ProtocolError):
            message = CODEC.decode(bytes(begun[_LENGTH.size : end]), ignore_unknown=True)
            if isinstance(message, Open) and message.role == Role.DATA:
                self._data.add(number)

    def _rest_of_handshake(self, number: int, received: bytearray) -> int:
        """Returns how many of these bytes of a worker still belong to its handshake."""
        begun = self._begun.setdefault((number, False), bytearray())
        if _end_of_frames(begun, HANDSHAKE_FRAMES) is not None:
            return 0
        before = len(begun)
        begun += received
        end = _end_of_frames(begun, HANDSHAKE_FRAMES)
        return len(received) if end is None else end - before

    def __enter__(self) -> StallingProxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.heal()
        super().__exit__(kind, error, trace)


def _end_of_frames(begun: bytearray, count: int) -> int | None:
    """Returns where the first `count` frames end, None where they have not come yet."""
    end = 0
    for _ in range(count):
        if len(begun) < end + _LENGTH.size:
            return None
        end += _LENGTH.size + int(_LENGTH.unpack_from(begun, end)[0])
    return end if len(begun) >= end else None


def run(given: Run) -> None:
    """Breaks each kind of reply `given.size` times with a replica and with the host's stand-in."""
    spec = make_model(given.folder / "model")
    for has_replica in (True, False):
        _spoil_replies(given, spec, "a replica" if has_replica else "the host", has_replica=has_replica)


@contextlib.contextmanager
def reached(
    spec: ModelSpec, folder: Path, *, has_replica: bool, **overrides: Any
) -> Iterator[tuple[ExpertRuntime, StallingProxy]]:
    """Starts a worker by hand, `far`, and a host that reaches it through a proxy; with a replica
    also a worker of the host's own that holds the same.
    """
    key = folder / "shared.key"
    if not key.exists():
        write_key_file(key)
    # In clear, so that the proxy sees what each connection is for.
    options = ("--key-file", str(key), "--encryption", "off")
    with (
        worker_by_hand(spec, folder / f"far-{has_replica}", "tcp://127.0.0.1:0", *options) as worker,
        StallingProxy(*worker.place) as proxy,
    ):
        topology = _with_replica(proxy.address) if has_replica else reaching(proxy.address)
        settings = {
            "key_file": key, "encryption": "off", "call_timeout_s": CALL_TIMEOUT_S, "restart_deaths": MAX_DEATHS,
            "restart_backoff_ms": (20, 100), **(ALONE if has_replica else {}), **overrides,
        }  # fmt: skip
        with ExpertRuntime.start(topology, model=spec, **settings) as runtime:
            yield runtime, proxy


def _with_replica(address: str) -> Topology:
    return Topology.parse(
        "version: 1\nplacement: {replicas: 2}\nworkers:\n"
        f"  - {{name: far, threads: 1, address: '{address}'}}\n  - {{name: near, threads: 1}}\n"
    )


def _spoil_replies(given: Run, spec: ModelSpec, who: str, *, has_replica: bool) -> None:
    before = belongings()
    with reached(spec, given.folder, has_replica=has_replica) as (runtime, proxy):
        load = Load.quiet(runtime, seed=given.seed)
        for kind in KINDS:
            _spoil_often(given, load, proxy, kind, who)
    # The threads with which a stand-in computed go with the runtime.
    del runtime, load
    gc.collect()
    for what, value in left_since(before).items():
        given.claim(f"{who} answers: {what.replace('_', ' ')}", value, at_most=0)


def _spoil_often(given: Run, load: Load, proxy: StallingProxy, kind: str, who: str) -> None:
    calls, failed, wrong = load.calls, load.failed, load.wrong
    events = []
    for number in range(given.size):
        with load.running(seed=given.seed + number):
            events.append(_spoil_once(load, proxy, kind))
        given.event(kind, answered_by=who, failed_calls=load.failed, wrong_results=load.wrong, **events[-1])
    found_s, afterwards_s, back_s = ([event[name] for event in events] for name in ("found_s", "afterwards_s", "back_s"))
    away = sum(not (event["was_lost"] and event["is_back"]) for event in events)
    name = f"{kind}, {who} answers"
    zero = {"failed calls": load.failed - failed, "wrong results": load.wrong - wrong, "not given up and back": away}
    for what, value in zero.items():
        given.claim(f"{name}: {what}", value, at_most=0)
    given.goal(f"{name}: until it is given up, ms", 1e3 * max(found_s), at_most=FOUND_GOAL_MS)
    given.goal(f"{name}: afterwards, ms", 1e3 * max(afterwards_s), at_most=AFTERWARDS_GOAL_MS)
    given.row(
        name, found_s, faults=len(events), calls=load.calls - calls, failed_calls=zero["failed calls"],
        wrong_results=zero["wrong results"], call_timeout_s=CALL_TIMEOUT_S, **spread("stall", found_s),
        **spread("afterwards", afterwards_s), **spread("back", back_s, unit_ms=False),
        first_error=load.errors[0][2] if load.errors else "",
    )  # fmt: skip


def _spoil_once(load: Load, proxy: StallingProxy, kind: str) -> dict[str, Any]:
    """Breaks the proxy until the worker has come back to it and was given up RETURNS times more,
    and heals it. Returns the longest stalls until the worker was given up first and from then on,
    and how all ended.
    """
    deaths = state_of(load.runtime, "far").deaths

    def has_died(times: int) -> bool:
        return wait_until(lambda: state_of(load.runtime, "far").deaths >= deaths + times)

    load.take_worst_s()
    proxy.break_replies(kind)
    was_lost = has_died(1)
    found_s = load.take_worst_s()
    was_lost = has_died(1 + RETURNS) and was_lost
    afterwards_s = load.take_worst_s()
    proxy.heal()
    began = time.monotonic()
    is_back = wait_until(is_used(load.runtime, "far"))
    return {
        "found_s": found_s, "afterwards_s": max(afterwards_s, load.take_worst_s()), "was_lost": was_lost, "is_back": is_back,
        "back_s": time.monotonic() - began, "verdict": "back" if is_back else "away",
    }  # fmt: skip


CAMPAIGN = Campaign(
    "proxies", "a proxy before a worker swallows replies, passes half of one, lets them drip", "times each, twice", 5, 1, run
)
