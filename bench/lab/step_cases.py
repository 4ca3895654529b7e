"""The steps of `step`: the same calls staged through the host, as a device step, and as one
queued before it began.

The last is what a captured graph would give: the host's time to queue is hidden behind other work
of the card, and the card's own events take the time.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_moe.bench.results import percentile, timing_fields
from dflash_moe.errors import DflashError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.testing.tiny import routed_batch

STAGED, STEP, QUEUED = "staged calls", "device step", "device step, queued before"
PATHS = (STAGED, STEP, QUEUED)
# One case takes at most so many steps in one round.
MAX_STEPS = 50
# The card is held for so many of its cycles, some 10 ms, in which the host queues 48 calls several
# times over.
HOLD_CYCLES = 20_000_000


@dataclass(frozen=True, slots=True)
class StepScene:
    """One batch for one runtime, on the device where the tensors of the runtime lie."""

    runtime: ExpertRuntime
    tokens: int
    # The three are hidden_states, topk_ids and topk_weights.
    tensors: tuple[Any, Any, Any]
    # On a simulated card this is None, and the tensors are NumPy arrays.
    torch: Any

    @classmethod
    def create(cls, runtime: ExpertRuntime, tokens: int, *, seed: int) -> StepScene:
        """Makes random rows and routing. All layers get the same, because the results of random
        experts vanish when they pass through one layer after the other.
        """
        layer = runtime.layers[0]
        arrays = routed_batch(tokens, layer.ffn.in_size, layer.num_experts, layer.top_k, seed=seed)
        if runtime.spec.dtype == "f32":
            return cls(runtime, tokens, arrays, None)
        import torch

        hidden, ids, weights = (torch.from_numpy(array).to(runtime.tensor_device) for array in arrays)
        return cls(runtime, tokens, (hidden.to(torch.bfloat16), ids, weights), torch)

    @property
    def has_events(self) -> bool:
        """True on a card that torch drives. Such a card can be kept busy, and its events take the
        time.
        """
        return self.torch is not None and bool(self.tensors[0].is_cuda)

    def calls(self) -> list[Any]:
        """Makes the call of every layer, in a step or not, and returns the results."""
        return [self.runtime.experts(layer.index, *self.tensors) for layer in self.runtime.layers]

    def settle(self) -> None:
        """Waits for what torch has queued."""
        if self.has_events:
            self.torch.cuda.synchronize()

    def compute_ns(self) -> int:
        """Returns the nanoseconds that all workers have computed since their start."""
        return sum(stats["compute_ns"] for stats in self.runtime.worker_stats().values())


def same_results(scene: StepScene) -> bool:
    """Says whether a step gives the bits of staged calls."""
    staged = [_bits(scene, result) for result in scene.calls()]
    with scene.runtime.device_step():
        found = scene.calls()
    return [_bits(scene, result) for result in found] == staged


def _bits(scene: StepScene, result: Any) -> bytes:
    if scene.torch is None:
        return bytes(np.asarray(result).tobytes())
    return bytes(result.cpu().view(scene.torch.uint8).numpy().tobytes())


@dataclass(frozen=True, slots=True)
class StepSample:
    """The seconds of one step: all of it, the compute of the worker, the queueing of the host, and
    entering the block.
    """

    whole_s: float
    compute_s: float
    queue_s: float = 0.0
    open_s: float = 0.0
    # On path QUEUED the host must have queued everything before the card began.
    is_ahead: bool = True


@dataclass(slots=True)
class StepCase:
    """One path: a `harness.Case`. A failure, also one that is known before, ends it and becomes the
    `error` of its row.
    """

    scene: StepScene
    path: str
    facts: dict[str, Any]
    sample_s: float
    samples: list[StepSample] = field(default_factory=list)
    rounds: int | None = None
    steps: int = 0
    error: str = ""

    @property
    def label(self) -> str:
        """The name of the case in reports of progress."""
        return f"{self.facts['worker']}, {self.path}, {self.scene.tokens} tokens"

    def measure(self, *, keep: bool) -> None:
        """Measures one round. The first round, which is not kept, also finds how many steps a
        measurement takes.
        """
        if self.error:
            return
        try:
            if not self.steps:
                self.steps = max(1, min(MAX_STEPS, round(self.sample_s / max(1e-6, self._step().whole_s))))
            samples = [self._step() for _ in range(self.steps)]
        except (DflashError, RuntimeError) as error:
            # Errors that torch reports of a card are RuntimeErrors.
            self.error = str(error)
            return
        if keep:
            self.samples += samples

    def _step(self) -> StepSample:
        scene = self.scene
        scene.settle()
        before = scene.compute_ns()
        sample = {STAGED: _staged, STEP: _stepped, QUEUED: _queued}[self.path](scene)
        compute_s = (scene.compute_ns() - before) / 1e9
        return StepSample(sample.whole_s, compute_s, sample.queue_s, sample.open_s, sample.is_ahead)

    def row(self) -> dict[str, Any] | None:
        """Returns the result row in microseconds for each layer. On path QUEUED only steps count
        whose calls were all queued in time.
        """
        row = self.facts | {"name": f"{self.facts['worker']}, {self.path}, {self.scene.tokens}", "path": self.path}
        if self.error:
            row |= {"error": self.error}
        samples = [sample for sample in self.samples if sample.is_ahead]
        if not samples:
            if self.samples and not self.error:
                row |= {"error": "the host did not queue a step's calls while the card was kept busy"}
            return row if "error" in row else None
        layers = len(self.scene.runtime.layers)

        def by_layer(seconds: list[float]) -> list[float]:
            return [1e6 * one / layers for one in seconds]

        added = by_layer([sample.whole_s - sample.compute_s for sample in samples])
        row |= {
            "layer_us": statistics.median(by_layer([sample.whole_s for sample in samples])),
            "compute_us": statistics.median(by_layer([sample.compute_s for sample in samples])),
            "queue_us": statistics.median(by_layer([sample.queue_s for sample in samples])),
            "open_us": statistics.median(1e6 * sample.open_s for sample in samples),
            "added_p50_us": statistics.median(added), "added_p99_us": percentile(added, 0.99), "added_min_us": min(added),
        }  # fmt: skip
        return row | timing_fields([sample.whole_s for sample in samples], per_round=self.steps)


def _staged(scene: StepScene) -> StepSample:
    began = time.perf_counter()
    scene.calls()
    scene.settle()
    return StepSample(time.perf_counter() - began, 0.0)


def _stepped(scene: StepScene) -> StepSample:
    """Measures a step from the open block to having left it. Opening it stands apart."""
    entering = time.perf_counter()
    with scene.runtime.device_step():
        began = time.perf_counter()
        results = scene.calls()
        queued = time.perf_counter()
    ended = time.perf_counter()
    # The results are freed here, and not while the time ran.
    del results
    return StepSample(ended - began, 0.0, queued - began, began - entering)


def _queued(scene: StepScene) -> StepSample:
    """Measures a step that the host queues while the card is busy. The card takes the time of what
    was queued.
    """
    cuda = scene.torch.cuda
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    entering = time.perf_counter()
    with scene.runtime.device_step():
        began = time.perf_counter()
        cuda._sleep(HOLD_CYCLES)
        begin.record()
        results = scene.calls()
        end.record()
        is_ahead = not begin.query()
        queued = time.perf_counter()
    end.synchronize()
    del results
    return StepSample(float(begin.elapsed_time(end)) / 1e3, 0.0, queued - began, began - entering, is_ahead)
