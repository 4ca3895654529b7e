"""A worker that was started by hand keeps the weights when its host is gone, and lends them to the
next one: with equal bits, at once, without taking memory twice, and for a limited time.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.spec import ModelSpec
from dflash_moe.store.expert_store import ExpertStore
from dflash_moe.topology import Topology
from tests.expert_cases import call, expected_of
from tests.fault.conftest import StartWorker, wait_until

BACK_S = 90.0
# Starts a host on the worker at sys.argv[2], calls it once, and dies without a goodbye.
DYING_HOST = """
import os, signal, sys
from pathlib import Path
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.topology import Topology
from tests.expert_cases import call, tiny_spec

runtime = ExpertRuntime.start(Topology.parse(sys.argv[2]), model=tiny_spec(Path(sys.argv[1])))
call(runtime)
os.kill(os.getpid(), signal.SIGKILL)
"""


def text_of(address: str, **worker: Any) -> str:
    fields = "".join(f", {key}: {value}" for key, value in worker.items())
    return f"version: 1\nworkers:\n  - {{name: far, address: '{address}'{fields}}}\n"


def start(spec: ModelSpec, address: str, **worker: Any) -> ExpertRuntime:
    return ExpertRuntime.start(Topology.parse(text_of(address, **worker)), model=spec)


def kept_bytes(runtime: ExpertRuntime) -> int:
    session = runtime._fleet.members["far"].session
    assert session is not None
    assert session.hello is not None
    return session.hello.kept_bytes


def resident_bytes(runtime: ExpertRuntime) -> int:
    session = runtime._fleet.members["far"].session
    assert session is not None
    return session.ask_stats(timeout_s=BACK_S)["resident_weight_bytes"]


def check_bits(runtime: ExpertRuntime) -> None:
    assert np.array_equal(call(runtime), expected_of(runtime))


@pytest.mark.parametrize("layout", ["packed", "mapped"])
def test_the_next_host_finds_the_weights_of_the_former_one(
    spec: ModelSpec, start_worker: StartWorker, tmp_path: Path, layout: str
) -> None:
    worker = start_worker(Path(spec.path), f"unix://{tmp_path}/w.sock")
    taken = []
    for number in range(3):
        with start(spec, worker.address, weights_layout=layout) as runtime:
            assert bool(kept_bytes(runtime)) == (number > 0 and layout == "packed")
            check_bits(runtime)
            taken.append(resident_bytes(runtime))
    assert len(set(taken)) == 1


def test_a_host_that_died_finds_the_weights_again(spec: ModelSpec, start_worker: StartWorker, tmp_path: Path) -> None:
    worker = start_worker(Path(spec.path), f"unix://{tmp_path}/w.sock")
    root = Path(__file__).parents[2]
    died = subprocess.run(
        [sys.executable, "-c", DYING_HOST, spec.path, text_of(worker.address)], cwd=root, timeout=BACK_S, check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert died.returncode == -9
    with start(spec, worker.address) as runtime:
        assert kept_bytes(runtime) > 0
        check_bits(runtime)


@pytest.mark.parametrize("is_limited", [True, False])
def test_what_was_kept_goes_where_a_host_that_asks_for_something_else_needs_its_room(
    spec: ModelSpec, start_worker: StartWorker, tmp_path: Path, is_limited: bool
) -> None:
    address = f"unix://{tmp_path}/w.sock"
    with ExpertRuntime.start(Topology.parse(text_of("loopback")), model=spec) as runtime:
        as_stored = sum(one.weight_bytes for one in runtime.worker_processes() if one.name == "far")
    memory = {"memory": as_stored + 1} if is_limited else {}
    worker = start_worker(Path(spec.path), address, **memory)
    with start(spec, worker.address) as runtime:
        assert resident_bytes(runtime) == as_stored
    with start(spec, worker.address, weights="int8") as runtime:
        assert kept_bytes(runtime) == as_stored
        assert (resident_bytes(runtime) < as_stored) == is_limited
    with start(spec, worker.address) as runtime:
        assert (kept_bytes(runtime) < as_stored) == is_limited
        check_bits(runtime)


@pytest.mark.parametrize("threads", [1, 3])
def test_kept_weights_that_have_changed_in_memory_are_loaded_anew(spec: ModelSpec, threads: int) -> None:
    kept = ExpertStore(isa="scalar", threads=threads)
    checkpoint, layer = Checkpoint.open(Path(spec.path)), spec.layers[0]

    def compute(flip: bool) -> bytes:
        loan = kept.load(
            checkpoint, layer.ffn, (0, 1, 2), name="far", weight_dtype="f32", weights_fingerprint=1, numerics="f32-canonical"
        )
        row = loan.compute_rows(
            struct.pack(f"<{layer.ffn.in_size}f", *[1.0] * layer.ffn.in_size), "f32",
            row_counts=[1], local_expert_ids=[1], weights=[1.0], reply_dtype="f32",
        )  # fmt: skip
        # The highest bit of an exponent, so that any result shows it.
        assert not flip or loan.flip_bit(1, 3, 6)
        loan.give_back()
        return row

    right = compute(flip=True)
    assert compute(flip=False) == right
    kept.close()


@pytest.mark.parametrize("options", [("--keep-s", "0"), ("--keep-s", "0.01")])
def test_weights_are_kept_no_longer_than_was_said(
    spec: ModelSpec, start_worker: StartWorker, tmp_path: Path, options: tuple[str, ...]
) -> None:
    worker = start_worker(Path(spec.path), f"unix://{tmp_path}/w.sock", *options)

    def finds_nothing() -> bool:
        with start(spec, worker.address) as runtime:
            check_bits(runtime)
            return kept_bytes(runtime) == 0

    assert finds_nothing()
    # A host that comes within the hundredth of a second finds them.
    assert wait_until(finds_nothing, BACK_S)
