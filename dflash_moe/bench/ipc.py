"""`bench ipc` measures what a transport costs: round trips for each transport and payload beside
the raw floor of the same kind, and the time that an expert call adds to the computation of the
worker.

Both ends are processes pinned to cores of their own where there are two. Rounds of the transport
and of its floor alternate, so that a disturbance hits both.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import secrets
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_moe import _core, _measure
from dflash_moe.bench.harness import Recorder
from dflash_moe.bench.results import BenchResult, percentile, timing_fields
from dflash_moe.errors import ConfigError, UnsupportedError, WorkerTimeout
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol.encryption import identity_of
from dflash_moe.protocol.paths import TRANSPORTS
from dflash_moe.testing.tiny import routed_batch, tiny_checkpoint
from dflash_moe.topology import Topology

# Payloads travel each way. 8 KiB is one row of hidden size 2048 in f32. From 1 MiB on the copies
# are all that counts.
PAYLOADS_QUICK = (64, 4096, 8192, 65536, 1 << 20, 4 << 20)
PAYLOADS_FULL = (64, 512, 4096, 8192, 16384, 65536, 262144, 1 << 20, 4 << 20, 16 << 20)
KINDS = ("shared", "futex", "unix", "tcp", "tls", "fabric", "loopback")
# These are measured, by their names in the table of transports. Loopback has no two processes.
TRANSPORT_OF = {"shared": "shared", "futex": "shared", "unix": "unix", "tcp": "tcp", "tls": "tcp", "fabric": "fabric"}
# The floor of a transport is a raw ping-pong of the same nature with one copy per direction.
FLOOR_OF = {
    "shared": "spin", "loopback": "spin", "futex": "futex", "unix": "unix", "tcp": "tcp", "tls": "tls", "fabric": "fabric",
}  # fmt: skip
# A kind that adds to another one alternates with it too.
ADDS_TO = {"tls": "tcp", "fabric": "tcp"}
# Both ends are threads of one process, as they are of every floor: what libfabric has of its own
# does not survive a fork.
IN_ONE_PROCESS = ("loopback", "fabric")
# This is far above any round trip measured here, so that "spinning" means never to sleep.
SPIN_NS = 50_000_000
TIMEOUT_S = 60.0
# What a socket's channel adds to the bare socket is measured with one row of hidden size 2048 in
# f32, step by step: raw ping-pongs with one habit more than one write and one blocking read, and
# the channel asleep and with the spinning that a call does where cores suffice.
ADDS_OVER = ("unix", "tcp")
ADDS_PAYLOAD = 8192
HABITS = ("bare", "two reads", "polls")
CHANNEL_SPINS = {"channel, asleep": 0, "channel, spinning first": 50_000}
# An expert call is measured over these, of a layer of so many experts, in as many calls.
CALLED_OVER = ("loopback", "shared", "unix", "tcp")
HIDDEN_SIZE, NUM_EXPERTS, TOP_K = 2048, 8, 2
WARMUP_CALLS, CALLS = 200, 2000


@dataclass(frozen=True, slots=True)
class IpcParams:
    """What is measured: transport and floor alternate `batches` times, each time for as many rounds
    as move about `bytes_per_batch`.
    """

    payloads: tuple[int, ...] = PAYLOADS_QUICK
    kinds: tuple[str, ...] = KINDS
    batches: int = 5
    max_rounds: int = 2000
    bytes_per_batch: int = 256 << 20
    calls: tuple[str, ...] = CALLED_OVER
    adds: tuple[str, ...] = ADDS_OVER


def run_ipc(params: IpcParams, *, recorder: Recorder | None = None) -> BenchResult:
    """Measures rows that are named as in `KINDS`. It needs no model, and saves the file after every
    row.
    """
    recorder = recorder or Recorder()
    cpus = sorted(os.sched_getaffinity(0))
    pinned = (cpus[0], cpus[1]) if len(cpus) > 1 else (cpus[0], cpus[0])
    two_cores = len(cpus) > 1
    described = {"payloads": list(params.payloads), "batches": params.batches, "pinned": list(pinned), "two_cores": two_cores}
    # A row alternates with its own floor, not with other rows.
    result = recorder.begin("ipc", described, interleaved=False)
    lacking = {} if two_cores else dict.fromkeys(("shared", "loopback"), "spinning needs two cores")
    try:
        described["fabric_provider"] = _core.fabric_providers()[0].name
    except UnsupportedError as error:
        lacking["fabric"] = str(error)
    kinds = [kind for kind in params.kinds if kind not in lacking]
    for kind in set(params.kinds) & set(lacking):
        recorder.reporter.say(f"{kind}: skipped, {lacking[kind]}")
    cases = [(kind, payload_bytes) for kind in kinds for payload_bytes in params.payloads]
    adds = params.adds if two_cores else ()
    total = len(cases) + len(adds) + len(params.calls)
    with recorder.recording():
        for done, (kind, payload_bytes) in enumerate(cases):
            recorder.reporter.advance(done, total, f"{kind} {payload_bytes} B")
            result.rows.append(_row(kind, payload_bytes, params, pinned))
            recorder.save()
        for done, transport in enumerate(adds, len(cases)):
            recorder.reporter.advance(done, total, f"what a channel adds over {transport}")
            result.rows += _added_rows(transport, params, pinned)
            recorder.save()
        for done, transport in enumerate(params.calls, len(cases) + len(adds)):
            recorder.reporter.advance(done, total, f"expert calls over {transport}")
            result.rows.append(_measure_call(transport, pinned))
            recorder.save()
        recorder.reporter.advance(total, total, "done")
    return result


def _row(kind: str, payload_bytes: int, params: IpcParams, pinned: tuple[int, int]) -> dict[str, Any]:
    rounds = max(8, min(params.max_rounds, params.bytes_per_batch // (4 * payload_bytes)))
    warmup = max(2, rounds // 10)
    samples: list[int] = []
    floors: list[int] = []
    copies: list[float] = []
    without: list[int] = []
    for _ in range(params.batches):
        samples += _round_trips(kind, payload_bytes, rounds, warmup, pinned)
        floors += _measure.ipc_floor(FLOOR_OF[kind], payload_bytes, rounds, warmup, pinned)
        if kind in ADDS_TO:
            without += _round_trips(ADDS_TO[kind], payload_bytes, rounds, warmup, pinned)
        copies += _measure.memcpy_bytes_per_s(payload_bytes, rounds, pinned[0])
    p50_us = statistics.median(samples) / 1e3
    added = {"adds_to": ADDS_TO[kind], "without_us": statistics.median(without) / 1e3} if without else {}
    return {
        "name": kind,
        "payload_bytes": payload_bytes,
        **timing_fields([ns / 1e9 for ns in samples], per_round=rounds),
        "p50_us": p50_us,
        "p99_us": percentile(samples, 0.99) / 1e3,
        "floor_us": statistics.median(floors) / 1e3,
        "floor_p99_us": percentile(floors, 0.99) / 1e3,
        "bytes_per_s": 2 * payload_bytes / (p50_us / 1e6),
        "memcpy_bytes_per_s": statistics.median(copies),
        **added,
    }


def _added_rows(transport: str, params: IpcParams, pinned: tuple[int, int]) -> list[dict[str, Any]]:
    """Returns a row for each step from the bare socket to the channel, taken in turns."""
    rounds = min(params.max_rounds, params.bytes_per_batch // (4 * ADDS_PAYLOAD))
    samples: dict[str, list[int]] = {step: [] for step in (*HABITS, *CHANNEL_SPINS)}
    for _ in range(params.batches):
        for habit in HABITS:
            samples[habit] += _measure.ipc_floor(transport, ADDS_PAYLOAD, rounds, rounds // 10, pinned, habit)
        for step, spin_ns in CHANNEL_SPINS.items():
            samples[step] += _round_trips(transport, ADDS_PAYLOAD, rounds, rounds // 10, pinned, spin_ns)
    bare_us = statistics.median(samples[HABITS[0]]) / 1e3
    return [
        {
            "name": f"adds_{transport}",
            "step": step,
            "payload_bytes": ADDS_PAYLOAD,
            **timing_fields([ns / 1e9 for ns in taken], per_round=rounds),
            "p50_us": statistics.median(taken) / 1e3,
            "p99_us": percentile(taken, 0.99) / 1e3,
            "bare_us": bare_us,
        }
        for step, taken in samples.items()
    ]


def _round_trips(
    kind: str, payload_bytes: int, rounds: int, warmup: int, pinned: tuple[int, int], spin_ns: int | None = None
) -> list[int]:
    """Starts an echo process on the worker's end, measures from the host's end, and reaps the echo
    in every case.
    """
    slot_bytes = -(-payload_bytes // 64) * 64
    geometry = _core.Geometry(2, slot_bytes, slot_bytes)
    if spin_ns is None:
        spin_ns = SPIN_NS if kind in ("shared", "loopback") else 0
    if kind in IN_ONE_PROCESS:
        return _round_trips_within(kind, geometry, payload_bytes, rounds, warmup, pinned, spin_ns)
    # Both ends are made here; each process then moves one of them and leaves the other alone.
    host, worker = _both_ends(kind, geometry)
    echo_pid = os.fork()
    if echo_pid == 0:
        status = 1
        try:
            _measure.ipc_echo(worker, spin_ns, 5.0, pinned[1])
            status = 0
        finally:
            os._exit(status)
    try:
        return _measure.ipc_round_trip(host, payload_bytes, rounds, warmup, spin_ns, TIMEOUT_S, pinned[0])
    finally:
        import signal

        os.kill(echo_pid, signal.SIGKILL)
        os.waitpid(echo_pid, 0)


def _round_trips_within(
    kind: str, geometry: _core.Geometry, payload_bytes: int, rounds: int, warmup: int, pinned: tuple[int, int], spin_ns: int
) -> list[int]:
    import threading

    host, worker = _core.make_loopback(geometry) if kind == "loopback" else _both_ends(kind, geometry)
    # The echo ends by itself when nothing has come for half a second.
    echo = threading.Thread(target=_measure.ipc_echo, args=(worker, spin_ns, 0.5, pinned[1]), daemon=True)
    echo.start()
    samples = _measure.ipc_round_trip(host, payload_bytes, rounds, warmup, spin_ns, TIMEOUT_S, pinned[0])
    echo.join(timeout=5)
    return samples


def _both_ends(kind: str, geometry: _core.Geometry) -> tuple[_core.Channel, _core.Channel]:
    """Makes the host's and the worker's end of one path, by the handshake of the table of
    transports.
    """
    transport = TRANSPORT_OF.get(kind)
    if transport is None:
        raise ConfigError(f"transport {kind!r} cannot be measured; choose from {', '.join(KINDS)}")
    terms = _core.PathTerms(geometry, 1)
    offer = _core.offer_path(transport, terms)
    passed = [os.dup(descriptor) for descriptor in offer.descriptors]
    dialled = [end.detach() for end in _tcp_pair()] if TRANSPORTS[transport].is_dialled else []
    ours, theirs = _encrypted(*dialled) if kind == "tls" else (None, None)
    if ours is not None:
        dialled = []
    accepted = _core.accept_path(transport, terms, offer.payload, passed + dialled[1:], theirs)
    answered = [os.dup(descriptor) for descriptor in accepted.descriptors]
    return offer.complete(accepted.payload, answered + dialled[:1], ours), accepted.take_channel()


def _encrypted(ours: int, theirs: int) -> tuple[_core.SecureSocket, _core.SecureSocket]:
    """Puts both ends of a connection under TLS, with a key for this run. Each call goes on as far
    as it can, so that the ends take turns.
    """
    keys = [(identity_of("data", "bench"), secrets.token_bytes(32))]
    dialling = _core.SecureSocket(ours, is_dialling=True, keys=keys)
    accepting = _core.SecureSocket(theirs, is_dialling=False, keys=keys)
    until = time.monotonic() + TIMEOUT_S
    while not (dialling.handshake() & accepting.handshake()):
        if time.monotonic() > until:
            raise WorkerTimeout("two ends of one process did not finish a TLS handshake")
    return dialling, accepting


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        ours = socket.create_connection(listener.getsockname(), timeout=5)
        theirs, _ = listener.accept()
    return ours, theirs


def _measure_call(transport: str, pinned: tuple[int, int]) -> dict[str, Any]:
    """Returns the row of calls of one token in f32, as in decode: what each takes from the Python
    call to its return, minus the computation that the worker reported for that very call.

    The layer is tiny, so that computation is short; its hidden size gives a row its usual size.
    """
    address = "" if transport == "shared" else f", address: {transport}"
    worker = f"{{name: w0, backend: cpu, threads: 1{address}}}"
    topology = Topology.parse(f"version: 1\nhost: {{threads: 1}}\nworkers: [{worker}]\n")
    tensors = _batch()
    with (
        _tiny_layer() as spec,
        ExpertRuntime.start(topology, model=spec, mode="batched", profile=1) as runtime,
        _pinned(runtime, pinned),
    ):
        for _ in range(WARMUP_CALLS):
            runtime.experts(0, *tensors)
        runtime.take_traces()
        walls = []
        # Calls follow each other at once, as in a decode step. Anything between them would let the
        # worker fall asleep.
        for _ in range(CALLS):
            started = time.perf_counter_ns()
            runtime.experts(0, *tensors)
            walls.append(time.perf_counter_ns() - started)
        # Each call has one slice, and slices are in the order of the calls.
        traces = runtime.take_traces()
        computes = [trace["worker_finished_ns"] - trace["worker_started_ns"] for trace in traces]
    added_us = [(wall - compute) / 1e3 for wall, compute in zip(walls, computes, strict=True)]
    return {
        "name": f"call_{transport}",
        "transport": transport,
        "tokens": 1,
        "hidden_size": HIDDEN_SIZE,
        "tensors": type(tensors[0]).__module__,
        **timing_fields([wall / 1e9 for wall in walls]),
        "worker_p50_us": statistics.median(computes) / 1e3,
        "added_p50_us": statistics.median(added_us),
        "added_p99_us": percentile(added_us, 0.99),
    }


@contextmanager
def _tiny_layer() -> Iterator[ModelSpec]:
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder:
        yield tiny_checkpoint(
            Path(folder),
            hidden_size=HIDDEN_SIZE,
            moe_intermediate_size=16,
            num_experts=NUM_EXPERTS,
            top_k=TOP_K,
            num_layers=1,
        )


def _batch() -> tuple[Any, Any, Any]:
    """Returns one token, as torch tensors where torch is installed, as at a host, and else as NumPy
    arrays.
    """
    arrays = routed_batch(1, HIDDEN_SIZE, NUM_EXPERTS, TOP_K)
    try:
        import torch
    except ImportError:
        return arrays
    return tuple(torch.from_numpy(array) for array in arrays)


@contextmanager
def _pinned(runtime: ExpertRuntime, cpus: tuple[int, int]) -> Iterator[None]:
    """This thread on the first core, every thread of worker processes on the second; this thread is
    freed again at the end.
    """
    allowed = os.sched_getaffinity(0)
    if cpus[0] == cpus[1]:
        yield
        return
    for process in runtime.worker_processes():
        if process.pid != os.getpid():
            for thread in os.listdir(f"/proc/{process.pid}/task"):
                os.sched_setaffinity(int(thread), {cpus[1]})
    os.sched_setaffinity(0, {cpus[0]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
