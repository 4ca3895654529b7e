"""Weights that differ by one bit are found and named, whoever holds them and however; honest ones
pass.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from dflash_moe import _core
from dflash_moe.errors import CheckpointError, UnsupportedError, WorkerUnfit
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.holders.audit.golden import GoldenRows
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.expert_tensors import expert_sources
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol import auth
from dflash_moe.topology import Topology
from tests.fault.conftest import StartWorker, flip_a_bit

DAMAGED = "layers.1.experts.6.down"  # at the second of two holders


@pytest.fixture
def damaged(spec: ModelSpec, tmp_path: Path) -> Path:
    """A copy of the checkpoint with one bit of one weight turned over, where no sample of the
    fingerprint lies.
    """
    copy = Path(shutil.copytree(spec.path, tmp_path / "damaged"))
    info = Checkpoint.open(copy).tensors[DAMAGED]
    flip_a_bit(copy, info.offset + 5)
    assert Checkpoint.open(copy).fingerprint() == spec.fingerprint, "it has to be accepted at hello"
    return copy


def reach(spec: ModelSpec, worker: str, **overrides: Any) -> ExpertRuntime:
    """Half of the experts at a worker of this host, half at `worker`."""
    topology = Topology.parse(
        f"version: 1\nworkers:\n  - {{name: near, threads: 1}}\n  - {{name: far, threads: 1, {worker}}}\n"
    )
    return ExpertRuntime.start(topology, model=spec, **overrides)


@pytest.mark.parametrize("layout", ["packed", "mapped"])
@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_flipped_bit_at_a_worker_by_hand_is_named(
    spec: ModelSpec, damaged: Path, key_file: Path, tmp_path: Path, start_worker: StartWorker, transport: str, layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(GoldenRows, "check", lambda _self, _holder, _shards, **_how: None)
    listen = f"unix://{tmp_path}/far.sock" if transport == "shared" else "tcp://127.0.0.1:0"
    worker = start_worker(damaged, listen, "--key-file", str(key_file))
    with reach(spec, f"address: '{worker.address}', weights_layout: {layout}", key_file=key_file) as runtime:
        assert runtime.stats()["transports"]["far"] == transport
        shard = next(shard for shard in runtime.placement.layers[1] if 6 in shard.experts)
        with pytest.raises(CheckpointError) as raised:
            runtime.check_weights()
    said = re.fullmatch(
        rf"weights of layers\.1\.experts, shard {shard.shard_id}: worker far holds content checksum (0x[0-9a-f]{{16}}), this "
        r"host's own copy has (0x[0-9a-f]{16}); one of the two copies is damaged, the worker's or "
        rf"{re.escape(spec.path)}: compare their sha256sum, and copy the checkpoint to that one again",
        str(raised.value),
    )
    assert said is not None, raised.value
    assert said[1] != said[2]


def test_a_flipped_bit_in_an_expert_of_a_golden_row_ends_the_start(
    spec: ModelSpec, damaged: Path, key_file: Path, tmp_path: Path, start_worker: StartWorker
) -> None:
    worker = start_worker(damaged, f"unix://{tmp_path}/far.sock", "--key-file", str(key_file))
    with pytest.raises(
        WorkerUnfit,
        match=(
            r"worker far: layer 1 .*shard 1: .* as this host computes it; either a weight of its copy of the checkpoint or of "
            r"that of this host is damaged, which their sha256sum tells, or .*: copy the checkpoint to the damaged one again"
        ),
    ):
        reach(spec, f"address: '{worker.address}'", key_file=key_file)


@pytest.mark.parametrize("worker", ["backend: cpu", "weights_layout: mapped", "address: loopback", "address: tcp",
                                    "address: unix", "backend: sim, simulate: cuda", "weights: int8"])  # fmt: skip
def test_honest_holders_of_every_kind_pass(spec: ModelSpec, worker: str) -> None:
    reports: list[tuple[str, int, int]] = []
    with reach(spec, worker) as runtime:
        num_shards = sum(len(shards) for shards in runtime.placement.layers)
        assert runtime.check_weights(lambda *report: reports.append(report)) == num_shards
    for layer in ("layers.0.experts", "layers.1.experts"):
        own = [(count, total) for name, count, total in reports if name == layer]  # not "... at far"
        assert own == [(count, 8) for count in range(1, 9)]


@pytest.mark.parametrize("worker", ["backend: cpu", "weights_layout: mapped", "address: loopback",
                                    "backend: sim, simulate: cuda"])  # fmt: skip
def test_a_flipped_bit_of_the_hosts_copy_shows_against_every_kind_of_holder(
    spec: ModelSpec, damaged: Path, worker: str
) -> None:
    with reach(spec, worker) as runtime:
        runtime._placed.spec = dataclasses.replace(runtime.spec, path=str(damaged))
        with pytest.raises(CheckpointError, match=r"layers\.1\.experts, shard \d: worker far holds"):
            runtime.check_weights()


def test_a_worker_of_an_older_version_is_named(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExpertRuntime.start(Topology.local(), model=spec) as runtime:
        session = runtime._fleet.members["w0"].session
        assert session is not None
        assert session._peer is not None
        monkeypatch.setattr(session, "_peer", auth.Peer(session._peer.role, b"", 0, 2, b"", protocol_minor=0))
        with pytest.raises(UnsupportedError, match="worker w0: its version of dflash_moe takes no content checksums"):
            runtime.check_weights()


def test_steps_of_any_size_add_up_to_the_same(spec: ModelSpec) -> None:
    checkpoint = Checkpoint.open(spec.path)
    values = set()
    for num_bytes in (1, 1000, 1 << 30):
        reader = _core.ContentReader(**expert_sources(checkpoint, spec.layers[0].ffn, 3))
        while not reader.read(num_bytes):
            pass
        values.add(reader.value())
    assert len(values) == 1
    assert _core.shard_checksum([1, 2]) != _core.shard_checksum([2, 1])
