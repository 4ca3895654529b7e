"""Device steps of a simulated card whose workers die, hang or drain: steps ask only whom they need,
end early, and are replayed by plain calls with the same bits.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_moe import ConfigError, ExpertRuntime, Topology, WorkerError, WorkerLost
from dflash_moe.model.spec import ModelSpec
from dflash_moe.testing.tiny import routed_batch, tiny_checkpoint
from tests.fault.conftest import freeze, kill, pids, states, wait_until

ROOT = Path(__file__).resolve().parents[2]
LAYERS, HIDDEN, EXPERTS, TOP_K = 2, 64, 8, 3
TOPOLOGY = """
version: 1
host: {device: %s}
placement: {policy: even, replicas: %d}
workers:
  - {name: w0, backend: cpu, threads: 1%s}
  - {name: w1, backend: cpu, threads: 1%s}
"""
CARD = "'sim:0', simulate: cuda"
# Limits that nothing here waits for: what goes on before them went on for another reason. Nor is a
# worker suspected that a busy machine only holds up: steps would be replayed for it.
FAR: dict[str, Any] = {"stall_timeout_s": 90.0, "call_timeout_s": 90.0, "park_s": 90.0, "suspect_ms": 60_000.0}


@pytest.fixture(scope="module")
def steps_spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    directory = tmp_path_factory.mktemp("steps")
    return tiny_checkpoint(directory, hidden_size=HIDDEN, num_experts=EXPERTS, top_k=TOP_K, num_layers=LAYERS)


def start(spec: ModelSpec, replicas: int = 2, device: str = CARD, address: str = "", **options: Any) -> ExpertRuntime:
    topology = Topology.parse(TOPOLOGY % (device, replicas, address, address))
    return ExpertRuntime.start(topology, model=spec, **{**FAR, **options})


class Loop:
    """A model's loop: each layer reads the former one's result, and the number of tokens so far is
    what a failed step must take back.
    """

    def __init__(self, runtime: ExpertRuntime) -> None:
        self.runtime = runtime
        self.num_tokens = 0
        self.num_calls = 0
        # Called before the call of a step with this number.
        self.fault: tuple[int, Any] | None = None

    def forward(self) -> bytes:
        self.num_tokens += 1
        hidden, ids, weights = routed_batch(4, HIDDEN, EXPERTS, TOP_K, seed=self.num_tokens)
        found = []
        for layer in range(LAYERS):
            if self.fault is not None and self.fault[0] == layer:
                strike, self.fault = self.fault[1], None
                strike()
            self.num_calls += 1
            hidden = self.runtime.experts(layer, hidden, ids, weights)
            found.append(np.asarray(hidden).tobytes())
        return b"".join(found)

    def undo(self) -> None:
        self.num_tokens -= 1

    def step(self) -> bytes:
        return self.runtime.run_step(self.forward, undo=self.undo)


def expected(spec: ModelSpec, count: int) -> list[bytes]:
    """The bits of `count` steps by a host without a card."""
    with start(spec, 1, "cpu") as runtime:
        loop = Loop(runtime)
        return [loop.step() for _ in range(count)]


def counts(runtime: ExpertRuntime) -> tuple[int, int, int]:
    found = runtime.stats()["device_steps"]
    return found["steps"], found["replays"], found["plain"]


def leased(runtime: ExpertRuntime) -> set[str]:
    return {report["name"] for report in runtime._client.workers() if report["path"] == "leased"}


def test_a_step_whose_worker_is_killed_is_replayed_and_the_next_is_the_devices_again(steps_spec: ModelSpec) -> None:
    right = expected(steps_spec, 4)
    with start(steps_spec, restart=False) as runtime:
        loop = Loop(runtime)
        assert loop.step() == right[0]
        assert counts(runtime) == (1, 0, 0)
        loop.fault = (1, lambda: kill(runtime, "w1"))
        assert loop.step() == right[1], "replayed by the other holder"
        assert counts(runtime) == (2, 1, 0)
        assert loop.num_tokens == 2, "what the failed step did was undone"
        assert [loop.step(), loop.step()] == right[2:]
        assert counts(runtime) == (4, 1, 0), "a lost worker that nobody asks refuses no step"
        with runtime.device_step():
            assert leased(runtime) == {"w0"}


def test_a_worker_that_is_back_is_asked_by_the_next_step(steps_spec: ModelSpec) -> None:
    right = expected(steps_spec, 3)
    with start(steps_spec) as runtime:
        loop = Loop(runtime)
        loop.fault = (0, lambda: kill(runtime, "w1"))
        assert loop.step() == right[0]
        assert wait_until(lambda: states(runtime)["w1"] == "ready", 60.0)
        assert loop.step() == right[1]
        with runtime.device_step():
            assert leased(runtime) == {"w0", "w1"}
        kill(runtime, "w0")
        assert loop.step() == right[2], "its shards are at w1 now"


def test_a_stopped_worker_ends_the_step_long_before_it_counts_as_lost(steps_spec: ModelSpec) -> None:
    right = expected(steps_spec, 2)
    with start(steps_spec, suspect_ms=300.0) as runtime:
        loop = Loop(runtime)
        frozen = pids(runtime)["w1"]
        loop.fault = (0, lambda: freeze(frozen))
        try:
            assert loop.step() == right[0]
        finally:
            os.kill(frozen, signal.SIGCONT)
        assert counts(runtime)[1] == 1
        assert {one.deaths for one in runtime.workers()} == {0}
        assert loop.step() == right[1]


def test_a_lost_worker_that_the_step_does_not_ask_changes_nothing(steps_spec: ModelSpec) -> None:
    right = expected(steps_spec, 3)
    with start(steps_spec, restart=False) as runtime:
        loop = Loop(runtime)
        index = runtime._fleet.members["w1"].client_index
        runtime._client.set_draining(index, True)
        assert loop.step() == right[0]
        with runtime.device_step():
            assert leased(runtime) == {"w0"}, "one that drains is not asked"
        loop.fault = (1, lambda: kill(runtime, "w1"))
        assert [loop.step(), loop.step()] == right[1:]
        assert counts(runtime) == (3, 0, 0)


def test_the_only_holder_is_waited_for_where_somebody_brings_it_back(steps_spec: ModelSpec) -> None:
    right = expected(steps_spec, 3)
    with start(steps_spec, 1) as runtime:
        loop = Loop(runtime)
        for number in (0, 1):
            loop.fault = (number, lambda: kill(runtime, "w0"))
            assert loop.step() == right[number]
        assert loop.step() == right[2]
        assert counts(runtime)[1] == 2


def test_without_a_holder_the_error_is_typed_and_names_the_worker(steps_spec: ModelSpec) -> None:
    with start(steps_spec, 1, restart=False) as runtime:
        loop = Loop(runtime)
        loop.fault = (1, lambda: kill(runtime, "w0"))
        with pytest.raises(WorkerLost, match="worker w0 was lost"):
            loop.step()
        with pytest.raises(WorkerLost, match="worker w0 was lost"):
            loop.step()
        assert counts(runtime) == (1, 1, 1), "no step begins without a holder"


def test_numbers_of_the_caller_and_errors_of_the_work_are_not_replayed(steps_spec: ModelSpec) -> None:
    with start(steps_spec, dtype="f16") as runtime:
        hidden, ids, weights = routed_batch(2, HIDDEN, EXPERTS, TOP_K, seed=1)
        hidden[1, 3] = 1e6
        calls = []

        def too_large() -> None:
            calls.append(1)
            runtime.experts(0, hidden, ids, weights)

        with pytest.raises(WorkerError, match="token 1: a finite hidden state"):
            runtime.run_step(too_large)
        with pytest.raises(ZeroDivisionError):
            runtime.run_step(lambda: 1 / 0)
        with pytest.raises(ConfigError, match="a step is open already"):
            runtime.run_step(lambda: runtime.run_step(too_large))
        assert len(calls) == 1
        assert counts(runtime) == (3, 0, 0)
        assert len(Loop(runtime).step()) == 4 * LAYERS * 4 * HIDDEN


@pytest.mark.transformers
def test_a_models_tokens_stay_the_same_through_a_replay(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers import DynamicCache

    from bench.models.families import tiny_options
    from dflash_moe.integrations.transformers import load_model
    from dflash_moe.model.make import make_checkpoint

    make_checkpoint(tiny_options("qwen3_moe", "f32"), tmp_path)
    topology = Topology.parse(TOPOLOGY % (CARD, 2, "", ""))
    with ExpertRuntime.start(topology, model=tmp_path, **FAR) as runtime:
        model = load_model(tmp_path, runtime)

        def crop(cache: Any, length: int) -> None:
            for layer in cache.layers:  # a step may end between two layers
                layer.crop(length - layer.get_seq_length())

        def generate() -> list[bytes]:
            cache, found = DynamicCache(config=model.config), []
            token = torch.arange(80).reshape(8, 10)
            with torch.inference_mode():
                logits = model(input_ids=token, past_key_values=cache).logits
                for _ in range(4):
                    token, length = logits[:, -1:].argmax(-1), cache.get_seq_length()
                    forward = functools.partial(model, input_ids=token, past_key_values=cache)
                    logits = runtime.run_step(forward, undo=functools.partial(crop, cache, length)).logits
                    assert cache.get_seq_length() == length + 1
                    found.append(logits.numpy().tobytes())
            return found

        right = generate()
        layers_done: list[None] = []

        def strike(*_arguments: Any) -> None:
            layers_done.append(None)
            if len(layers_done) == 3:  # in the second step, behind the prompt and the first one
                kill(runtime, "w1")

        model.get_decoder().layers[0].register_forward_hook(strike)
        assert generate() == right
        assert counts(runtime)[1] == 1


def test_where_there_are_no_steps_the_work_makes_plain_calls(steps_spec: ModelSpec) -> None:
    right = expected(steps_spec, 2)
    with start(steps_spec, address=", address: unix") as runtime:
        loop = Loop(runtime)
        assert [loop.step(), loop.step()] == right
        assert counts(runtime) == (0, 0, 2)
        assert loop.num_calls == 2 * LAYERS
    with start(steps_spec, device="cpu") as runtime:
        assert "device_steps" not in runtime.stats()
        assert Loop(runtime).step() == right[0]


def test_an_interrupt_just_before_the_block_leaves_the_runtime_usable(
    steps_spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = expected(steps_spec, 2)
    with start(steps_spec) as runtime:
        loop = Loop(runtime)
        replay: Any = runtime._calls._replay
        real = replay._count

        def interrupted(name: str) -> None:
            monkeypatch.setattr(replay, "_count", real)
            raise KeyboardInterrupt

        monkeypatch.setattr(replay, "_count", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.step()
        assert leased(runtime) == set()
        assert [loop.step(), loop.step()] == right


def test_faults_at_random_moments_of_steps_cost_no_step_and_no_bit(tmp_path: Path) -> None:
    result = tmp_path / "faults.json"
    program = [sys.executable, "-m", "bench.campaigns.device_step_faults"]
    command = [*program, "--faults", "20", "--lone-faults", "2", "--json", str(result)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(result.read_text())["rows"]
    assert sum(row["faults"] for row in rows) == 22
    assert sum(row["replays"] for row in rows) > 0
