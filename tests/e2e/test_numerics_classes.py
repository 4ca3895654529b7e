"""Numerics classes from the topology to the result: the reference twin's bits, refusals before
anything loads, and reports.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import numpy as np
import pytest

from dflash_moe import ExpertRuntime, Topology, TopologyError, UnsupportedError, _core
from dflash_moe.holders import launcher
from dflash_moe.testing.tiny import routed_batch, tiny_checkpoint
from dflash_moe.topology.numerics import class_on
from tests.expert_cases import Batch, Expected

BF16_CLASS = class_on("bf16", "cpu")

NUM_EXPERTS, TOP_K, HIDDEN = 8, 3, 96
# class: (what the topology says of a worker, what that worker keeps of bf16 weights)
CLASSES = {
    "f32-canonical": ("activations: f32", "bf16"),
    BF16_CLASS: ("activations: bf16", "bf16"),
    "int8-groups": ("activations: int8, weights: int8", "int8_g32"),
}
OFFERED = [name for name in CLASSES if name in _core.numerics_classes(_core.best_isa())]


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    directory = tmp_path_factory.mktemp("classes")
    return tiny_checkpoint(directory, hidden_size=HIDDEN, num_experts=NUM_EXPERTS, top_k=TOP_K, dtype="bf16")


def two_workers(first: str, second: str, *, more: str = "") -> Topology:
    return Topology.parse(
        f"version: 1\n{more}placement: {{policy: explicit}}\nworkers:\n"
        f"  - {{name: w0, threads: 1, experts: {{'*': '0-4'}}, {first}}}\n"
        f"  - {{name: w1, threads: 1, address: loopback, experts: {{'*': '5-7'}}, {second}}}\n",
        "two.yaml",
    )


@pytest.mark.parametrize("numerics", OFFERED)
def test_workers_give_the_bits_of_the_classs_reference_twin(spec, numerics):
    asked, kept = CLASSES[numerics]
    # batched: `auto` may cut the 130 tokens, and the calls are counted
    with ExpertRuntime.start(two_workers(asked, asked), model=spec, dtype="f32", mode="batched") as runtime:
        twin = Expected(runtime.placement, spec, weight_dtype=kept, isa="reference", numerics=numerics)
        for layer, tokens in ((0, 1), (1, 7), (0, 130)):
            batch = Batch(*routed_batch(tokens, HIDDEN, NUM_EXPERTS, TOP_K, seed=tokens))
            found = runtime.experts(layer, batch.hidden_states, batch.topk_ids, batch.topk_weights)
            assert np.asarray(found).tobytes() == twin.experts(layer, batch).tobytes()
        stats = runtime.stats()
    assert stats["totals"]["calls"] == 6
    assert stats["numerics"] == {"policy": "exact", "classes": {"w0": numerics, "w1": numerics}, "mixed_layers": []}


def test_classes_differ_from_each_other(spec):
    batch = routed_batch(5, HIDDEN, NUM_EXPERTS, TOP_K)
    results = []
    for numerics in OFFERED:
        asked, _ = CLASSES[numerics]
        with ExpertRuntime.start(two_workers(asked, asked), model=spec, dtype="f32") as runtime:
            results.append(np.asarray(runtime.experts(0, *batch)))
    assert len({result.tobytes() for result in results}) == len(OFFERED)
    for other in results[1:]:
        assert np.sqrt(np.mean((other - results[0]) ** 2)) < 0.05 * results[0].std()


@pytest.fixture
def nothing_starts(monkeypatch):
    def refuse(*_):
        pytest.fail("a worker was started")

    monkeypatch.setattr(launcher, "_spawn", refuse)


@pytest.mark.usefixtures("nothing_starts")
def test_two_classes_in_one_layer_are_refused_with_both_workers_and_the_way_out(spec):
    with pytest.raises(TopologyError) as caught:
        ExpertRuntime.start(two_workers("activations: f32", "activations: bf16"), model=spec)
    text = str(caught.value)
    assert text.startswith(
        "two.yaml:5: layer 0 (model.layers.0.mlp.experts): worker w0 computes in f32-canonical and worker w1 "
    )
    assert f"in {BF16_CLASS}; " in text
    assert "`numerics: close`" in text


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("asked", "remedy"), [("activations: int8", "`weights: int8` or `activations: f32`"),
                          ("activations: bf16, weights: int4", "`activations: f32`")]
)  # fmt: skip
def test_weights_that_the_class_does_not_take_are_refused_with_the_remedy(spec, asked, remedy):
    with pytest.raises(UnsupportedError) as caught:
        ExpertRuntime.start(two_workers(asked, asked), model=spec)
    text = str(caught.value)
    assert text.startswith("two.yaml:4: worker w0 has activations: ")
    assert "layer 0 (model.layers.0.mlp.experts) has weights in " in text
    assert text.endswith(f"give it {remedy}")


@pytest.mark.parametrize("address", ["shared", "loopback"])
def test_a_worker_whose_kernel_set_lacks_the_class_is_refused_before_it_loads(spec, address):
    where = "" if address == "shared" else "address: loopback, "
    topology = Topology.parse(f"version: 1\nworkers:\n  - {{name: w0, threads: 1, {where}activations: bf16}}\n")
    with pytest.raises(
        UnsupportedError, match=f"worker w0: its kernel set scalar does not compute numerics class {BF16_CLASS}; it "
    ):
        ExpertRuntime.start(topology, model=spec, cpu_isa="scalar", on_loading=lambda *_: pytest.fail("it loads"))


def test_close_lets_two_classes_meet_and_reports_the_layers(spec, caplog):
    """On the reference set, which computes every class on every processor."""
    mixed = two_workers("activations: f32", "activations: bf16", more="ipc: {numerics: close}\n")
    batch = Batch(*routed_batch(9, HIDDEN, NUM_EXPERTS, TOP_K, seed=3))
    with ExpertRuntime.start(mixed, model=spec, dtype="f32", cpu_isa="reference") as runtime:
        found = np.asarray(runtime.experts(0, batch.hidden_states, batch.topk_ids, batch.topk_weights))
        numerics = runtime.stats()["numerics"]
        placement = runtime.placement
    assert numerics == {"policy": "close", "classes": {"w0": "f32-canonical", "w1": BF16_CLASS}, "mixed_layers": [0, 1]}
    assert f"2 of 2 layers are computed in several classes: w0 f32-canonical, w1 {BF16_CLASS}" in caplog.text
    expected = np.zeros_like(found)
    for at, name in enumerate(("f32-canonical", BF16_CLASS)):
        alone = type(placement)(tuple((shards[at],) for shards in placement.layers), placement.expert_bytes)
        twin = Expected(alone, spec, weight_dtype="bf16", isa="reference", numerics=name)
        expected += twin.experts(0, batch)
    assert found.tobytes() == expected.tobytes()


def test_experts_kept_at_the_host_compute_in_the_workers_class_unless_it_says_otherwise(spec):
    def classes(host: str, workers: str) -> dict[str, str]:
        topology = Topology.parse(
            f"version: 1\nhost: {{experts: {{memory: 25%}}{host}}}\n"
            f"workers:\n  - {{name: w0, threads: 1, activations: {workers}}}\n"
        )
        with ExpertRuntime.start(topology, model=spec, numerics="close", cpu_isa="reference") as runtime:
            return runtime.stats()["numerics"]["classes"]

    assert classes("", "bf16") == {"host": BF16_CLASS, "w0": BF16_CLASS}
    assert classes(", activations: f32", "bf16") == {"host": "f32-canonical", "w0": BF16_CLASS}


def test_a_topology_names_the_class_of_another_kind_of_processor(spec):
    """The two classes of bf16 dot products by their own names, on the reference set, which computes
    both.
    """
    batch = Batch(*routed_batch(9, HIDDEN, NUM_EXPERTS, TOP_K, seed=4))
    found = {}
    for numerics in ("bf16-dot", "bf16-bfdot"):
        asked = f"activations: {numerics}"
        with ExpertRuntime.start(two_workers(asked, asked), model=spec, dtype="f32", cpu_isa="reference") as runtime:
            assert runtime.stats()["numerics"]["classes"] == {"w0": numerics, "w1": numerics}
            twin = Expected(runtime.placement, spec, weight_dtype="bf16", isa="reference", numerics=numerics)
            result = np.asarray(runtime.experts(0, batch.hidden_states, batch.topk_ids, batch.topk_weights))
            assert result.tobytes() == twin.experts(0, batch).tobytes()
        found[numerics] = result
    difference = found["bf16-bfdot"] - found["bf16-dot"]
    assert 0 < np.sqrt(np.mean(difference**2)) < 1e-3 * found["bf16-dot"].std()
