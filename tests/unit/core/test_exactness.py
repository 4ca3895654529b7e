"""`Client.run` gives the reference's bits, whatever the slices, placement, threads, instruction set
and dtypes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_moe import ConfigError, _core
from tests.unit.core.toy_runtime import LAYER, NUM_EXPERTS, OUT_SIZE, Batch, Experts, ToyRuntime

EXPERTS = Experts.make(seed=1)
ONE_SHARD = [(0, range(NUM_EXPERTS))]
# three shards on two workers
INTERLEAVED = [(1, (0, 3, 7)), (0, (1, 2, 8, 11)), (1, (4, 5, 6, 9, 10))]
DTYPES = ("f32", "f16", "bf16")


@pytest.mark.parametrize("placement", [ONE_SHARD, INTERLEAVED], ids=["one-shard", "interleaved"])
@pytest.mark.parametrize(("slice_tokens", "window"), [(1024, 2), (1, 1), (4, 3), (7, 2)])
def test_result_is_the_reference_whatever_the_slices(tmp_path: Path, placement: Any, slice_tokens: int, window: int) -> None:
    batch = Batch.make(num_tokens=23, top_k=4, seed=2)
    with ToyRuntime(tmp_path, placement, EXPERTS, slice_tokens=slice_tokens, window=window) as runtime:
        np.testing.assert_array_equal(runtime.run(batch), runtime.expected(batch))


@pytest.mark.parametrize("request_dtype", DTYPES)
@pytest.mark.parametrize("reply_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_result_is_the_reference_for_every_dtype(tmp_path: Path, dtype: str, request_dtype: str, reply_dtype: str) -> None:
    batch = Batch.make(num_tokens=9, top_k=3, seed=3)
    with ToyRuntime(tmp_path, INTERLEAVED, EXPERTS, request_dtype=request_dtype, reply_dtype=reply_dtype) as runtime:
        np.testing.assert_array_equal(runtime.run(batch, dtype), runtime.expected(batch, dtype))


@pytest.mark.parametrize("isa", _core.supported_isas())
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("weight_dtype", ["f32", "bf16"])
def test_result_is_the_reference_on_every_instruction_set(
    tmp_path: Path, isa: str, num_threads: int, weight_dtype: str
) -> None:
    batch = Batch.make(num_tokens=17, top_k=4, seed=4)
    with ToyRuntime(tmp_path, INTERLEAVED, EXPERTS, isa=isa, num_threads=num_threads, weight_dtype=weight_dtype) as runtime:
        np.testing.assert_array_equal(runtime.run(batch), runtime.expected(batch))


@pytest.mark.parametrize("weights_dtype", DTYPES)
def test_routing_weights_of_any_dtype_are_widened_exactly(tmp_path: Path, weights_dtype: str) -> None:
    batch = Batch.make(num_tokens=8, top_k=4, seed=5)
    batch.topk_weights[:] = np.round(batch.topk_weights * 8) / 8  # exact in every dtype
    with ToyRuntime(tmp_path, ONE_SHARD, EXPERTS) as runtime:
        np.testing.assert_array_equal(runtime.run(batch, weights_dtype=weights_dtype), runtime.expected(batch))


def test_ids_may_be_64_bit_and_only_one_stands_for_none(tmp_path: Path) -> None:
    narrow = Batch.make(num_tokens=8, top_k=4, seed=6)
    wide = Batch(narrow.hidden_states, narrow.topk_ids.astype(np.int64), narrow.topk_weights)
    with ToyRuntime(tmp_path, INTERLEAVED, EXPERTS) as runtime:
        np.testing.assert_array_equal(runtime.run(wide), runtime.run(narrow))
        wide.topk_ids[3, 1] = 2**62
        with pytest.raises(ConfigError, match=rf"topk_ids\[3, 1\] is {2**62}; .* and {NUM_EXPERTS} for none"):
            runtime.run(wide)


def test_tokens_without_experts_become_positive_zero(tmp_path: Path) -> None:
    batch = Batch.make(num_tokens=5, top_k=2, seed=7)
    batch.topk_ids[1] = NUM_EXPERTS
    batch.topk_ids[4] = NUM_EXPERTS
    with ToyRuntime(tmp_path, INTERLEAVED, EXPERTS) as runtime:
        output = runtime.run(batch)
        assert not output[[1, 4]].view(np.uint32).any()
        batch.topk_ids[:] = NUM_EXPERTS
        assert not runtime.run(batch).view(np.uint32).any()
        calls = sum(counters["calls"] for counters in runtime.client.counters().values())
        assert calls == 2  # the first run, one a worker; the second has nothing to ask


def test_a_row_does_not_depend_on_its_company(tmp_path: Path) -> None:
    batch = Batch.make(num_tokens=12, top_k=4, seed=8)
    with ToyRuntime(tmp_path, INTERLEAVED, EXPERTS) as runtime:
        together = runtime.run(batch)
        for token in range(12):
            rows = slice(token, token + 1)
            alone = Batch(batch.hidden_states[rows], batch.topk_ids[rows], batch.topk_weights[rows])
            np.testing.assert_array_equal(runtime.run(alone)[0], together[token])


def test_a_small_slot_splits_the_call_and_counts_it(tmp_path: Path) -> None:
    batch = Batch.make(num_tokens=64, top_k=4, seed=9)
    with ToyRuntime(tmp_path, ONE_SHARD, EXPERTS, slot_bytes=4096) as runtime:
        np.testing.assert_array_equal(runtime.run(batch), runtime.expected(batch))
        counters = runtime.client.counters()[0, LAYER]
        assert counters["splits"] == counters["calls"] - 1 > 0


def test_counters_measure_the_bytes_of_the_floor_formula(tmp_path: Path) -> None:
    batch = Batch.make(num_tokens=64, top_k=4, seed=10)
    with ToyRuntime(tmp_path, ONE_SHARD, EXPERTS, slice_tokens=16, request_dtype="bf16") as runtime:
        runtime.run(batch)
        counters = runtime.client.counters()[0, LAYER]
        routed = batch.topk_ids < NUM_EXPERTS
        rows, pairs = int(routed.any(axis=1).sum()), int(routed.sum())
        assert (counters["calls"], counters["rows"], counters["pairs"]) == (4, rows, pairs)
        assert counters["floor_bytes"] == _core.floor_bytes(rows, pairs, 48, "bf16", OUT_SIZE, "f32")
        stats = runtime.workers[0].stats()
        assert (stats["request_bytes"], stats["reply_bytes"]) == (counters["request_bytes"], counters["reply_bytes"])
        assert counters["worker_compute_ns"] > 0


def test_many_threads_share_one_client(tmp_path: Path) -> None:
    batches = [Batch.make(num_tokens=1 + 5 * i, top_k=4, seed=20 + i) for i in range(4)]
    wrong: list[str] = []
    with ToyRuntime(tmp_path, INTERLEAVED, EXPERTS, slice_tokens=3) as runtime:
        expected = [runtime.expected(batch) for batch in batches]

        def repeat(index: int) -> None:
            for _ in range(25):
                if not np.array_equal(runtime.run(batches[index]), expected[index]):
                    wrong.append(f"thread {index}")  # noqa: PERF401 - the run is the point

        threads = [threading.Thread(target=repeat, args=(index,)) for index in range(len(batches))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_submitted_calls_end_in_any_order_of_asking(tmp_path: Path) -> None:
    batches = [Batch.make(num_tokens=7, top_k=4, seed=30 + i) for i in range(6)]
    with ToyRuntime(tmp_path, INTERLEAVED, EXPERTS, slice_tokens=2) as runtime:
        pending = []
        for batch in batches:
            tokens, output = runtime.tokens(batch, "f32")
            pending.append((runtime.submit(tokens), output, runtime.expected(batch)))
        for call, output, expected in reversed(pending):
            assert call.wait(60.0)
            call.result()
            np.testing.assert_array_equal(output, expected)


def test_asking_alone_drives_a_call_to_its_end(tmp_path: Path) -> None:
    batch = Batch.make(num_tokens=7, top_k=4, seed=40)
    with ToyRuntime(tmp_path, INTERLEAVED, EXPERTS, slice_tokens=2, window=1) as runtime:
        tokens, output = runtime.tokens(batch, "f32")
        call = runtime.submit(tokens)
        while not call.is_done():
            pass
        call.result()
        np.testing.assert_array_equal(output, runtime.expected(batch))


def test_traces_cover_every_slice_in_order_of_time(tmp_path: Path) -> None:
    batch = Batch.make(num_tokens=12, top_k=4, seed=41)
    with ToyRuntime(tmp_path, ONE_SHARD, EXPERTS, slice_tokens=4) as runtime:
        runtime.run(batch)
        assert runtime.client.take_traces() == []
        runtime.client.set_profile(True)
        runtime.run(batch)
        traces = runtime.client.take_traces()
        assert runtime.client.take_traces() == []
    assert [trace["slice"] for trace in traces] == [0, 1, 2]
    for trace in traces:
        times = [trace[key] for key in ("encode_start_ns", "published_ns", "arrived_ns", "combined_ns")]
        assert times == sorted(times)
        worker = [trace[key] for key in ("worker_received_ns", "worker_started_ns", "worker_finished_ns")]
        assert worker == sorted(worker)
