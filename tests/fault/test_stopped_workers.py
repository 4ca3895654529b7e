"""A worker by hand that is told to stop does so whatever it is doing: between two hosts, in a
session, and while the former one's garbage is collected.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from tests.fault.conftest import StartWorker, far_topology

END_S = 200
# Serves hosts that say goodbye and then, a little later each time, send the process a signal.
# Cycles with callbacks, as any library makes them, keep the collector busy for some milliseconds.
ROUNDS = """
import faulthandler, gc, os, signal, sys, threading, time, weakref
from pathlib import Path
from dflash_moe.protocol.identity import local_identity
from dflash_moe.holders.session import HostSession
from dflash_moe.topology.addresses import parse_address
from dflash_moe.workers.process import run_hand_started_worker
from tests.expert_cases import tiny_spec

model, address = Path(sys.argv[1]), parse_address(sys.argv[2])
identity = local_identity("far", tiny_spec(model).fingerprint)

class Thing:
    pass

def litter():
    things = [Thing() for _ in range(5000)]
    for thing in things:
        thing.itself = thing
    return [weakref.ref(thing, lambda reference: sum(range(20))) for thing in things]

def call_and_signal(number, delay_s):
    session = HostSession("far", address, started=None, key=None)
    session.connect(timeout_s=60)
    session.greet(identity, numerics="f32-canonical", threads=0, spin_ns=0, slowdown=1.0, isa="", timeout_s=60)
    session.say_bye()
    session.close(seconds=0.0)
    time.sleep(delay_s)
    os.kill(os.getpid(), number)

gc.disable()
for number in range(40):
    faulthandler.dump_traceback_later(60, exit=True)
    references = litter()
    which = signal.SIGTERM if number % 4 else signal.SIGINT
    host = threading.Thread(target=call_and_signal, args=(which, number * 0.0004), daemon=True)
    code = run_hand_started_worker(name="far", model=model, address=address, key=None, on_ready=lambda _: host.start())
    assert code == 130, code
    host.join()
print("40 stopped")
"""


def test_no_signal_around_a_hosts_goodbye_is_lost(spec: ModelSpec, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ROUNDS, spec.path, f"unix://{tmp_path}/far.sock"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=END_S, check=False)
    assert ended.stdout == "40 stopped\n", ended.stderr[-3000:]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_stops_in_the_middle_of_a_session(
    spec: ModelSpec, tmp_path: Path, start_worker: StartWorker, number: signal.Signals
) -> None:
    worker = start_worker(Path(spec.path), f"unix://{tmp_path}/far.sock")
    with ExpertRuntime.start(far_topology(worker.address, has_near=False), model=spec):
        worker.process.send_signal(number)
        _, stderr = worker.process.communicate(timeout=END_S)
    assert worker.process.returncode == 130
    assert "Traceback" not in stderr
    assert not (tmp_path / "far.sock").exists()
