"""Counts the bytes of memory that one decoded token reads, apart for the host and each worker, and
says what part of the time of a token reading them takes.

The host reads dense weights as they are packed, the output layer among them, one row of each
embedding, and the keys and values of the context. Whoever holds a routed expert that the token
chose reads that expert.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_moe.bench.read_speed import ReadSpeed
from dflash_moe.config import resolve_settings
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.holders.threads import shares_pool, thread_plan
from dflash_moe.protocol.devices import PROCESSOR
from dflash_moe.topology import HOST, Topology

if TYPE_CHECKING:
    from dflash_moe.forward.host_model import HostModel


@dataclass(frozen=True, slots=True)
class Sides:
    """Who reads: which side a holder of experts belongs to, and the threads of each side, None
    where its memory is not that of this machine's processor.
    """

    of_holder: Mapping[str, str]
    threads: Mapping[str, int | None]

    @classmethod
    def of(cls, topology: Topology, overrides: Mapping[str, Any]) -> Sides:
        """Returns the sides of a runtime. Experts that the host's own threads compute are on its
        side.
        """
        plan = thread_plan(topology, resolve_settings(topology.stated_settings, **overrides))
        local = {worker.name for worker in topology.local_workers()}
        of_holder, threads = {HOST: HOST}, dict[str, int | None]({HOST: plan.host})
        for worker in topology.workers:
            if shares_pool(topology, worker):
                of_holder[worker.name] = HOST
                continue
            of_holder[worker.name] = worker.name
            is_here = worker.name in local and worker.backend == PROCESSOR
            threads[worker.name] = plan.workers.get(worker.name) if is_here else None
        return cls(of_holder, threads)


def count_reads(host: HostModel, runtime: ExpertRuntime, input_ids: Any, new_tokens: int, sides: Sides) -> dict[str, float]:
    """Decodes `new_tokens` greedily after `input_ids` [1, num_tokens] and returns the mean bytes
    that each side read for one of them. Nothing is timed: the tokens, and with them the experts,
    are those of `measure_once`.
    """
    import torch

    from dflash_moe.integrations.transformers import experts_watched
    from dflash_moe.operators.layers.reads import dense_bytes

    prompt = input_ids[0].tolist()
    total: Counter[str] = Counter({HOST: new_tokens * dense_bytes(host.model)})
    experts = ExpertWork(runtime, sides)
    with closing(host.sequence(len(prompt) + new_tokens)) as run:
        token_id = int(torch.argmax(run.forward(prompt)))
        for step in range(new_tokens):
            with experts_watched(host.model, experts.receive):
                token_id = int(torch.argmax(run.forward([token_id])))
            total[HOST] += _kv_bytes(host, run, len(prompt) + step + 1)
    return {side: (total[side] + experts.num_bytes[side]) / new_tokens for side in sides.threads}


class ExpertWork:
    """Counts what the routed experts of a runtime read and multiply, from the routing of calls:
    `num_bytes` of weights by side, and `multiply_adds` by side and numerics class.
    """

    def __init__(self, runtime: ExpertRuntime, sides: Sides) -> None:
        self._runtime, self._sides, self._padded = runtime, sides, _padding(runtime)
        self._places = {layer.index: at for at, layer in enumerate(runtime.spec.layers)}
        self.num_bytes: Counter[str] = Counter()
        self.multiply_adds: Counter[tuple[str, str]] = Counter()

    def receive(self, layer: int, topk_ids: Any) -> None:
        """Counts a call, whose experts are read once and multiplied with each of their rows."""
        placement, place = self._runtime.placement, self._places[layer]
        spec, chosen = self._runtime.spec.layers[place], Counter(topk_ids.flatten().tolist())
        ffn = spec.ffn
        weights = ((ffn.num_matrices - 1) * ffn.in_size + ffn.out_size) * ffn.intermediate_size
        for shard in placement.layers[place]:
            is_packed = placement.layout_of(shard.holder) == "packed"
            size = spec.resident_bytes(shard.weights) * self._padded[shard.holder] if is_packed else spec.expert_bytes
            side = self._sides.of_holder[shard.holder]
            rows = [chosen[expert] for expert in shard.experts if expert in chosen]
            self.num_bytes[side] += round(size * len(rows))
            self.multiply_adds[side, shard.numerics] += sum(rows) * weights


def _padding(runtime: ExpertRuntime) -> dict[str, float]:
    """Returns by how much the packed weights of each holder are larger than the numbers in them,
    because panels of matrices are padded to whole vectors.
    """
    planned = runtime.placement.bytes_by_holder()
    held = {process.name: process.weight_bytes for process in runtime.worker_processes()}
    return {holder: (held.get(holder) or size) / size if size else 1.0 for holder, size in planned.items()}


def _kv_bytes(host: HostModel, run: Any, context: int) -> int:
    """Returns the bytes of keys and values that the last token read."""
    from dflash_moe.operators.layers.reads import kv_bytes

    if host.packed is not None:
        return kv_bytes(host.model, context)
    # The model's own cache keeps what its attention reads, and no more.
    return sum(len(part) for part in run.digest())


def read_fields(reads: Mapping[str, float], sides: Sides, speeds: Mapping[int, ReadSpeed], token_s: float) -> dict[str, Any]:
    """Returns `read_bytes_per_token`, `share_of_read` of a token of `token_s` seconds, and `reads`,
    which has each side apart. The share is None where the speed of some side that reads cannot be
    measured here.
    """
    parts: list[dict[str, Any]] = []
    seconds: float | None = 0.0
    for side, num_bytes in reads.items():
        threads = sides.threads[side]
        speed = None if threads is None else speeds[threads]
        median = None if speed is None else speed.median
        parts.append(
            {
                "side": side,
                "threads": threads,
                "bytes_per_token": num_bytes,
                "read_bytes_per_s": median,
            }
        )
        if num_bytes and seconds is not None:
            seconds = None if median is None else seconds + num_bytes / median
    share = None if seconds is None else seconds / token_s
    return {"read_bytes_per_token": sum(reads.values()), "share_of_read": share, "reads": parts}
