"""The threads of a pinned worker, as the kernel lists them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from dflash_moe import ConfigError, ExpertRuntime, Topology
from dflash_moe.telemetry.cores import parse_cpu_list
from dflash_moe.testing.tiny import routed_batch, tiny_checkpoint


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("pinned"))


def masks_of(pid: int) -> list[tuple[int, ...]]:
    """The affinity of each thread."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            text = path.read_text()
            line = next(line for line in text.splitlines() if line.startswith("Cpus_allowed_list:"))
            found.append(parse_cpu_list(line.split(":", 1)[1]))
    return found


def one_worker(cpus: str, address: str = "") -> Topology:
    where = f", address: {address}" if address else ""
    return Topology.parse(f"version: 1\nworkers:\n  - {{name: w0, cpus: {cpus}{where}}}\n")


def test_each_compute_thread_has_its_own_core_and_the_control_thread_keeps_all(spec):
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("needs two cores")
    cpus = usable[-2:]
    with ExpertRuntime.start(one_worker(f"'{cpus[0]},{cpus[1]}'"), model=spec) as runtime:
        runtime.experts(0, *routed_batch(3, 64, 8, 2))
        (process,) = runtime.worker_processes()
        masks = masks_of(process.pid)
    assert sorted(mask for mask in masks if len(mask) == 1) == [(cpus[0],), (cpus[1],)]
    assert tuple(usable) in masks
    assert sorted(os.sched_getaffinity(0)) == usable


def test_an_unpinned_worker_runs_anywhere(spec):
    usable = tuple(sorted(os.sched_getaffinity(0)))
    with ExpertRuntime.start(one_worker("none"), model=spec) as runtime:
        runtime.experts(0, *routed_batch(3, 64, 8, 2))
        (process,) = runtime.worker_processes()
        assert set(masks_of(process.pid)) == {usable}


def test_a_worker_inside_the_host_pins_threads_of_its_pool_and_never_the_caller(spec):
    cpus = sorted(os.sched_getaffinity(0))[:2]
    before = os.sched_getaffinity(0)
    threads = set(os.listdir("/proc/self/task"))
    with ExpertRuntime.start(one_worker(f"'{','.join(map(str, cpus))}'", "loopback"), model=spec) as runtime:
        runtime.experts(0, *routed_batch(3, 64, 8, 2))
        assert not [thread for thread in threading.enumerate() if thread.name == "expert-w0"]
        started = set(os.listdir("/proc/self/task")) - threads
        masks = []
        for thread in started:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                masks.append(os.sched_getaffinity(int(thread)))
        # The caller is the first of the pool's threads, and stays where it may run.
        assert masks.count({cpus[-1]}) == (1 if len(cpus) == 2 else 0)
        assert os.sched_getaffinity(0) == before


def test_pinning_changes_no_bit(spec):
    batch = routed_batch(20, 64, 8, 2)
    results = set()
    for cpus in (str(min(os.sched_getaffinity(0))), "none"):
        with ExpertRuntime.start(one_worker(cpus), model=spec) as runtime:
            results.add(np.asarray(runtime.experts(0, *batch)).tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("address", ["", "loopback"])
def test_a_core_that_is_not_there_is_named_before_anything_loads(spec, address):
    with pytest.raises(ConfigError, match="worker w0: CPU 60000 of its `cpus` is not one this process may use"):
        ExpertRuntime.start(one_worker("60000", address), model=spec, on_loading=lambda *_: pytest.fail("it loads"))
