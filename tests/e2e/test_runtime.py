"""ExpertRuntime from topology to bits: every transport, mode and tensor kind gives what the oracle
gives.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dflash_moe import _core
from dflash_moe.errors import ConfigError, DflashError, UnsupportedError, WorkerError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.topology import Topology
from tests.expert_cases import NUM_EXPERTS, Batch, Expected, make_batch, make_checkpoint, tiny_spec

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return tiny_spec(make_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def runtime(spec: ModelSpec) -> Iterator[ExpertRuntime]:
    # A stand-in for a worker that is suspected on a busy machine would pass for a leak.
    with ExpertRuntime.start(Topology.local(num_workers=2), model=spec, suspect_ms=60_000.0) as started:
        yield started


def expected_of(runtime: ExpertRuntime) -> Expected:
    return Expected(runtime.placement, runtime.spec)


def call(runtime: ExpertRuntime, layer: int | str, batch: Any, **arguments: Any) -> np.ndarray:
    result: np.ndarray = runtime.experts(layer, batch.hidden_states, batch.topk_ids, batch.topk_weights, **arguments)
    return result


@pytest.mark.parametrize("num_tokens", [1, 2, 33, 200])
def test_shared_memory_gives_the_oracles_bits(runtime: ExpertRuntime, num_tokens: int) -> None:
    expected = expected_of(runtime)
    for layer in (0, 1):
        batch = make_batch(num_tokens, seed=num_tokens + layer)
        assert np.array_equal(call(runtime, layer, batch), expected.experts(layer, batch))


@pytest.mark.parametrize(
    ("address", "overrides", "kind"),
    [
        ("loopback", {}, "loopback"),
        ("unix", {}, "unix"),
        ("tcp", {}, "tcp"),
        (None, {"transport": "stream"}, "unix"),
        ("unix", {"socket_buffer_bytes": 4096}, "unix"),
        ("tcp", {"socket_buffer_bytes": "4KiB"}, "tcp"),
        ("tcp", {"encryption": "on"}, "tcp"),
        ("tcp", {"encryption": "on", "socket_buffer_bytes": "4KiB"}, "tcp"),
    ],
    ids=["loopback", "unix", "tcp", "stream", "unix-4k", "tcp-4k", "tls", "tls-4k"],
)
def test_every_transport_gives_the_oracles_bits(
    spec: ModelSpec, address: str | None, overrides: dict[str, Any], kind: str
) -> None:
    with ExpertRuntime.start(Topology.local(num_workers=2, address=address), model=spec, **overrides) as runtime:
        batch = make_batch(50)
        assert np.array_equal(call(runtime, 1, batch), expected_of(runtime).experts(1, batch))
        assert set(runtime.stats()["transports"].values()) == {kind}
        assert runtime.stats()["calls"] == 2


def test_every_mode_gives_the_same_bits_with_its_own_number_of_calls(runtime: ExpertRuntime) -> None:
    batch = make_batch(100, seed=3)
    expected = expected_of(runtime).experts(0, batch)
    cases = {("batched", None): 2, ("stream", 1): 200, ("stream", 32): 8, ("stream", 4): 50, ("auto", None): 2}
    for (mode, stream_tokens), num_calls in cases.items():
        runtime.set_mode(mode, stream_tokens=stream_tokens)
        before = runtime.stats()["calls"]
        assert np.array_equal(call(runtime, 0, batch), expected)
        # a slice may miss a shard
        assert runtime.stats()["calls"] - before == pytest.approx(num_calls, rel=0.1)
    assert runtime.stats()["mode"] == "auto"
    assert "100 tokens in one slice" in runtime.stats()["mode_reason"]


def test_a_larger_geometry_is_negotiated_when_a_mode_needs_it(spec: ModelSpec) -> None:
    batch = make_batch(100, seed=4)
    with ExpertRuntime.start(Topology.local(num_workers=2), model=spec, mode="stream") as runtime:
        expected = expected_of(runtime).experts(0, batch)
        generations = {name: worker["generation"] for name, worker in runtime.stats()["workers"].items()}
        assert np.array_equal(call(runtime, 0, batch), expected)
        runtime.set_mode("batched")
        assert np.array_equal(call(runtime, 0, batch), expected)
        renewed = {name: worker["generation"] for name, worker in runtime.stats()["workers"].items()}
        assert all(renewed[name] != generations[name] for name in generations)


def test_a_mode_is_switched_behind_a_call_that_takes_long_but_as_long_as_predicted(spec: ModelSpec) -> None:
    slow_link = Topology.parse("version: 1\nworkers:\n  - {name: w0, backend: cpu, address: unix, emulate: {mbit_s: 2}}\n")
    with ExpertRuntime.start(slow_link, model=spec, mode="batched", call_timeout_s=0.6) as runtime:
        for seed in range(2):
            call(runtime, 0, make_batch(64, seed=seed))  # 0.1 s each way: the model learns the link
        batch = make_batch(640)
        pending = runtime.submit(0, batch.hidden_states, batch.topk_ids, batch.topk_weights)
        runtime.set_mode("auto")
        assert pending.done()
        assert np.array_equal(pending.result(), expected_of(runtime).experts(0, batch))


def test_bytes_are_at_the_floor_and_half_of_it_in_bf16(runtime: ExpertRuntime) -> None:
    batch = make_batch(512, seed=5)
    moved = {}
    for dtype in ("f32", "bf16"):
        runtime.set_mode("batched", dtype=dtype, reply_dtype=dtype)
        before = runtime.stats()
        call(runtime, 0, batch)
        after = runtime.stats()
        moved[dtype] = {key: after[key] - before[key] for key in ("request_bytes", "reply_bytes", "floor_bytes")}
        assert moved[dtype]["request_bytes"] + moved[dtype]["reply_bytes"] <= 1.02 * moved[dtype]["floor_bytes"]
    runtime.set_mode("auto", dtype="f32", reply_dtype="f32")
    assert moved["bf16"]["reply_bytes"] == pytest.approx(moved["f32"]["reply_bytes"] / 2, rel=0.01)
    assert moved["bf16"]["request_bytes"] == pytest.approx(moved["f32"]["request_bytes"] / 2, rel=0.1)


def test_swapping_the_holders_of_shards_changes_no_bit(spec: ModelSpec) -> None:
    batch = make_batch(64, seed=6)
    results = []
    for names in (["w0", "w1"], ["w1", "w0"]):
        halves = {names[0]: "0-3", names[1]: "4-7"}
        workers = "\n".join(f"  - {{name: {name}, threads: 1, experts: {{'*': '{halves[name]}'}}}}" for name in ("w0", "w1"))
        topology = Topology.parse(f"version: 1\nplacement: {{policy: explicit}}\nworkers:\n{workers}\n")
        with ExpertRuntime.start(topology, model=spec) as runtime:
            results.append(call(runtime, 0, batch))
            assert all(process.experts_per_layer == 4 for process in runtime.worker_processes())
    assert np.array_equal(*results)


def test_experts_kept_at_the_host_are_shards_like_any_other(spec: ModelSpec) -> None:
    one_expert = spec.layers[0].expert_bytes
    topology = Topology.parse(
        f"version: 1\nhost: {{threads: 1, experts: {{memory: {8 * one_expert}}}}}\n"
        "placement: {policy: memory}\nworkers:\n  - {name: w0, threads: 1, memory: 1GiB}\n"
    )
    with ExpertRuntime.start(topology, model=spec) as runtime:
        batch = make_batch(40, seed=8)
        assert np.array_equal(call(runtime, 1, batch), expected_of(runtime).experts(1, batch))
        assert runtime.stats()["transports"].get("host") == "loopback"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_torch_calls_return_torch_tensors_of_their_dtype(runtime: ExpertRuntime, dtype: str) -> None:
    batch = make_batch(17, seed=9)
    hidden = torch.from_numpy(batch.hidden_states).to(getattr(torch, dtype))
    ids, weights = torch.from_numpy(batch.topk_ids), torch.from_numpy(batch.topk_weights)
    result = runtime.experts("layers.0.experts", hidden, ids, weights)
    assert result.dtype == hidden.dtype
    rounded = batch._replace(hidden_states=hidden.float().numpy())
    expected = torch.from_numpy(expected_of(runtime).experts(0, rounded)).to(hidden.dtype)
    assert torch.equal(result, expected)
    out = torch.empty_like(result)
    assert runtime.experts(0, hidden, ids.int(), weights, out=out) is out
    assert torch.equal(out, expected)


def test_an_empty_batch_returns_an_empty_result_without_a_call(runtime: ExpertRuntime) -> None:
    before = runtime.stats()["calls"]
    batch = make_batch(1)
    empty = Batch(*(tensor[:0] for tensor in batch))
    assert call(runtime, 0, empty).shape == (0, 96)
    assert runtime.submit(0, empty.hidden_states, empty.topk_ids, empty.topk_weights).result().shape == (0, 96)
    assert runtime.stats()["calls"] == before


def test_sentinel_ids_are_dropped_and_rows_without_experts_are_zero(runtime: ExpertRuntime) -> None:
    batch = make_batch(5, seed=10)
    batch.topk_ids[2] = NUM_EXPERTS
    result = call(runtime, 0, batch)
    assert not result[2].any()
    assert np.array_equal(result, expected_of(runtime).experts(0, batch))


@pytest.mark.parametrize("wrong", [-1, -2, NUM_EXPERTS + 1, 10**6, 1 << 40])
def test_an_id_that_is_no_expert_and_not_the_sentinel_is_an_error(runtime: ExpertRuntime, wrong: int) -> None:
    batch = make_batch(5, seed=10)
    batch.topk_ids[3, 1] = wrong
    allowed = f"allowed are the experts 0..{NUM_EXPERTS - 1}, and {NUM_EXPERTS} for none"
    with pytest.raises(ConfigError, match=rf"topk_ids\[3, 1\] is {wrong}; {allowed}"):
        call(runtime, 0, batch)
    batch.topk_ids[3, 1] = NUM_EXPERTS
    assert np.array_equal(call(runtime, 0, batch), expected_of(runtime).experts(0, batch))


def test_submitted_calls_overlap_and_can_be_awaited(runtime: ExpertRuntime) -> None:
    expected = expected_of(runtime)
    batches = [make_batch(30, seed=seed) for seed in range(6)]
    calls = [runtime.submit(seed % 2, *batch) for seed, batch in enumerate(batches)]
    for seed, one in reversed(list(enumerate(calls))):
        assert np.array_equal(one.result(timeout=100), expected.experts(seed % 2, batches[seed]))
        assert one.done()

    async def main() -> np.ndarray:
        result: np.ndarray = await runtime.submit(0, *batches[0])
        return result

    assert np.array_equal(asyncio.run(main()), expected.experts(0, batches[0]))


def test_a_dropped_call_does_no_harm(runtime: ExpertRuntime) -> None:
    batch = make_batch(200, seed=11)
    for _ in range(10):
        runtime.submit(0, *batch)
    assert np.array_equal(call(runtime, 0, batch), expected_of(runtime).experts(0, batch))


def test_threads_may_call_at_once_and_modes_may_change_between_calls(runtime: ExpertRuntime) -> None:
    batches = [make_batch(20 + seed, seed=seed) for seed in range(4)]
    expected = [expected_of(runtime).experts(0, batch) for batch in batches]
    wrong: list[int] = []

    def body(seed: int) -> None:
        batch, bits = batches[seed], expected[seed]
        wrong.extend(1 for _ in range(20) if not np.array_equal(call(runtime, 0, batch), bits))

    threads = [threading.Thread(target=body, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for mode in ("stream", "batched", "stream", "auto"):
        runtime.set_mode(mode)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


def test_layers_are_found_by_index_and_name_and_others_refused(runtime: ExpertRuntime) -> None:
    assert runtime.layer_index("layers.1.experts") == runtime.layer_index(1) == 1
    for layer in (2, -1, "model.layers.0.mlp"):
        with pytest.raises(ConfigError, match="has no routed experts; layers with experts: 0..1"):
            runtime.experts(layer, *make_batch(1))


def test_counters_of_both_sides_agree(runtime: ExpertRuntime) -> None:
    for _ in range(3):
        call(runtime, 0, make_batch(10))
    ours, theirs = runtime.stats()["workers"], runtime.worker_stats()
    for name in ("w0", "w1"):
        assert theirs[name]["calls"] == ours[name]["calls"]
        assert theirs[name]["rows"] == ours[name]["rows"]
        assert ours[name]["worker_compute_ns"] > 0
        assert ours[name]["state"] == "ready"
        assert sum(layer["calls"] for layer in ours[name]["layers"].values()) == ours[name]["calls"]


def test_worker_processes_tell_their_memory(runtime: ExpertRuntime) -> None:
    processes = {process.name: process for process in runtime.worker_processes()}
    assert set(processes) == {"w0", "w1"}
    for process in processes.values():
        assert process.pid > 0
        assert process.experts_per_layer == 4
        assert process.anonymous_bytes > process.weight_bytes > 0


def test_a_closed_runtime_refuses_calls_and_keeps_its_last_counters(spec: ModelSpec) -> None:
    runtime = ExpertRuntime.start(Topology.local(num_workers=1), model=spec)
    call(runtime, 0, make_batch(3))
    runtime.close()
    runtime.close()
    with pytest.raises(ConfigError, match="closed"):
        call(runtime, 0, make_batch(3))
    assert runtime.stats()["calls"] == 1


def test_a_result_that_is_taken_after_close_says_that_the_runtime_was_closed(spec: ModelSpec) -> None:
    slow = Topology.parse("version: 1\nworkers:\n  - {name: w0, backend: cpu, threads: 1, emulate: {delay_ms: 5000}}\n")
    batch = make_batch(3)
    with ExpertRuntime.start(slow, model=spec) as runtime:
        call = runtime.submit(0, batch.hidden_states, batch.topk_ids, batch.topk_weights)
    with pytest.raises(DflashError, match="the runtime was closed before this call was done; take results before") as caught:
        call.result(timeout=100)
    assert not isinstance(caught.value, WorkerError)  # no worker is to blame


def test_a_closed_runtime_cannot_be_entered_or_asked_for_worker_counters(spec: ModelSpec) -> None:
    with ExpertRuntime.start(Topology.local(num_workers=1), model=spec, transport="auto") as closed:
        pass
    with pytest.raises(ConfigError, match="closed"):
        closed.worker_stats()
    with pytest.raises(ConfigError, match="closed"):
        closed.worker_processes()
    with pytest.raises(ConfigError, match="closed"):
        closed.__enter__()


def test_a_mode_that_cannot_be_had_leaves_the_former_one_in_force_and_calls_go_on(
    runtime: ExpertRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError("no room")

    runtime.set_mode("batched", dtype="f32", reply_dtype="f32")
    for owner, step in ((runtime._placed, "plan_slots"), (runtime._parts.paths, "_retire")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, step, refuse)
            with pytest.raises(ConfigError, match="no room"):
                runtime.set_mode("stream", dtype="bf16")
        assert (runtime.settings.mode, runtime.settings.dtype, runtime.stats()["mode"]) == ("batched", "f32", "batched")
        batch = make_batch(5, seed=5)
        assert np.array_equal(call(runtime, 0, batch), expected_of(runtime).experts(0, batch))


def test_one_worker_and_four_workers_run(spec: ModelSpec) -> None:
    batch = make_batch(20, seed=12)
    for num_workers in (1, 4):
        with ExpertRuntime.start(Topology.local(num_workers=num_workers), model=spec) as runtime:
            assert np.array_equal(call(runtime, 0, batch), expected_of(runtime).experts(0, batch))


def test_a_small_arena_splits_slices_and_counts_it(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _core.plan_arena

    def short(workers: Any, slices: Any, request_dtype: str, reply_dtype: str, shared_bytes: int) -> list[_core.SlotPlan]:
        plans = real(workers, slices, request_dtype, reply_dtype, shared_bytes)
        return [
            _core.plan_slots(shards, 20, plan.num_slots, request_dtype, reply_dtype)
            for shards, plan in zip(workers, plans, strict=True)
        ]

    monkeypatch.setattr(_core, "plan_arena", short)
    with ExpertRuntime.start(Topology.local(num_workers=2), model=spec) as runtime:
        batch = make_batch(300, seed=13)
        assert np.array_equal(call(runtime, 0, batch), expected_of(runtime).experts(0, batch))
        assert runtime.stats()["splits"] > 0


def test_a_backend_that_is_not_built_and_a_transport_that_does_not_reach_are_refused(spec: ModelSpec) -> None:
    topology = Topology.parse("version: 1\nworkers:\n  - {name: gpu, backend: cuda}\n")
    with pytest.raises(UnsupportedError, match="worker gpu: .*cuda"):
        ExpertRuntime.start(topology, model=spec)
    with pytest.raises(ConfigError, match="worker w0 is reached by tcp, which does not offer it"):
        ExpertRuntime.start(Topology.local(address="tcp"), model=spec, transport="shared")
