"""Runs a client and its workers in one process over loopback, with seeded experts, and computes the
same numbers by FfnOracle.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_moe import _core, errors

FloatArray = npt.NDArray[np.float32]
AnyArray = npt.NDArray[Any]

LAYER = 2
LAYER_NAME = "model.layers.2.mlp.experts"
IN_SIZE, INTERMEDIATE_SIZE, OUT_SIZE = 48, 40, 56
NUM_EXPERTS = 12
SPEC: Mapping[str, Any] = {
    "in_size": IN_SIZE,
    "intermediate_size": INTERMEDIATE_SIZE,
    "out_size": OUT_SIZE,
    "activation": "silu",
}
# Whatever should take milliseconds is awaited for this time.
TIMEOUT_S = 60.0


def round_to_bf16(values: FloatArray) -> FloatArray:
    """Returns the nearest bf16 values in float32; ties go to the even one."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.asarray(rounded.astype(np.uint32).view(np.float32))


def narrow(values: FloatArray, dtype: str) -> AnyArray:
    """Returns the array as it lies in memory in `dtype`: float32, or uint16 bit patterns."""
    if dtype == "f32":
        return np.ascontiguousarray(values, np.float32)
    if dtype == "f16":
        return np.ascontiguousarray(values.astype(np.float16)).view(np.uint16)
    return (round_to_bf16(values).view(np.uint32) >> 16).astype(np.uint16)


def widen(values: AnyArray, dtype: str) -> FloatArray:
    """Returns exactly the values of an array that `narrow` made, in float32."""
    if dtype == "f32":
        return values.astype(np.float32)
    if dtype == "f16":
        return values.view(np.float16).astype(np.float32)
    return (values.astype(np.uint32) << 16).view(np.float32)


@dataclass(slots=True)
class Experts:
    """Float32 weights that bf16 holds exactly, so that the result is the same in every dtype in
    which they are kept.
    """

    gate: FloatArray
    up: FloatArray
    down: FloatArray

    @staticmethod
    def make(seed: int) -> Experts:
        """Makes seeded experts of the toy layer."""
        random = np.random.default_rng(seed)

        def matrix(outputs: int, inputs: int) -> FloatArray:
            values = random.standard_normal((NUM_EXPERTS, outputs, inputs), np.float32) / np.float32(np.sqrt(inputs))
            return round_to_bf16(values)

        return Experts(
            matrix(INTERMEDIATE_SIZE, IN_SIZE), matrix(INTERMEDIATE_SIZE, IN_SIZE), matrix(OUT_SIZE, INTERMEDIATE_SIZE)
        )

    def write(self, folder: Path, dtype: str) -> Path:
        """Writes a raw file of all matrices in `dtype` for MappedFile, and returns its path."""
        path = folder / "experts.bin"
        path.write_bytes(b"".join(narrow(matrices, dtype).tobytes() for matrices in (self.gate, self.up, self.down)))
        return path

    def sources(self, file: _core.MappedFile, dtype: str, expert: int) -> dict[str, _core.MatrixSource]:
        """Returns the arguments of load_expert for one expert of the file that `write` made."""
        offset = 0
        sources: dict[str, _core.MatrixSource] = {}
        for name, matrices in (("gate", self.gate), ("up", self.up), ("down", self.down)):
            outputs, inputs = matrices.shape[1:]
            matrix_bytes = outputs * inputs * (4 if dtype == "f32" else 2)
            sources[name] = (file, offset + expert * matrix_bytes, dtype, outputs, inputs, inputs, 1)
            offset += NUM_EXPERTS * matrix_bytes
        return sources


@dataclass(slots=True)
class Batch:
    """A routed batch. Hidden states are float32 values, ids have sentinels and duplicates, and some
    weights are zero.
    """

    hidden_states: FloatArray
    topk_ids: AnyArray
    topk_weights: FloatArray

    @staticmethod
    def make(num_tokens: int, top_k: int, seed: int) -> Batch:
        """Makes a seeded batch. About one id in eight is a sentinel, and one weight in eight
        zero.
        """
        random = np.random.default_rng(seed)
        ids = random.integers(0, NUM_EXPERTS, (num_tokens, top_k))
        ids[random.random(ids.shape) < 0.125] = NUM_EXPERTS
        weights = random.random((num_tokens, top_k), np.float32)
        weights[random.random(weights.shape) < 0.125] = 0.0
        return Batch(random.standard_normal((num_tokens, IN_SIZE), np.float32), ids.astype(np.int32), weights)


@dataclass(slots=True)
class ToyRuntime:
    """A client with its workers, from the beginning to the end of its `with` block. `placement`
    lists (worker, experts) in the order of shard ids.
    """

    folder: Path
    placement: Sequence[tuple[int, Sequence[int]]]
    experts: Experts
    isa: str = "scalar"
    num_threads: int = 1
    weight_dtype: str = "f32"
    request_dtype: str = "f32"
    reply_dtype: str = "f32"
    slice_tokens: int = 1024
    window: int = 2
    num_slots: int = 4
    slot_bytes: int = 1 << 18
    call_timeout_s: float = 30.0
    # The channel to a worker goes through make_faulty with these arguments, by the worker's index.
    faults: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    client: _core.Client = field(init=False)
    workers: list[_core.Worker] = field(init=False)
    _threads: list[threading.Thread] = field(init=False)

    def __enter__(self) -> ToyRuntime:
        file = _core.MappedFile(str(self.experts.write(self.folder, self.weight_dtype)))
        self.client = _core.Client(spin_ns=0, call_timeout_s=self.call_timeout_s, stall_timeout_s=2.0)
        self.workers, self._threads = [], []
        for worker in range(1 + max(worker for worker, _ in self.placement)):
            self._add_worker(worker, file)
        shards = [(shard, worker, 1000 + shard, list(experts)) for shard, (worker, experts) in enumerate(self.placement)]
        self.client.define_layer(
            layer=LAYER, name=LAYER_NAME, in_size=IN_SIZE, out_size=OUT_SIZE, num_experts=NUM_EXPERTS, shards=shards
        )
        return self

    def _add_worker(self, index: int, file: _core.MappedFile) -> None:
        store = _core.ShardStore(isa=self.isa, num_threads=self.num_threads)
        worker = _core.Worker(name=f"w{index}")
        for shard, (holder, experts) in enumerate(self.placement):
            if holder != index:
                continue
            loan = store.borrow(dict(SPEC), len(experts), self.weight_dtype, 1000 + shard)
            for local_id, expert in enumerate(experts):
                sources = self.experts.sources(file, self.weight_dtype, expert)
                loan.load_expert(local_id, gate=sources["gate"], up=sources["up"], down=sources["down"])
            worker.hold(LAYER, shard, loan)
        host, remote = _core.make_loopback(_core.Geometry(self.num_slots, self.slot_bytes, self.slot_bytes))
        if index in self.faults:
            host = _core.make_faulty(host, **self.faults[index])
        thread = threading.Thread(target=self._serve, args=(worker, remote), daemon=True)
        thread.start()
        self.client.add_worker(
            name=f"w{index}", channel=host, generation=1, pulse_fd=-1, slice_tokens=self.slice_tokens, window=self.window,
            request_dtype=self.request_dtype, reply_dtype=self.reply_dtype,
        )  # fmt: skip
        self.workers.append(worker)
        self._threads.append(thread)

    @staticmethod
    def _serve(worker: _core.Worker, channel: _core.Channel) -> None:
        # A worker whose host misbehaves on purpose may end as it likes.
        with contextlib.suppress(errors.DflashError):
            worker.serve(channel, 1)

    def __exit__(self, *_: object) -> None:
        for worker, thread in zip(self.workers, self._threads, strict=True):
            worker.stop(1)
            thread.join()

    def tokens(self, batch: Batch, kind: str, weights_kind: str = "f32", **changed: Any) -> tuple[_core.TokenBatch, AnyArray]:
        """Returns the batch as a call takes it, and its output array. `changed` replaces fields of
        the TokenBatch.
        """
        hidden_states = narrow(batch.hidden_states, kind)
        weights = narrow(batch.topk_weights, weights_kind)
        num_tokens, top_k = batch.topk_ids.shape
        output = np.full((num_tokens, OUT_SIZE), 0x7E7E, hidden_states.dtype)
        fields = {
            "hidden_states": hidden_states.ctypes.data, "row_stride_bytes": hidden_states.strides[0], "dtype": kind,
            "num_tokens": num_tokens, "top_k": top_k, "topk_ids": batch.topk_ids.ctypes.data,
            "ids_are_64bit": batch.topk_ids.dtype == np.int64, "topk_weights": weights.ctypes.data,
            "weights_dtype": weights_kind, "output": output.ctypes.data,
            "owners": (hidden_states, batch.topk_ids, weights, output),
        }  # fmt: skip
        return _core.TokenBatch(**(fields | changed)), output

    def submit(self, tokens: _core.TokenBatch) -> _core.Call:
        """Submits a call."""
        return _core.Call(self.client, LAYER, tokens)

    def run(self, batch: Batch, dtype: str = "f32", weights_dtype: str = "f32") -> AnyArray:
        """Makes one call through the client and returns its output."""
        tokens, output = self.tokens(batch, dtype, weights_dtype)
        self.client.run(LAYER, tokens)
        return output

    def expected(self, batch: Batch, dtype: str = "f32") -> AnyArray:
        """Returns the output of the same call by the readable reference: an oracle computes each
        shard, and the host's sum follows the order of the shards.
        """
        num_tokens = len(batch.topk_ids)
        hidden_states = widen(narrow(batch.hidden_states, dtype), dtype)
        total = np.zeros((num_tokens, OUT_SIZE), np.float32)
        for _, experts in self.placement:
            oracle = _core.FfnOracle(spec=dict(SPEC), num_experts=len(experts), weight_dtype="f32", isa="reference")
            for local_id, expert in enumerate(experts):
                oracle.load_expert(
                    local_id, gate=self.experts.gate[expert], up=self.experts.up[expert], down=self.experts.down[expert]
                )
            for token in range(num_tokens):
                pairs = [
                    (experts.index(int(expert)), weight)
                    for expert, weight in zip(batch.topk_ids[token], batch.topk_weights[token], strict=True)
                    if expert in experts
                ]
                if not pairs:
                    continue
                pairs.sort(key=lambda pair: pair[0])
                row = oracle.forward(
                    hidden_states[token : token + 1],
                    np.array([len(pairs)], np.uint16),
                    np.array([local_id for local_id, _ in pairs], np.uint16),
                    np.array([weight for _, weight in pairs], np.float32),
                    row_dtype=self.request_dtype,
                    reply_dtype=self.reply_dtype,
                )
                total[token] += widen(np.asarray(row), self.reply_dtype)[0]
        return narrow(total, dtype)
