"""The expert layer against what else computes one on a CPU: torch, and kt-kernel where it is
installed. Interleaved rounds.

    python -m bench.campaigns.experts_against_peers [--rounds 5] [--threads 1,2] [--json FILE]

The cases of `bench experts` (hidden 1024, 32 experts of width 384, top-8, weights from memory) in
bf16 and in int8. Peers are imported, never shipped: `pip install --no-deps kt-kernel==0.7.2` into a
virtual environment of its own that sees torch and this package; what is absent is said and left
out. Every kernel's result is first held against a float32 reference; the relative errors are in
`params`. Needs 8 GB of memory; about ten minutes.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
import torch

from bench.campaigns.harness import command_line
from dflash_moe import _core, _measure
from dflash_moe.bench.expert_batch import Batch, ExpertShape, Kernel, make_batch
from dflash_moe.bench.experts import ExpertsCase, Peaks
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.torch_experts import TorchLayers, torch_kernels, torch_outputs
from dflash_moe.errors import UnsupportedError
from dflash_moe.telemetry.machine import memory_available, usable_cores

SHAPE = ExpertShape()
TOKENS = (1, 4, 16, 64, 512, 2048)
CHECK_TOKENS = 16
# The experts of one token take so many bytes over all layers in rotation, as in `bench experts`.
ROTATION_BYTES = 512 << 20
# The threads of kt-kernel spin for 50 ms after a task, and nobody else may be measured meanwhile.
KT_IDLE_S = 0.1
# A relative error (of norms) above these is no rounding of the format: the kernel did something
# else.
TOLERANCE = {"bf16": 0.02, "int8": 0.05}
NUMERICS = {"bf16": ("bf16", ("f32-canonical", "bf16-dot")), "int8": ("int8_g32", ("f32-canonical", "int8-groups"))}


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    parser = command_line(__doc__, "experts_against_peers")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds [5]")
    parser.add_argument("--threads", default="", help="comma-separated [one, and all usable cores]")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="comma-separated [%(default)s]")
    parser.add_argument("--layers", type=int, default=0, help="in rotation; fewer for a trial [beyond the caches]")
    arguments = parser.parse_args()
    counts = tuple(map(int, arguments.threads.split(","))) if arguments.threads else tuple(sorted({1, usable_cores()}))
    tokens = tuple(map(int, arguments.tokens.split(",")))
    recorder = Recorder(arguments.json)
    peers = {"torch": torch.__version__, "kt_kernel": _kt_version()}
    params = {"threads": list(counts), "tokens": list(tokens), "isa": _core.best_isa(), "peers": peers}
    result = recorder.begin("experts_against_peers", params)
    for name, version in peers.items():
        print(f"{name}: {version or 'not installed, left out'}", file=sys.stderr)
    with recorder.recording():
        for fmt in ("bf16", "int8"):
            weights = _Weights.random(fmt, arguments.layers or _num_layers(fmt))
            for threads in counts:
                kernels, errors = _kernels(weights, threads)
                result.params.setdefault("relative_errors", {})[f"{fmt}, {threads} threads"] = errors
                cases = _cases(fmt, kernels, threads, tokens)
                run_rounds(recorder, [cases[0].peaks, *cases], rounds=arguments.rounds)
                result.summary = _ratios(result.rows)
                del kernels, cases
    _show(result.summary)
    return 0


def _kt_version() -> str | None:
    try:
        return metadata.version("kt-kernel")
    except metadata.PackageNotFoundError:
        return None


def _num_layers(fmt: str) -> int:
    touched = SHAPE.top_k * SHAPE.expert_bytes(NUMERICS[fmt][0])
    return max(2, min(64, -(-ROTATION_BYTES // touched)))


@dataclass(frozen=True, slots=True)
class _Weights:
    """The experts of one layer in bf16 [E, ...], which peers quantise themselves. `layers` copies
    of them rotate, each in memory of its own.
    """

    fmt: str
    layers: int
    gate: Any
    up: Any
    down: Any

    @classmethod
    def random(cls, fmt: str, layers: int) -> _Weights:
        generator = torch.Generator().manual_seed(0)
        hidden, inner, experts = SHAPE.hidden_size, SHAPE.moe_intermediate_size, SHAPE.num_experts

        def matrix(outputs: int, inputs: int) -> Any:
            values = torch.randn(experts, outputs, inputs, generator=generator) / inputs**0.5
            return values.bfloat16()

        return cls(fmt, layers, matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner))


def _kernels(weights: _Weights, threads: int) -> tuple[list[Kernel], dict[str, float]]:
    """Returns every checked kernel that computes this format here, and its relative error."""
    batch = make_batch(SHAPE, CHECK_TOKENS, "uniform", 1)
    batch = Batch(_as_bf16(batch.rows), batch.row_counts, batch.expert_ids, batch.weights, batch.num_distinct)
    reference = _reference(weights, batch)
    kernels: list[Kernel] = []
    outputs: dict[str, Any] = {}
    fmt, classes = NUMERICS[weights.fmt]
    for numerics in classes:
        try:
            kernels.append(_own(fmt, numerics, threads, weights.layers))
        except UnsupportedError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        outputs[kernels[-1].name] = _own_output(weights, fmt, numerics, threads, batch)
    if weights.fmt == "bf16":
        torch_layers = TorchLayers(
            [torch.cat((weights.gate, weights.up), 1) for _ in range(weights.layers)],
            [weights.down.clone() for _ in range(weights.layers)],
            torch.bfloat16,
        )
        kernels += torch_kernels(torch_layers, threads)
        outputs |= torch_outputs(torch_layers, batch)
    if _kt_version() is not None:
        # Its callers spin beside its threads, so that fewer threads can be faster on few cores.
        for pool in range(1, threads + 1):
            layers = _KtLayers.load(weights, pool)
            kernels.append(Kernel(f"kt_{weights.fmt}_{pool}", f"kt-kernel, {pool} threads", "kt-kernel", layers.bind))
            outputs[kernels[-1].name] = layers.output(batch)
    return kernels, {name: _check(name, output, reference, TOLERANCE[weights.fmt]) for name, output in outputs.items()}


def _as_bf16(rows: Any) -> Any:
    return torch.from_numpy(rows).bfloat16().float().numpy()


def _reference(weights: _Weights, batch: Batch) -> Any:
    """Computes the layer in float32 from the same bf16 weights and rows."""
    rows = torch.from_numpy(batch.rows)
    result = torch.zeros_like(rows)
    owners = torch.from_numpy(np.repeat(np.arange(len(batch.row_counts)), batch.row_counts))
    for owner, expert, weight in zip(owners.tolist(), batch.expert_ids.tolist(), batch.weights.tolist(), strict=True):
        row = rows[owner]
        inner = torch.nn.functional.silu(weights.gate[expert].float() @ row) * (weights.up[expert].float() @ row)
        result[owner] += weight * (weights.down[expert].float() @ inner)
    return result.numpy()


def _check(name: str, output: Any, reference: Any, tolerance: float) -> float:
    error = float(np.linalg.norm(output - reference) / np.linalg.norm(reference))
    print(f"{name}: relative error {error:.2e}", file=sys.stderr)
    if not error <= tolerance:
        raise SystemExit(f"{name}: relative error {error:.3g} of its result, allowed {tolerance}; it is not timed")
    return error


def _spec() -> dict[str, int]:
    return {"in_size": SHAPE.hidden_size, "intermediate_size": SHAPE.moe_intermediate_size, "out_size": SHAPE.hidden_size}


def _own(fmt: str, numerics: str, threads: int, num_layers: int) -> Kernel:
    layers = _measure.LayerBenchmark(
        spec=_spec(), num_experts=SHAPE.num_experts, num_layers=num_layers, weight_dtype=fmt, isa=_core.best_isa(),
        num_threads=threads, numerics=numerics,
    )  # fmt: skip

    def bind(batch: Batch, _source: str) -> Callable[[int], list[float]]:
        arrays = (batch.rows, batch.row_counts, batch.expert_ids, batch.weights)
        return lambda count: [ns * 1e-9 for ns in layers.run(*arrays, row_dtype="bf16", rounds=count)]

    return Kernel(f"{fmt} {numerics}", numerics, "cpu", bind)


def _own_output(weights: _Weights, fmt: str, numerics: str, threads: int, batch: Batch) -> Any:
    """Returns what the same kernels make of the peers' weights, because LayerBenchmark has weights
    of its own.
    """
    experts = _core.FfnOracle(
        spec=_spec(), num_experts=SHAPE.num_experts, weight_dtype="bf16" if weights.fmt == "bf16" else fmt,
        isa=_core.best_isa(), num_threads=threads, numerics=numerics,
    )  # fmt: skip
    for expert in range(SHAPE.num_experts):
        gate, up, down = (matrix[expert].float().numpy() for matrix in (weights.gate, weights.up, weights.down))
        experts.load_expert(expert, gate=gate, up=up, down=down)
    return experts.forward(batch.rows, batch.row_counts, batch.expert_ids, batch.weights, row_dtype="bf16", reply_dtype="f32")


@dataclass(frozen=True, slots=True)
class _KtLayers:
    """The layers of kt-kernel over one of its pools. They are driven as its own wrapper drives
    them: by a task that is submitted and waited for.
    """

    infer: Any
    layers: list[Any]
    keep: tuple[Any, ...]

    @classmethod
    def load(cls, weights: _Weights, pool_threads: int) -> _KtLayers:
        """Packs every layer, and quantises it for int8. Raises MemoryError before the machine runs
        out.
        """
        core = importlib.import_module("kt_kernel").kt_kernel_ext

        if weights.layers * SHAPE.layer_bytes(NUMERICS[weights.fmt][0]) > memory_available():
            raise MemoryError("kt-kernel's layers in rotation need more memory than is available; pass --layers")
        pool = core.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [pool_threads]
        order = torch.arange(SHAPE.num_experts, dtype=torch.int64)
        # kt-kernel prints a line for each layer.
        with _stdout_to_nowhere():
            infer = core.CPUInfer(pool)
            layers = [cls._layer(core, infer, weights, index) for index in range(weights.layers)]
            for layer in layers:
                infer.submit(layer.load_weights_task(order.data_ptr()))
                infer.sync()
        return cls(infer, layers, (weights, order))

    @staticmethod
    def _layer(core: Any, infer: Any, weights: _Weights, index: int) -> Any:
        config = core.moe.MOEConfig(
            SHAPE.num_experts, SHAPE.top_k, SHAPE.hidden_size, SHAPE.moe_intermediate_size, 0
        )  # 0: experts on a GPU
        config.layer_idx, config.pool, config.max_len = index, infer.backend_, max(TOKENS)
        if weights.fmt == "bf16":
            for name in ("gate", "up", "down"):
                matrix = getattr(weights, name)
                setattr(config, f"{name}_projs", [[matrix[expert].data_ptr() for expert in range(SHAPE.num_experts)]])
            return core.moe.AMXBF16_MOE(config)
        config.save = config.load = False
        config.gate_proj, config.up_proj = weights.gate.data_ptr(), weights.up.data_ptr()
        config.down_proj = weights.down.data_ptr()
        return core.moe.AMXInt8_MOE(config)

    def bind(self, batch: Batch, _source: str) -> Callable[[int], list[float]]:
        step, turn = self._step(batch)[0], 0

        def run(forwards: int) -> list[float]:
            nonlocal turn
            samples = []
            for _ in range(forwards):
                turn = (turn + 1) % len(self.layers)
                began = time.perf_counter()
                step(self.layers[turn])
                samples.append(time.perf_counter() - began)
            time.sleep(KT_IDLE_S)
            return samples

        return run

    def output(self, batch: Batch) -> Any:
        step, result = self._step(batch)
        step(self.layers[0])
        time.sleep(KT_IDLE_S)
        return result.float().numpy()

    def _step(self, batch: Batch) -> tuple[Callable[[Any], None], Any]:
        tokens = len(batch.row_counts)
        rows = torch.from_numpy(batch.rows).bfloat16()
        ids = torch.from_numpy(batch.expert_ids.astype(np.int64)).reshape(tokens, SHAPE.top_k)
        weights = torch.from_numpy(batch.weights).reshape(tokens, SHAPE.top_k).contiguous()
        count, result = torch.tensor([tokens], dtype=torch.int32), torch.zeros_like(rows)

        def step(layer: Any) -> None:
            pointers = (ids.data_ptr(), weights.data_ptr(), rows.data_ptr(), result.data_ptr())
            self.infer.submit(layer.forward_task(count.data_ptr(), SHAPE.top_k, *pointers, False))
            self.infer.sync()

        return step, result


@contextlib.contextmanager
def _stdout_to_nowhere() -> Iterator[None]:
    """Drops within the block what a C++ library prints on stdout."""
    sys.stdout.flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile() as sink:
        os.dup2(sink.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(saved, 1)
            os.close(saved)


def _cases(fmt: str, kernels: list[Kernel], threads: int, tokens: tuple[int, ...]) -> list[ExpertsCase]:
    peaks = Peaks(_core.best_isa(), threads)
    stored = NUMERICS[fmt][0]
    cases = []
    for count in tokens:
        batch = make_batch(SHAPE, count, "uniform", 0)
        for kernel in kernels:
            forward = kernel.bind(batch, "dram")
            parts = (kernel.name, kernel.kernel, kernel.backend, stored, SHAPE, count, "uniform", "dram", batch, peaks, forward)
            cases.append(ExpertsCase(*parts))
    return cases


def _ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns for each case and peer its fastest median divided by that of each of ours, so that
    ours is faster above 1.
    """
    found = []
    same = ("format", "tokens", "threads")
    for row in (row for row in rows if row["backend"] == "cpu"):
        case = {key: row[key] for key in same}
        for peer in ("torch", "kt-kernel"):
            others = [other for other in rows if other["backend"] == peer and all(other[key] == row[key] for key in same)]
            if others:
                best = min(others, key=lambda other: other["median_s"])
                ratio = best["median_s"] / row["median_s"]
                found.append({"name": row["name"], **case, "peer": peer, "against": best["name"], "ratio": ratio})
    return found


def _show(summary: list[dict[str, Any]]) -> None:
    for line in summary:
        print(
            f"{line['name']:24} {line['threads']} threads {line['tokens']:5} tokens: {line['ratio']:6.2f} x {line['against']}"
        )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # The pools of kt-kernel do not end by themselves.
    os._exit(code)
