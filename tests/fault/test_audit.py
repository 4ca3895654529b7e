"""Workers whose numbers go wrong: in what they compute, in what they hold, and when they join. They
are found, named and taken out, and a healthy one never is.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_moe import _core
from dflash_moe.errors import WorkerUnfit
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.holders.row_audit import BURST_EXCHANGES
from dflash_moe.holders.session import HostSession
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol.messages import ComputeRow
from tests.expert_cases import local_topology, make_batch, make_checkpoint, tiny_spec
from tests.fault.conftest import FAR, freeze, is_gone, kill, pids, state_of, states, wait_until

SOON_S = 90.0
# A worker that goes wrong in one of so many rows is out within this many audited rows of it.
ONE_IN, WITHIN = 100, 200


def start(spec: ModelSpec, *, replicas: int = 2, decorate: Any = None, **overrides: Any) -> ExpertRuntime:
    settings = {**FAR, "park_s": 90.0, "audit_cpu": "100%", "restart_backoff_ms": [1, 10], **overrides}
    return ExpertRuntime.start(local_topology(replicas=replicas), model=spec, _channel_decorator=decorate, **settings)


def call(runtime: ExpertRuntime, num_tokens: int = 7) -> np.ndarray[Any, Any]:
    return np.asarray(runtime.experts(0, *make_batch(num_tokens)))


def audit(runtime: ExpertRuntime, name: str) -> dict[str, Any]:
    found: dict[str, Any] = runtime.stats()["audit"]["workers"][name]
    return found


def right_answer(spec: ModelSpec, num_tokens: int = 7) -> np.ndarray[Any, Any]:
    with start(spec, replicas=1, audit_cpu="off") as runtime:
        return call(runtime, num_tokens)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_worker_that_drifts_is_out_and_a_second_time_for_good(spec: ModelSpec, seed: int) -> None:
    right = right_answer(spec)

    def decorate(name: str, channel: _core.Channel) -> _core.Channel:
        return _core.make_drifting(channel, one_in=ONE_IN, seed=seed) if name == "w1" else channel

    with start(spec, decorate=decorate) as runtime:

        def is_out() -> bool:
            call(runtime)
            return states(runtime)["w1"] == "quarantined"

        assert wait_until(is_out, SOON_S), runtime.stats()["audit"]
        told = audit(runtime, "w1")
        # It was started again after the first time, which had to be shown once more.
        assert told["mismatches"] == 2
        assert told["audited_rows"] <= 2 * WITHIN
        reason = state_of(runtime, "w1").reason
        assert re.search(r"outvoted: layer 0 .*shard \d: 1 of 96 values of a row for experts", reason)
        assert audit(runtime, "w0")["mismatches"] == 0
        assert states(runtime)["w0"] == "ready"
        for _ in range(20):
            assert np.array_equal(call(runtime), right)
        runtime.release("w1")
        assert wait_until(lambda: states(runtime)["w1"] in ("ready", "quarantined"), SOON_S)


def test_a_healthy_worker_is_never_taken_out(spec: ModelSpec) -> None:
    with start(spec) as runtime:

        def is_enough() -> bool:
            call(runtime, 64)
            return all(audit(runtime, name)["audited_rows"] >= 3 * WITHIN for name in ("w0", "w1"))

        assert wait_until(is_enough, SOON_S)
        told = runtime.stats()["audit"]
        assert (told["mismatches"], told["undecided"], told["host_wrong"], told["golden_mismatches"]) == (0, 0, 0, 0)
        # A row per layer and shard at each of two holders.
        assert told["golden_rows"] == 2 * 2 * 2
        assert all(one.state == "ready" and one.deaths == 0 for one in runtime.workers())
        assert all(audit(runtime, name)["last_good"] for name in ("w0", "w1"))


def test_a_healthy_worker_is_not_taken_out_because_the_hosts_files_have_changed(tmp_path: Path) -> None:
    spec = tiny_spec(make_checkpoint(tmp_path / "ours"))
    with start(spec) as runtime:
        right = call(runtime)
        with (tmp_path / "ours" / "model.safetensors").open("r+b") as file:
            header = 8 + int.from_bytes(file.read(8), "little")
            size = file.seek(0, os.SEEK_END)
            file.seek(header)
            file.write(b"\0" * (size - header))

        def is_told() -> bool:
            assert np.array_equal(call(runtime), right), "what workers have packed is what it was"
            told = runtime.stats()["audit"]
            reasons = [one["skipped"] for one in told["workers"].values()]
            return told["undecided"] > 0 and any("files of the checkpoint have changed" in reason for reason in reasons)

        assert wait_until(is_told, SOON_S)
        assert all(one.state == "ready" and one.deaths == 0 for one in runtime.workers())


def keep_calling(runtime: ExpertRuntime, name: str, more_than: int) -> bool:
    """Calls until more rows than that of a worker were audited; returns whether they were."""

    def is_enough() -> bool:
        for _ in range(50):
            call(runtime)
        return bool(audit(runtime, name)["audited_rows"] > more_than)

    return wait_until(is_enough, SOON_S)


def test_the_audit_goes_on_after_a_worker_that_owed_an_answer_died(spec: ModelSpec) -> None:
    with start(spec, replicas=1) as runtime:
        call(runtime)
        pid = pids(runtime)["w0"]

        def num_sent() -> int:
            return int(runtime.stats()["workers"]["w0"]["calls"])

        freeze(pid)
        before = num_sent()
        with ThreadPoolExecutor(1) as pool:
            owed = pool.submit(call, runtime)
            is_sent = wait_until(lambda: num_sent() > before, SOON_S)
            os.kill(pid, signal.SIGKILL)
            owed.result(SOON_S)
        assert is_sent
        # The first burst has this many rows at most, and one of its replies never comes.
        assert keep_calling(runtime, "w0", 7 * BURST_EXCHANGES), runtime.stats()["audit"]


def test_a_reply_that_is_no_frame_ends_the_audit_of_nobody(spec: ModelSpec) -> None:
    broken: list[str] = []

    def decorate(name: str, channel: _core.Channel) -> _core.Channel:
        if name != "w0" or broken:
            return channel
        broken.append(name)
        return _core.make_faulty(channel, kind="truncate", point="poll", nth=3)

    with start(spec, decorate=decorate) as runtime:
        # Until the third reply there are a few dozen rows.
        for name in ("w0", "w1"):
            assert keep_calling(runtime, name, 3 * WITHIN), runtime.stats()["audit"]
        assert runtime.stats()["audit"]["failure"] == ""
        assert runtime.stats()["audit"]["mismatches"] == 0


def flip_golden(monkeypatch: pytest.MonkeyPatch, *, worker: str) -> None:
    """The worker's arithmetic is wrong from now on, in one bit of one value."""
    honest = HostSession.compute_row

    def wrong(self: HostSession, question: ComputeRow, *, timeout_s: float) -> bytes | None:
        reply = honest(self, question, timeout_s=timeout_s)
        if reply is None or self.name != worker:
            return reply
        return reply[:8] + bytes([reply[8] ^ 4]) + reply[9:]

    monkeypatch.setattr(HostSession, "compute_row", wrong)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_worker_with_a_wrong_golden_row_does_not_join(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    flip_golden(monkeypatch, worker="w1")
    with pytest.raises(
        WorkerUnfit, match=r"worker w1: layer \d .*shard \d: 1 of 96 values .*at column 2: 0x.* as this host"
    ) as caught:
        start(spec, replicas=replicas)
    assert caught.value.worker == "w1"
    assert caught.value.code == "worker_unfit"


def test_a_worker_that_comes_back_with_a_wrong_golden_row_is_left_alone(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = right_answer(spec)
    with start(spec) as runtime:
        flip_golden(monkeypatch, worker="w1")
        kill(runtime, "w1")
        assert wait_until(lambda: states(runtime)["w1"] == "quarantined", SOON_S)
        assert "as this host computes it" in state_of(runtime, "w1").reason
        assert "layer 0" in state_of(runtime, "w1").reason
        assert np.array_equal(call(runtime), right)
        monkeypatch.undo()
        runtime.release("w1")
        assert wait_until(lambda: states(runtime)["w1"] == "ready", SOON_S)


def flip_in_memory(pid: int, pattern: bytes) -> None:
    """Flips a bit of the first bytes in private memory of a process that are `pattern`."""
    regions = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for region in regions:
            if len(region) > 5 or not region[1].startswith("rw"):
                continue
            begin, end = (int(part, 16) for part in region[0].split("-"))
            memory.seek(begin)
            at = memory.read(end - begin).find(pattern)
            if at >= 0:
                memory.seek(begin + at)
                memory.write(bytes([pattern[0] ^ 1]))
                return
    raise AssertionError(f"process {pid} does not hold these weights")


def test_weights_that_change_in_memory_are_found_and_loaded_again(spec: ModelSpec) -> None:
    right = right_answer(spec)
    checkpoint = Checkpoint.open(Path(spec.path))
    with start(spec, replicas=1, audit_cpu="off", scrub_s=0.05) as runtime:
        shard = runtime.placement.layers[0][1]
        assert shard.holder == "w1"
        tensor = checkpoint.tensors[spec.layers[0].ffn.up_tensor.tensor_name(shard.experts[0])]
        stored = checkpoint.mapped_file(tensor.file).read(tensor.offset, 4 * 64 * 96)
        # The first input of the first outputs, which a panel has side by side.
        pattern = np.frombuffer(stored, np.float32).reshape(64, 96)[:8, 0].tobytes()
        pid = pids(runtime)["w1"]
        flip_in_memory(pid, pattern)
        assert wait_until(lambda: runtime.stats()["audit"]["weights_changed"] == 1, SOON_S)
        assert np.array_equal(call(runtime), right)
        counters = runtime.worker_stats()["w1"]
        assert (counters["scrub_damages"], counters["scrub_reloads"]) == (1, 1)
        assert counters["scrubbed_bytes"] > 0
        assert states(runtime)["w1"] == "ready"
        assert not is_gone(pid)
        # A second time within a day is no accident.
        flip_in_memory(pid, pattern)
        assert wait_until(lambda: states(runtime)["w1"] == "quarantined", SOON_S)
        assert "for the second time within a day" in state_of(runtime, "w1").reason
