"""`step` measures what the exchange adds to each layer of a decode step on a card, beside
calls that are staged through the host.

The steps are synthetic: the expert calls of all layers follow each other with nothing between them.
What the worker itself computes, by its own counter, is taken off, and the rest divided by the
number of layers is the exchange. The experts lie in the process of a CPU worker, in a worker on the
same card in this process, and in one on the same card in another process.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.lab.step_cases import PATHS, QUEUED, STAGED, StepCase, StepScene, same_results
from dflash_moe.bench.expert_batch import ExpertShape
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.results import BenchResult
from dflash_moe.errors import ConfigError, DflashError, UnsupportedError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.testing.tiny import tiny_checkpoint
from dflash_moe.topology import Topology

if TYPE_CHECKING:
    from dflash_moe.model.spec import ModelSpec

# Rows and routing are those of Qwen3-30B-A3B. The experts are fewer and narrower (not 128 of width
# 768), so that 48 layers fit and compute little.
CARD_SHAPE = ExpertShape(hidden_size=2048, moe_intermediate_size=32, num_experts=16, top_k=8)
SIM_SHAPE = ExpertShape(hidden_size=64, moe_intermediate_size=32, num_experts=16, top_k=8)
# A step that hangs costs this time, and is a row that says so.
CALL_TIMEOUT_S = 5.0
REDUCED = "hidden size and top-k of Qwen3-30B-A3B; experts fewer and narrower than its 128 of 768"

# For each place where the experts are: what stands in the topology, and the most microseconds that
# a layer may take beyond compute.
WORKERS = {
    "cpu process": ("{name: w0, backend: cpu%s}", 8.0),
    "card, this process": ("{name: w0, backend: %s, address: loopback}", 15.0),
    "card, another process": ("{name: w0, backend: %s}", 15.0),
}


@dataclass(frozen=True, slots=True)
class StepParams:
    """What is measured. A `shape` of None and 0 as `num_layers` mean those of the backend."""

    backend: str
    device: int = 0
    shape: ExpertShape | None = None
    num_layers: int = 0
    tokens: tuple[int, ...] = (1, 8)
    workers: tuple[str, ...] = tuple(WORKERS)
    repeat: int = 5
    # One case measures for so long in one round.
    sample_s: float = 0.25
    seed: int = 0

    @property
    def is_simulated(self) -> bool:
        """True where no card is used, so that no time means anything."""
        return self.backend == "sim"

    def resolved(self) -> StepParams:
        """Returns the parameters with the shape and layers of the backend filled in."""
        shape = self.shape or (SIM_SHAPE if self.is_simulated else CARD_SHAPE)
        return dataclasses.replace(self, shape=shape, num_layers=self.num_layers or (4 if self.is_simulated else 48))


def run_device_steps(params: StepParams, *, recorder: Recorder | None = None) -> BenchResult:
    """Measures a row for each worker, number of tokens and path. A row that fails says why in
    `error`, and the others go on.

    The file is saved after every round. Errors: ConfigError, and UnsupportedError where torch does
    not drive the card.
    """
    recorder, params = recorder or Recorder(), params.resolved()
    for worker in params.workers:
        if worker not in WORKERS:
            raise ConfigError(f"worker {worker!r} cannot be measured; choose from {', '.join(WORKERS)}")
    dtype = _dtype(params)
    result = recorder.begin("step", _describe(params, dtype))
    with recorder.recording(), tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder:
        spec = _checkpoint(params, dtype, Path(folder))
        for worker in params.workers:
            try:
                _measure_worker(params, spec, worker, recorder)
            except DflashError as error:
                result.rows.append({"name": worker, "worker": worker, "error": str(error)})
                recorder.save()
    return result


def _dtype(params: StepParams) -> str:
    """Returns the dtype of model and wire: bf16 with torch, and f32 for NumPy arrays on a simulated
    card.
    """
    try:
        import torch
    except ImportError:
        if params.is_simulated:
            return "f32"
        raise UnsupportedError("step: torch is not installed; the tensors of a step on a card are its") from None
    if not params.is_simulated and (not torch.cuda.is_available() or torch.cuda.device_count() <= params.device):
        raise UnsupportedError(f"step: torch drives no device {params.device}; the tensors of a step on a card are its")
    return "bf16"


def _describe(params: StepParams, dtype: str) -> dict[str, Any]:
    return dataclasses.asdict(params) | {
        "dtype": dtype, "reduced": REDUCED, "timed": "samples_s: a step; added_*: that minus compute, by layer",
    }  # fmt: skip


def _checkpoint(params: StepParams, dtype: str, folder: Path) -> ModelSpec:
    shape = params.shape or CARD_SHAPE
    return tiny_checkpoint(
        folder, hidden_size=shape.hidden_size, moe_intermediate_size=shape.moe_intermediate_size, num_experts=shape.num_experts,
        top_k=shape.top_k, num_layers=params.num_layers, dtype=dtype, seed=params.seed,
    )  # fmt: skip


def topology_of(params: StepParams, worker: str) -> Topology:
    """Returns the topology of a host on the card with one worker that has all experts."""
    card = f"{params.backend}, simulate: cuda" if params.is_simulated else f"{params.backend}, device: {params.device}"
    asked = (", threads: 1" if params.is_simulated else "") if worker == "cpu process" else card
    host = "'sim:0', simulate: cuda" if params.is_simulated else f"'{params.backend}:{params.device}'"
    return Topology.parse(f"version: 1\nhost: {{device: {host}}}\nworkers: [{WORKERS[worker][0] % asked}]\n")


def _measure_worker(params: StepParams, spec: ModelSpec, worker: str, recorder: Recorder) -> None:
    mark_us = None if params.is_simulated else WORKERS[worker][1]
    topology = topology_of(params, worker)
    with ExpertRuntime.start(topology, model=spec, mode="batched", call_timeout_s=CALL_TIMEOUT_S) as runtime:
        cases: list[StepCase] = []
        for tokens in params.tokens:
            scene = StepScene.create(runtime, tokens, seed=params.seed)
            same_bits, trouble = _same_bits(scene)
            facts = {"worker": worker, "same_bits": same_bits, "mark_us": mark_us} | _device_facts(params, scene)
            for path in PATHS:
                if path != QUEUED or scene.has_events:
                    cases.append(StepCase(scene, path, facts, params.sample_s, error="" if path == STAGED else trouble))
        run_rounds(recorder, cases, rounds=params.repeat)


def _same_bits(scene: StepScene) -> tuple[bool | None, str]:
    """Says whether a step gives the bits of staged calls, or why there is no step. This also brings
    all kernels to the card.
    """
    try:
        return same_results(scene), ""
    except (DflashError, RuntimeError) as error:
        # Errors that torch reports of a card are RuntimeErrors.
        return None, str(error)


def _device_facts(params: StepParams, scene: StepScene) -> dict[str, Any]:
    shape = params.shape or CARD_SHAPE
    return {
        "device": f"{params.backend}:{params.device}", "tokens": scene.tokens, "layers": params.num_layers,
        "hidden_size": shape.hidden_size, "moe_intermediate_size": shape.moe_intermediate_size,
        "num_experts": shape.num_experts, "top_k": shape.top_k,
    }  # fmt: skip
