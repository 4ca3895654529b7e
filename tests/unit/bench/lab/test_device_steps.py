"""`bench.lab step` on the simulated card: every worker and path has its figures, and what fails is
a row and not an end.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from bench.lab.device_steps import WORKERS, StepParams, run_device_steps, topology_of
from bench.lab.step_cases import HOLD_CYCLES, QUEUED, STAGED, STEP, StepCase, StepScene
from dflash_moe.bench.expert_batch import ExpertShape
from dflash_moe.bench.harness import Recorder
from dflash_moe.errors import ConfigError, DflashError, UnsupportedError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.testing.tiny import tiny_checkpoint

SHAPE = ExpertShape(hidden_size=64, moe_intermediate_size=16, num_experts=4, top_k=2)
QUICK = StepParams("sim", shape=SHAPE, num_layers=2, tokens=(1,), repeat=1, sample_s=1e-6)


def test_every_worker_and_path_has_a_row_whose_step_gives_the_bits_of_staged_calls(tmp_path):
    result = run_device_steps(QUICK, recorder=Recorder(tmp_path / "out.json"))
    expected = [(worker, path) for worker in WORKERS for path in (STAGED, STEP)]
    assert [(row["worker"], row["path"]) for row in result.rows] == expected
    for row in result.rows:
        assert row["same_bits"] is True
        assert "error" not in row
        assert (row["tokens"], row["layers"], row["moe_intermediate_size"], row["mark_us"]) == (1, 2, 16, None)
        assert len(row["samples_s"]) == 1
        assert row["compute_us"] > 0
        assert row["layer_us"] == pytest.approx(1e6 * row["median_s"] / 2)
        assert row["added_p50_us"] == pytest.approx(row["layer_us"] - row["compute_us"])
        assert (row["queue_us"] > 0) == (row["path"] == STEP)
    stored = json.loads((tmp_path / "out.json").read_text())
    assert stored["complete"]
    assert "fewer and narrower" in stored["params"]["reduced"]


def test_a_path_that_fails_is_a_row_with_the_reason_and_the_others_are_measured(monkeypatch):
    def refuse(*_: object) -> object:
        raise UnsupportedError("registering memory failed: not supported")

    monkeypatch.setattr("dflash_moe.experts.device_step.DeviceSteps.open", refuse)
    rows = run_device_steps(StepParams(**{**params(), "workers": ("cpu process",)})).rows
    assert [row["path"] for row in rows] == [STAGED, STEP]
    assert rows[0]["added_p50_us"] is not None
    assert rows[0]["same_bits"] is None
    assert rows[1]["error"] == "registering memory failed: not supported"
    assert "samples_s" not in rows[1]


def test_a_worker_that_does_not_start_is_a_row_and_the_next_one_is_measured(monkeypatch):
    real = topology_of

    def choosy(params: StepParams, worker: str) -> object:
        if worker == "cpu process":
            raise DflashError("it does not start")
        return real(params, worker)

    monkeypatch.setattr("bench.lab.device_steps.topology_of", choosy)
    rows = run_device_steps(StepParams(**{**params(), "workers": ("cpu process", "card, this process")})).rows
    assert rows[0] == {"name": "cpu process", "worker": "cpu process", "error": "it does not start"}
    assert [row["worker"] for row in rows[1:]] == ["card, this process"] * 2


def test_topologies_name_the_card_for_host_and_worker():
    found = topology_of(StepParams("cuda", 3), "card, another process")
    assert (found.host.device, found.workers[0].backend, found.workers[0].device) == ("cuda:3", "cuda", 3)
    near = topology_of(StepParams("hip", 1), "card, this process").workers[0]
    assert (near.backend, near.device, str(near.parsed_address)) == ("hip", 1, "loopback")
    assert topology_of(StepParams("cuda"), "cpu process").workers[0].backend == "cpu"


def test_an_unknown_worker_and_a_card_that_torch_does_not_drive_are_refused():
    with pytest.raises(ConfigError, match="worker 'moon' cannot be measured; choose from cpu process, card, this process"):
        run_device_steps(StepParams("sim", workers=("moon",)))
    with pytest.raises(UnsupportedError, match="the tensors of a step on a card are its"):
        run_device_steps(StepParams("cuda", 77))


def params() -> dict[str, object]:
    return {name: getattr(QUICK, name) for name in ("backend", "shape", "num_layers", "tokens", "repeat", "sample_s")}


class Clock:
    """Stands in the place of torch.cuda: events take the processor's time, `is_slow` ones passed
    before the host had queued.
    """

    def __init__(self, *, is_slow: bool) -> None:
        self.is_slow = is_slow
        self.slept = 0

    def Event(self, *, enable_timing: bool) -> Clock.Moment:
        assert enable_timing
        return Clock.Moment(self)

    def _sleep(self, cycles: int) -> None:
        self.slept += cycles

    def synchronize(self) -> None:
        pass

    class Moment:
        def __init__(self, clock: Clock) -> None:
            self.clock, self.at = clock, 0.0

        def record(self) -> None:
            self.at = time.perf_counter()

        def query(self) -> bool:
            return self.clock.is_slow

        def synchronize(self) -> None:
            assert self.at

        def elapsed_time(self, end: Clock.Moment) -> float:
            return 1e3 * (end.at - self.at)


class OnCard(StepScene):
    """A simulated card that can be kept busy and takes the time."""

    has_events = True


@pytest.mark.parametrize("is_slow", [False, True])
def test_of_steps_that_are_queued_before_only_those_count_that_the_host_queued_in_time(tmp_path, is_slow):
    spec = tiny_checkpoint(tmp_path, num_layers=2)
    clock = Clock(is_slow=is_slow)
    with ExpertRuntime.start(topology_of(QUICK, "cpu process"), model=spec) as runtime:
        made = StepScene.create(runtime, 1, seed=0)
        scene = OnCard(runtime, 1, made.tensors, SimpleNamespace(cuda=clock))
        case = StepCase(scene, QUEUED, {"worker": "w"}, sample_s=1e-6)
        case.measure(keep=True)
    row = case.row()
    assert row is not None
    assert clock.slept == 2 * HOLD_CYCLES, "the step that finds how many, and the one that is kept"
    if is_slow:
        assert row["error"] == "the host did not queue a step's calls while the card was kept busy"
        assert "samples_s" not in row
    else:
        assert row["layer_us"] > 0
        assert row["queue_us"] > 0
        assert "error" not in row
