"""Strangers on the network of a worker that is reached over TCP and TLS: bad handshakes while a
host is served, connections that say nothing, replayed bytes, and a proxy on the path that flips one
bit after the other.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from bench.campaigns.faults.by_hand import HandStarted, reaching, worker_by_hand
from bench.campaigns.faults.campaign import Campaign, Run, spread
from bench.campaigns.faults.hostile_path import HostilePath
from bench.campaigns.faults.load import ALONE, Load, make_model, state_of, wait_until
from dflash_moe import _core
from dflash_moe.bench.results import percentile
from dflash_moe.config.settings import MAX_DEATHS
from dflash_moe.errors import UnsupportedError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol.keys import write_key_file

# A changed length has the reader wait for what never comes, so that these limits end it.
SHORT = {"call_timeout_s": 2.0, "stall_timeout_s": 1.0, "start_timeout_s": 10.0}
# In one session about so many bytes pass before calls begin, and in one call at most.
SESSION_BYTES = 6_000
ANSWER_S = 10.0
# Connections that say nothing, all at once.
SILENT = 100
# The service is timed in quiet for so many calls.
QUIET_CALLS = 500
SERVICE_GOAL = 1.1
# A result keeps so many samples of the service at most.
MOST_SAMPLES = 5_000
ROOT = Path(__file__).resolve().parents[3]


def run(given: Run) -> None:
    """Tries `given.size` bad handshakes, and flips as many bits."""
    spec = make_model(given.folder / "model")
    key = given.folder / "shared.key"
    write_key_file(key)
    with _worker(given, spec, key, "served") as worker:
        _record_start(spec, key, worker, recorded := given.folder / "recorded")
        with ExpertRuntime.start(reaching(worker.address), model=spec, key_file=key, encryption="on", **ALONE) as runtime:
            try_handshakes(given, runtime, worker.place, "control", recorded)
        given.claim("workers that ended", int(worker.process.poll() is not None), at_most=0)
    _flips(given, spec, key)


def _worker(given: Run, spec: ModelSpec, key: Path, name: str) -> contextlib.AbstractContextManager[HandStarted]:
    options = ("--key-file", str(key), "--encryption", "on")
    return worker_by_hand(spec, given.folder / name, "tcp://127.0.0.1:0", *options)


# -- bad handshakes --------------------------------------------------------------------------------


def try_handshakes(given: Run, runtime: ExpertRuntime, place: tuple[str, int], label: str, recorded: Path) -> None:
    """Tries `given.size` handshakes as `label` for the worker `far` at whoever listens at `place`,
    beside calls of the runtime, and claims that none is accepted and no call notices. `recorded` is
    a folder of what a real dialler sent.
    """
    program = [sys.executable, "-m", "bench.campaigns.faults.bad_handshakes", *place, label, given.size, recorded]
    load = Load.quiet(runtime, seed=given.seed, tokens=(16,))
    quiet_s = _times(load, lambda number: number >= QUIET_CALLS)
    with contextlib.ExitStack() as silent, (given.folder / "tries").open("w+") as tries:
        for _ in range(SILENT):
            silent.enter_context(socket.create_connection(place, timeout=ANSWER_S))
        given.event("silent connections", count=SILENT, verdict="held")
        stranger = subprocess.Popen([str(word) for word in program], stdout=tries, cwd=ROOT)
        silent.callback(stranger.kill)
        attacked_s = _times(load, lambda _: stranger.poll() is not None)
        tries.seek(0)
        found = [json.loads(line) for line in tries]
    for one in found:
        given.event(one["kind"], verdict="accepted" if one["accepted"] else "refused")
    accepted = sum(one["accepted"] for one in found)
    given.claim("handshakes accepted", accepted, at_most=0)
    given.claim("handshakes tried", len(found), at_least=given.size)
    given.claim("handshakes: failed calls", load.failed, at_most=0)
    given.claim("handshakes: wrong results", load.wrong, at_most=0)
    ratio = percentile(attacked_s, 0.99) / percentile(quiet_s, 0.99)
    given.goal("p99 of the service beside quiet", ratio, at_most=SERVICE_GOAL)
    given.row(
        "bad handshakes", attacked_s[:MOST_SAMPLES], tries=Counter(one["kind"] for one in found), accepted=accepted,
        calls=load.calls, failed_calls=load.failed, wrong_results=load.wrong, **spread("quiet", quiet_s),
        **spread("service", attacked_s),
    )  # fmt: skip


def _times(load: Load, is_over: Callable[[int], bool]) -> list[float]:
    times: list[float] = []
    while not is_over(len(times)):
        began = time.perf_counter()
        load.call(load.works[len(times) % len(load.works)])
        times.append(time.perf_counter() - began)
    return times


def _record_start(spec: ModelSpec, key: Path, worker: HandStarted, folder: Path) -> None:
    """Writes what a real host sends on each of its connections, in its start and first calls."""
    with HostilePath(*worker.place) as path:
        path.record()
        with ExpertRuntime.start(reaching(path.address), model=spec, key_file=key, encryption="on", **ALONE) as runtime:
            Load.quiet(runtime, tokens=(1,))
        path.write_dialled(folder)


# -- flipped bits ----------------------------------------------------------------------------------


def _flips(given: Run, spec: ModelSpec, key: Path) -> None:
    """Flips a bit, calls until the session has ended, and goes on with the session that follows by
    itself.
    """
    unnoticed = unhealed = 0
    back_s: list[float] = []
    with _worker(given, spec, key, "flipped") as worker, HostilePath(*worker.place) as path:
        overrides = {**ALONE, "restart_deaths": MAX_DEATHS, "restart_backoff_ms": (1, 20), "park_s": 0, **SHORT}
        topology = reaching(path.address)
        with ExpertRuntime.start(topology, model=spec, key_file=key, encryption="on", **overrides) as runtime:
            load = Load.quiet(runtime, seed=given.seed, tokens=(1, 16))
            for _ in range(given.size):
                deaths, generation = state_of(runtime, "far").deaths, _generation(runtime)
                path.flip(offset := given.drawn.randrange(3 * SESSION_BYTES), bit := given.drawn.randrange(8))
                was_ended = _call_until_lost(load, path, deaths, generation)
                began = time.monotonic()
                is_back = wait_until(lambda: state_of(runtime, "far").state == "ready", every_s=0.005)
                back_s.append(time.monotonic() - began)
                unnoticed += int(not was_ended)
                unhealed += int(not is_back)
                given.event(
                    "flip", offset=offset, bit=bit, back_s=back_s[-1], wrong_results=load.wrong,
                    verdict="closed" if was_ended and is_back else "kept",
                )  # fmt: skip
    untyped = sum(kind not in ("WorkerLost", "WorkerTimeout", "WorkerError", "ProtocolError") for _, kind, _ in load.errors)
    zero = {
        "wrong results": load.wrong,
        "connections kept": unnoticed,
        "not healed": unhealed,
        "errors of other kinds": untyped,
    }
    for what, value in zero.items():
        given.claim(f"flips: {what}", value, at_most=0)
    given.row(
        "flipped bits", back_s, flips=given.size, calls=load.calls, failed_calls=load.failed, wrong_results=load.wrong,
        kept=unnoticed, not_healed=unhealed, **spread("back", back_s, unit_ms=False),
    )  # fmt: skip


def _generation(runtime: ExpertRuntime) -> int:
    return int(runtime.stats()["workers"]["far"]["generation"])


def _call_until_lost(load: Load, path: HostilePath, deaths: int, generation: int) -> bool:
    """Calls until the flip has come and the session has ended, by an error or unseen by a call."""

    def has_ended() -> bool:
        load.call(load.works[load.calls % len(load.works)])
        if not path.has_flipped:
            return False
        return state_of(load.runtime, "far").deaths > deaths or _generation(load.runtime) != generation

    return wait_until(has_ended, every_s=0.0)


def _lacking() -> str:
    try:
        _core.libssl_version()
    except UnsupportedError as error:
        return str(error)
    return ""


CAMPAIGN = Campaign(
    "strangers", "bad handshakes, and bits flipped on the path, over TCP and TLS", "handshakes, and as many flips", 10_000, 40,
    run, _lacking,
)  # fmt: skip
