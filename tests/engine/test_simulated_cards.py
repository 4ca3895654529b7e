"""GPU workers through the whole path, on simulated cards: the kernels of both vendors, the plug-in,
the worker and the host.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.models.families import tiny_options
from dflash_moe import ConfigError, ExpertRuntime, Topology, TopologyError, UnsupportedError, _core
from dflash_moe.model.make import make_checkpoint
from dflash_moe.testing.tiny import routed_batch, tiny_checkpoint
from dflash_moe.topology import MemoryBudget, WorkerSpec
from tests.expert_cases import Batch, Expected

NUM_EXPERTS, TOP_K, HIDDEN = 9, 3, 96
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CARD_TOPOLOGIES = (
    "dual_radeon_pro_vii.yaml",
    "radeon_pro_vii_and_tesla_p4.yaml",
    "cuda_host_and_hip_worker.yaml",
    "cuda_host_and_cpu_workers.yaml",
)
MIXED = """
version: 1
placement: {policy: explicit}
workers:
  - {name: helper, backend: cpu, threads: 1, experts: {'*': '0-2'}}
  - {name: green, backend: sim, simulate: cuda, experts: {'*': '3-5'}}
  - {name: red, backend: sim, simulate: hip, address: %s, experts: {'*': '6-8'}}
"""


@pytest.fixture(scope="module", params=["bf16", pytest.param("f32", marks=pytest.mark.long)])
def spec(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("cards")
    return tiny_checkpoint(directory, hidden_size=HIDDEN, num_experts=NUM_EXPERTS, top_k=TOP_K, dtype=request.param)


@pytest.mark.parametrize("address", ["unix", "loopback"])
def test_a_processor_and_cards_of_both_vendors_give_the_reference_bits_in_one_layer(spec, address):
    with ExpertRuntime.start(Topology.parse(MIXED % address), model=spec, dtype="f32") as runtime:
        twin = Expected(runtime.placement, spec, weight_dtype=spec.dtype, isa="reference")
        for layer, tokens in ((0, 40), (1, 130)):
            batch = Batch(*routed_batch(tokens, HIDDEN, NUM_EXPERTS, TOP_K, seed=tokens))
            found = runtime.experts(layer, batch.hidden_states, batch.topk_ids, batch.topk_weights)
            assert np.asarray(found).tobytes() == twin.experts(layer, batch).tobytes()
        stats = runtime.stats()
    assert {name for name, counts in stats["workers"].items() if counts["calls"]} == {"helper", "green", "red"}


@pytest.mark.parametrize("name", CARD_TOPOLOGIES)
def test_the_topologies_of_real_machines_run_with_simulated_cards(spec, name):
    shipped = Topology.load(CONFIGS / name)
    vendor, _, _ = shipped.host.device.partition(":")
    assert vendor in ("cuda", "hip"), "a topology of this kind has a card as its host"
    # Of the toy's experts a share stays at the host: real cards hold them all.
    host = replace(shipped.host, device="sim:0", simulate=vendor, experts_memory=MemoryBudget(fraction=0.4))
    workers = tuple(simulated(worker) for worker in shipped.workers)
    with ExpertRuntime.start(replace(shipped, host=host, workers=workers), model=spec, dtype="f32") as runtime:
        twin = Expected(runtime.placement, spec, weight_dtype=spec.dtype, isa="reference")
        batch = Batch(*routed_batch(40, HIDDEN, NUM_EXPERTS, TOP_K, seed=3))
        found = runtime.experts(0, batch.hidden_states, batch.topk_ids, batch.topk_weights)
        assert np.asarray(found).tobytes() == twin.experts(0, batch).tobytes()
        counts = runtime.stats()["workers"]
    assert all(counts[name]["calls"] for name in ("host", *(worker.name for worker in shipped.workers)))


@pytest.mark.transformers
@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss"])
def test_a_model_on_a_processor_and_cards_of_both_vendors_has_parity_with_its_own_experts(arch, tmp_path):
    from dflash_moe.proofs.verify import verify

    make_checkpoint(tiny_options(arch), tmp_path)
    topology = Topology.parse(
        "version: 1\nworkers:\n  - {name: helper, backend: cpu, threads: 1}\n"
        "  - {name: green, backend: sim, simulate: cuda}\n  - {name: red, backend: sim, simulate: hip}\n"
    )
    report = verify(tmp_path, topology, dtype="bf16")
    assert report.excesses == []
    assert report.remote_calls > 0
    assert all(layer.calls == layer.expected_calls == 3 and layer.equal_in_stream for layer in report.layers)


def simulated(worker: WorkerSpec) -> WorkerSpec:
    """The same worker on this machine, with a simulated card in the place of a real one."""
    here = replace(worker, address=None, threads=1)
    return here if worker.backend == "cpu" else replace(here, backend="sim", simulate=worker.backend, device=None)


def test_int4_weights_on_a_card_give_the_bits_of_the_processor(spec):
    text = "version: 1\nworkers: [{name: w0, weights: int4, %s}]"
    batch = routed_batch(7, HIDDEN, NUM_EXPERTS, TOP_K)
    results = []
    for backend in ("backend: cpu, threads: 1", "backend: sim, simulate: cuda"):
        with ExpertRuntime.start(Topology.parse(text % backend), model=spec) as runtime:
            results.append(np.asarray(runtime.experts(0, *batch)).tobytes())
    assert results[0] == results[1]


def test_a_card_without_its_plug_in_or_driver_is_refused_with_worker_and_reason(spec):
    if _core.probe_backend("cuda")["devices"]:
        pytest.skip("this machine has a card")
    topology = Topology.parse("version: 1\nworkers: [{name: green, backend: cuda, device: 3}]")
    with pytest.raises(UnsupportedError, match=r"worker green: .*cuda"):
        ExpertRuntime.start(topology, model=spec)


def test_a_class_that_the_card_lacks_is_refused_naming_the_device(spec):
    worker = "{name: green, backend: sim, simulate: cuda, activations: bf16-wmma}"
    topology = Topology.parse(f"version: 1\nworkers: [{worker}]")
    with pytest.raises(UnsupportedError, match=r"worker green: its device .* does not compute numerics class bf16-wmma; it "):
        ExpertRuntime.start(topology, model=spec)


@pytest.mark.parametrize(("vendor", "numerics"), [("cuda", "bf16-mma"), ("hip", "bf16-mfma")])
def test_matrix_units_give_the_same_bits_whichever_card_holds_an_expert(spec, vendor, numerics):
    batch = routed_batch(40, HIDDEN, NUM_EXPERTS, TOP_K)
    replies = []
    for halves in (("0-4", "5-8"), ("5-8", "0-4")):
        workers = "".join(
            f"  - {{name: w{at}, backend: sim, simulate: {vendor}, activations: bf16, experts: {{'*': '{half}'}}}}\n"
            for at, half in enumerate(halves)
        )
        topology = Topology.parse(f"version: 1\nplacement: {{policy: explicit}}\nworkers:\n{workers}")
        with ExpertRuntime.start(topology, model=spec, dtype="f32") as runtime:
            replies.append(np.asarray(runtime.experts(0, *batch)))
            stats = runtime.stats()
        assert stats["numerics"]["classes"] == {"w0": numerics, "w1": numerics}
        assert all(count["calls"] for count in stats["workers"].values())
    assert replies[0].tobytes() == replies[1].tobytes()
    with ExpertRuntime.start(Topology.parse("version: 1\nworkers: [{name: w0}]"), model=spec, dtype="f32") as runtime:
        canonical = np.asarray(runtime.experts(0, *batch))
    moved = np.abs(replies[0] - canonical).max() / np.abs(canonical).max()
    assert 1e-5 < moved < 3e-2  # rows and weights rounded to bf16, no more


def test_bf16_of_experts_at_the_host_is_the_class_of_its_card(spec):
    topology = Topology.parse(
        "version: 1\nhost: {device: 'sim:0', simulate: hip, experts: {memory: 40%}}\n"
        "workers: [{name: far, backend: sim, simulate: hip, activations: bf16}]\n"
    )
    with ExpertRuntime.start(topology, model=spec) as runtime:
        assert runtime.stats()["numerics"]["classes"] == {"host": "bf16-mfma", "far": "bf16-mfma"}
        assert np.isfinite(np.asarray(runtime.experts(0, *routed_batch(8, HIDDEN, NUM_EXPERTS, TOP_K)))).all()


def test_pairs_of_f16_give_the_same_bits_whichever_card_holds_an_expert_and_are_nearer_than_bf16(spec):
    batch = routed_batch(40, HIDDEN, NUM_EXPERTS, TOP_K)
    replies = {"f16": [], "bf16": []}
    for activations, halves in (("f16", ("0-4", "5-8")), ("f16", ("5-8", "0-4")), ("bf16", ("0-4", "5-8"))):
        workers = "".join(
            f"  - {{name: w{at}, backend: sim, simulate: hip, activations: {activations}, experts: {{'*': '{half}'}}}}\n"
            for at, half in enumerate(halves)
        )
        topology = Topology.parse(f"version: 1\nplacement: {{policy: explicit}}\nworkers:\n{workers}")
        with ExpertRuntime.start(topology, model=spec, dtype="f32") as runtime:
            replies[activations].append(np.asarray(runtime.experts(0, *batch)))
            stats = runtime.stats()
        assert set(stats["numerics"]["classes"].values()) == {{"f16": "f16-dot2", "bf16": "bf16-mfma"}[activations]}
        assert all(count["calls"] for count in stats["workers"].values())
    assert replies["f16"][0].tobytes() == replies["f16"][1].tobytes()
    with ExpertRuntime.start(Topology.parse("version: 1\nworkers: [{name: w0}]"), model=spec, dtype="f32") as runtime:
        canonical = np.asarray(runtime.experts(0, *batch))
    moved = {name: np.abs(found[0] - canonical).max() / np.abs(canonical).max() for name, found in replies.items()}
    assert 0 < moved["f16"] < moved["bf16"] / 4  # 11 bits instead of 8
    assert moved["f16"] < 4e-3


def test_pairs_of_f16_are_refused_by_name_where_a_card_or_a_processor_lacks_them(spec):
    for entry, named in (("backend: sim, simulate: cuda", "bf16-mma"), ("backend: cpu", "int8-groups")):
        topology = Topology.parse(f"version: 1\nworkers: [{{name: green, {entry}, activations: f16}}]")
        with pytest.raises(UnsupportedError, match=rf"worker green: .*does not compute numerics class f16-dot2; .*{named}"):
            ExpertRuntime.start(topology, model=spec)


def test_matrix_units_of_two_vendors_do_not_meet_in_a_layer_unless_allowed(spec):
    entry = "{{name: {0}, backend: sim, simulate: {0}, activations: bf16}}"
    workers = ", ".join(entry.format(vendor) for vendor in ("cuda", "hip"))
    with pytest.raises(TopologyError, match=r"cuda computes in bf16-mma and worker hip in its card's bf16-mfma or"):
        ExpertRuntime.start(Topology.parse(f"version: 1\nworkers: [{workers}]"), model=spec)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_int8_activations_give_the_same_bits_whoever_of_processor_and_cards_holds_an_expert(spec, weights):
    entries = ("backend: cpu, threads: 1", "backend: sim, simulate: cuda", "backend: sim, simulate: hip")
    batches = [Batch(*routed_batch(tokens, HIDDEN, NUM_EXPERTS, TOP_K, seed=tokens)) for tokens in (4, 90)]
    replies = []
    for turn in range(len(entries)):
        workers = "".join(
            f"  - {{name: w{at}, {entries[(at + turn) % 3]}, weights: {weights}, activations: int8, "
            f"experts: {{'*': '{3 * at}-{3 * at + 2}'}}}}\n"
            for at in range(3)
        )
        topology = Topology.parse(f"version: 1\nplacement: {{policy: explicit}}\nworkers:\n{workers}")
        with ExpertRuntime.start(topology, model=spec, dtype="f32") as runtime:
            found = [runtime.experts(0, batch.hidden_states, batch.topk_ids, batch.topk_weights) for batch in batches]
            replies.append([np.asarray(reply).tobytes() for reply in found])
            counts = runtime.stats()["workers"]
        assert {name for name, count in counts.items() if count["calls"]} == {"w0", "w1", "w2"}
    assert replies[0] == replies[1] == replies[2]


def test_too_little_memory_of_the_device_names_worker_device_shortfall_and_what_fits(spec, monkeypatch):
    bounds = "dflash_moe.holders.memory_check._memory_bounds"
    monkeypatch.setattr(bounds, lambda member: [1000] if member.name == "green" else [])
    topology = Topology.parse("version: 1\nworkers: [{name: green, backend: sim, simulate: cuda}]")
    with pytest.raises(ConfigError, match=r"worker green on device sim:0 \(.*\) need .* short, 0 of the 18 experts fit"):
        ExpertRuntime.start(topology, model=spec)
