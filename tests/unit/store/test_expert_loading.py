"""Loading experts with several threads: all arrive, progress is told on the caller's thread, damage
is named with its tensor.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest

from dflash_moe import _core
from dflash_moe.errors import CheckpointError
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.ffn import FfnSpec, TensorPattern
from dflash_moe.store.expert_loading import load_experts

H, W, E = 64, 32, 6


def write(folder, scales: np.ndarray) -> Checkpoint:
    generator = np.random.default_rng(0)
    header, data = {}, b""
    for name, outputs, inputs in (("up", W, H), ("gate", W, H), ("down", H, W)):
        groups = inputs // 32
        own = scales if name == "gate" else np.full((E, outputs, groups), 120, np.uint8)
        blocks = generator.integers(0, 256, (E, outputs, groups, 16), dtype=np.uint8)
        for suffix, value in (("blocks", blocks), ("scales", own)):
            span = [len(data), len(data) + value.nbytes]
            header[f"{name}_{suffix}"] = {"dtype": "U8", "shape": list(value.shape), "data_offsets": span}
            data += value.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return Checkpoint.open(folder)


FFN = FfnSpec(
    in_size=H,
    intermediate_size=W,
    out_size=H,
    gate_tensor=TensorPattern("gate", True),
    up_tensor=TensorPattern("up", True),
    down_tensor=TensorPattern("down", True),
)


def shard(num_experts: int) -> _core.ResidentShard:
    return _core.ShardStore(isa="scalar", num_threads=1).borrow(FFN.kernel_spec(), num_experts, "mxfp4", 7)


def test_all_experts_arrive_and_progress_is_told_on_the_callers_thread(tmp_path):
    checkpoint = write(tmp_path, np.full((E, W, H // 32), 120, np.uint8))
    told: list[tuple[int, int]] = []
    load_experts(
        shard(4), checkpoint, FFN, (0, 2, 3, 5), threads=3,
        report=lambda count: told.append((count, threading.get_ident())),
    )  # fmt: skip
    assert told == [(count, threading.get_ident()) for count in (1, 2, 3, 4)]


def test_a_scale_that_is_nan_is_named_with_file_tensor_and_expert(tmp_path):
    scales = np.full((E, W, H // 32), 120, np.uint8)
    scales[4, 9, 1] = 255
    checkpoint = write(tmp_path, scales)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'gate', expert 4: .*output 9, input 32.*NaN"):
        load_experts(shard(E), checkpoint, FFN, range(E), threads=2)


def test_the_first_error_ends_the_loading_of_many_at_once(tmp_path, monkeypatch):
    """What was not begun is given up, and nothing waits for it."""
    scales = np.full((E, W, H // 32), 120, np.uint8)
    scales[0, 9, 1] = 255
    monkeypatch.setattr("dflash_moe.store.expert_loading.STANDSTILL_S", 60.0)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="expert 0"):
        load_experts(shard(E), write(tmp_path, scales), FFN, range(E), threads=1)
    assert time.monotonic() - began < 30


def test_a_disk_that_gives_nothing_ends_the_loading(tmp_path, monkeypatch):
    checkpoint = write(tmp_path, np.full((E, W, H // 32), 120, np.uint8))
    released = threading.Event()
    monkeypatch.setattr("dflash_moe.store.expert_loading.STANDSTILL_S", 0.05)
    monkeypatch.setattr("dflash_moe.store.expert_loading.expert_sources", lambda *_: released.wait(30))
    try:
        with pytest.raises(CheckpointError, match="no expert could be read in 0 s; is its disk still there"):
            load_experts(shard(E), checkpoint, FFN, range(E), threads=2)
    finally:
        released.set()
