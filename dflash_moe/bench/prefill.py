"""`bench prefill`: the table of the modes. One long prompt and a short decode per (mode, dtype), both directions counted.

Repeats interleave the modes, so that a noisy machine disturbs all of them alike. The row `local` computes every expert in the
host process (loopback transport, same kernels) with as many threads as all workers together.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_moe.bench.results import BenchResult, timing_fields
from dflash_moe.errors import ConfigError
from dflash_moe.runtime.expert_runtime import ExpertRuntime
from dflash_moe.telemetry.memory import process_memory
from dflash_moe.topology import Topology

LOCAL = "local"
COUNTED = ("calls", "request_bytes", "reply_bytes", "floor_bytes")


@dataclass(frozen=True, slots=True)
class PrefillParams:
    """What is measured. `prompt_ids` (when given) replaces `prompt_tokens` random ids drawn with `seed`."""

    model: Path
    prompt_tokens: int = 2048
    new_tokens: int = 32
    modes: tuple[str, ...] = ("stream", "batched", "auto")
    dtypes: tuple[str, ...] = ()
    repeat: int = 3
    with_local: bool = True
    seed: int = 0
    prompt_ids: tuple[int, ...] | None = None


@dataclass(slots=True)
class Sample:
    """One prefill and the decode after it."""

    prompt_tokens: int
    prefill_s: float
    decode_s: float
    decode_steps: int
    prefill: dict[str, int]
    decode: dict[str, int]
    digest: str  # of the KV cache and the last logits after the prefill: equal digests = equal bits in every layer
    token_ids: list[int]


@dataclass(slots=True)
class Series:
    """The samples of one (mode, dtype)."""

    mode: str
    dtype: str
    samples: list[Sample] = field(default_factory=list)
    reason: str = ""  # why the runtime took what it took, in its words

    def row(self) -> dict[str, Any]:
        """The result row; counts are of one prefill (they do not vary between repeats)."""
        last = self.samples[-1]
        moved = last.prefill["request_bytes"] + last.prefill["reply_bytes"]
        row: dict[str, Any] = {"name": self.mode, "mode": self.mode, "dtype": self.dtype, "mode_reason": self.reason}
        row |= timing_fields([sample.prefill_s for sample in self.samples])
        row |= last.prefill
        row["tokens_per_s"] = last.prompt_tokens / row["median_s"]
        row["wire_efficiency"] = last.prefill["floor_bytes"] / moved if moved else None
        row["decode_samples_s"] = [sample.decode_s for sample in self.samples]
        row["decode_calls"] = last.decode["calls"]
        row["decode_bytes"] = last.decode["request_bytes"] + last.decode["reply_bytes"]
        if last.decode_steps:
            row["decode_tokens_per_s"] = last.decode_steps / statistics.median(row["decode_samples_s"])
        row["digests"] = sorted({sample.digest for sample in self.samples})
        return row


def measure_round(
    model: Any, runtime: ExpertRuntime, input_ids: Any, series: Sequence[Series], new_tokens: int, *, keep: bool = True
) -> None:
    """One sample of every series, in order, over one runtime; `keep=False` measures and forgets (warm-up)."""
    for one in series:
        runtime.set_mode(one.mode, dtype=one.dtype, reply_dtype=one.dtype)
        one.reason = str(runtime.stats()["mode_reason"])
        sample = measure_once(model, runtime, input_ids, new_tokens)
        if keep:
            one.samples.append(sample)


def run_prefill(
    params: PrefillParams,
    topology: Topology,
    *,
    progress: Callable[[str], None] = lambda _line: None,
    overrides: dict[str, Any] | None = None,
) -> BenchResult:
    """Measures every (mode, dtype), then returns rows in that order, `local` rows last.

    `overrides` are settings (flags) given to the runtime. Errors: those of `ExpertRuntime.start` and of the calls.
    """
    import torch

    overrides = dict(overrides or {})
    result = BenchResult("prefill", _describe(params, topology, overrides))
    with _host(params.model, topology, overrides) as (runtime, model):
        model_dtype = runtime.spec.dtype
        dtypes = params.dtypes or (model_dtype,)
        input_ids = torch.tensor([_prompt(params, model)], dtype=torch.int64)
        result.params["prompt_tokens"] = int(input_ids.shape[1])
        result.params["processes"] = resident_memory(runtime)
        locals_ = [Series(LOCAL, dtype) for dtype in dtypes] if params.with_local else []
        series = [Series(mode, dtype) for dtype in dtypes for mode in params.modes]
        for round_ in range(params.repeat + 1):  # round 0 warms caches and threads up and is not kept
            progress(f"round {round_} of {params.repeat}" + (" (warm-up)" if round_ == 0 else ""))
            measure_round(model, runtime, input_ids, series, params.new_tokens, keep=round_ > 0)
            if locals_:
                _measure_local(params, topology, overrides, input_ids, locals_, keep=round_ > 0)
            result.rows = [one.row() for one in (*series, *locals_) if one.samples]
    result.complete = True
    return result


def measure_once(model: Any, runtime: ExpertRuntime, input_ids: Any, new_tokens: int) -> Sample:
    """Prefills `input_ids` [1, num_tokens] in one forward pass, then decodes `new_tokens` greedily."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    before = counted(runtime)
    with torch.inference_mode():
        started = time.perf_counter()
        logits = model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        prefill_s = time.perf_counter() - started
        after_prefill = counted(runtime)
        digest = _digest(cache, logits)
        token_ids = [int(torch.argmax(logits))]
        started = time.perf_counter()
        for _ in range(new_tokens):
            step_ids = torch.tensor([[token_ids[-1]]], dtype=torch.int64)
            logits = model(input_ids=step_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            token_ids.append(int(torch.argmax(logits)))
        decode_s = time.perf_counter() - started
    after_decode = counted(runtime)
    if after_prefill["calls"] == before["calls"]:
        raise ConfigError("the model made no remote expert call: its experts did not go through dflash_moe")
    return Sample(
        int(input_ids.shape[1]),
        prefill_s,
        decode_s,
        new_tokens,
        {key: after_prefill[key] - before[key] for key in COUNTED},
        {key: after_decode[key] - after_prefill[key] for key in COUNTED},
        digest,
        token_ids,
    )


def resident_memory(runtime: ExpertRuntime) -> list[dict[str, Any]]:
    """Anonymous and file-backed resident bytes of this process ("host") and of every worker, and the experts they hold."""
    own = process_memory()
    rows: list[dict[str, Any]] = [
        {
            "name": "host",
            "experts_per_layer": 0,
            "anonymous_bytes": own.anonymous_bytes,
            "file_bytes": own.file_bytes,
            "weight_bytes": 0,
        }
    ]
    for process in runtime.worker_processes():
        keys = ("name", "experts_per_layer", "anonymous_bytes", "file_bytes", "weight_bytes")
        rows.append({key: getattr(process, key) for key in keys})
    return rows


def counted(runtime: ExpertRuntime) -> dict[str, int]:
    """The runtime's totals so far: calls, request_bytes, reply_bytes, floor_bytes."""
    totals = runtime.stats()["totals"]
    return {key: int(totals[key]) for key in COUNTED}


def local_topology(topology: Topology, total_threads: int) -> Topology:
    """All experts in the host process, behind the loopback transport, with the workers' threads taken together."""
    template = topology.workers[0]
    only = dataclasses.replace(
        template, name=LOCAL, address="loopback", threads=total_threads, memory=None, experts=None, emulate=None
    )
    placement = dataclasses.replace(topology.placement, policy="even")
    return dataclasses.replace(topology, workers=(only,), placement=placement)


@contextmanager
def _host(model_dir: Path, topology: Topology, overrides: dict[str, Any]) -> Iterator[tuple[ExpertRuntime, Any]]:
    from dflash_moe.integrations.transformers import load_model

    with ExpertRuntime.start(topology, model=model_dir, **overrides) as runtime:
        yield runtime, load_model(model_dir, runtime)


def _measure_local(
    params: PrefillParams,
    topology: Topology,
    overrides: dict[str, Any],
    input_ids: Any,
    series: Sequence[Series],
    *,
    keep: bool,
) -> None:
    total_threads = sum(worker.threads or 1 for worker in topology.workers)
    own = {key: value for key, value in overrides.items() if key not in ("mode", "transport", "threads")}
    with _host(params.model, local_topology(topology, total_threads), own) as (runtime, model):
        for one in series:
            runtime.set_mode("batched", dtype=one.dtype, reply_dtype=one.dtype)
            measure_once(model, runtime, input_ids[:, :64], 1)
            sample = measure_once(model, runtime, input_ids, params.new_tokens)
            if keep:
                one.samples.append(sample)


def _prompt(params: PrefillParams, model: Any) -> list[int]:
    if params.prompt_ids is not None:
        return list(params.prompt_ids)
    import torch

    generator = torch.Generator().manual_seed(params.seed)
    return list(torch.randint(0, model.config.vocab_size, (params.prompt_tokens,), generator=generator).tolist())


def _digest(cache: Any, logits: Any) -> str:
    import torch

    digest = hashlib.sha256()
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    digest.update(logits.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _describe(params: PrefillParams, topology: Topology, overrides: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": params.model.name,
        "prompt_tokens": params.prompt_tokens,
        "new_tokens": params.new_tokens,
        "modes": list(params.modes),
        "dtypes": list(params.dtypes),
        "repeat": params.repeat,
        "seed": params.seed,
        "workers": [
            {"name": worker.name, "backend": worker.backend, "threads": worker.threads, "address": worker.address or "shared"}
            for worker in topology.workers
        ],
        "overrides": {key: str(value) for key, value in overrides.items() if value is not None},
    }
