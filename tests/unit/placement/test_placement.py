"""Placement: every expert in exactly one shard, memory respected, and errors that name layer,
expert, worker and numbers.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_moe.errors import TopologyError, UnsupportedError
from dflash_moe.model.formats.weight_formats import resident_formats
from dflash_moe.placement import HOST, Placement, plan_placement
from dflash_moe.topology import Topology

MIB = 1 << 20


@dataclass(frozen=True)
class Layer:
    index: int
    num_experts: int = 64
    expert_bytes: int = 4 * MIB
    weight_dtype: str = "bf16"

    @property
    def name(self) -> str:
        return f"model.layers.{self.index}.mlp.experts"

    def resident_bytes(self, weights: str) -> int:
        return {"auto": self.expert_bytes, "int8": self.expert_bytes // 2, "int4": self.expert_bytes // 4}[weights]

    def resident_dtype(self, weights: str) -> str:
        return resident_formats(self.weight_dtype, weights)


def layers(count: int = 2, num_experts: int = 64, expert_bytes: int = 4 * MIB) -> list[Layer]:
    return [Layer(index, num_experts, expert_bytes) for index in range(count)]


def topology(text: str) -> Topology:
    return Topology.parse(f"version: 1\n{text}", "t.yaml")


def shards(placement: Placement, layer: int = 0) -> list[tuple[int, str, tuple[int, ...]]]:
    return [(shard.shard_id, shard.holder, shard.experts) for shard in placement.layers[layer]]


def explicit(*lists: str, host: str = "") -> Topology:
    workers = "".join(f"  - {{name: w{index}, experts: {ids}}}\n" for index, ids in enumerate(lists))
    return topology(f"{host}placement: {{policy: explicit}}\nworkers:\n{workers}")


def test_even_gives_contiguous_ranges_that_differ_by_one_at_most():
    placement = plan_placement(layers(2, 8), topology("workers: [{name: a}, {name: b}, {name: c}]"))
    assert shards(placement) == shards(placement, 1) == [(0, "a", (0, 1, 2)), (1, "b", (3, 4, 5)), (2, "c", (6, 7))]
    assert placement.bytes_by_holder() == {"a": 24 * MIB, "b": 24 * MIB, "c": 16 * MIB}


def test_a_worker_with_integer_weights_is_counted_with_their_bytes():
    text = "workers: [{name: a, weights: int8}, {name: b}, {name: c, weights: int4}]"
    placement = plan_placement(layers(2, 6), topology(text))
    assert placement.bytes_by_holder() == {"a": 8 * MIB, "b": 16 * MIB, "c": 4 * MIB}
    assert [(shard.holder, shard.weights) for shard in placement.layers[0]] == [("a", "int8"), ("b", "auto"), ("c", "int4")]


def test_memory_shares_by_the_experts_that_fit_whatever_their_format():
    text = "placement: {policy: memory}\nworkers: [{name: a, memory: 16MiB}, {name: b, memory: 16MiB, weights: int4}]"
    placement = plan_placement(layers(1, 20), topology(text))
    assert [len(shard.experts) for shard in placement.layers[0]] == [4, 16]
    with pytest.raises(TopologyError, match="short"):
        plan_placement(layers(1, 21), topology(text))
    tight = "workers: [{name: a, memory: 15MiB, weights: int8}]"
    with pytest.raises(TopologyError, match="it fits 7 experts a layer"):
        plan_placement(layers(1, 8), topology(tight))


def test_workers_without_an_expert_have_no_shard():
    placement = plan_placement(layers(1, 1), Topology.local(3))
    assert shards(placement) == [(0, "w0", (0,))]
    assert placement.shards_of("w2") == ()


def test_a_swap_of_holders_keeps_the_shards():
    low, high = "{'*': 0-4}", "{'*': 5-63}"
    plans = [plan_placement(layers(), explicit(*lists)) for lists in ((low, high), (high, low))]
    one, other = ([(shard.shard_id, shard.experts) for shard in plan.layers[0]] for plan in plans)
    assert one == other
    assert [shard.holder for shard in plans[0].layers[0]] == ["w0", "w1"]
    assert [shard.holder for shard in plans[1].layers[0]] == ["w1", "w0"]


def test_shard_ids_rank_the_smallest_expert():
    where = explicit("{'*': '2,5', '1': '0-2'}", "{'*': '0,3', '1': 4}", "{'*': '1,4', '1': '3,5'}")
    placement = plan_placement(layers(2, 6), where)
    assert shards(placement) == [(0, "w1", (0, 3)), (1, "w2", (1, 4)), (2, "w0", (2, 5))]
    assert shards(placement, 1) == [(0, "w0", (0, 1, 2)), (1, "w2", (3, 5)), (2, "w1", (4,))]


def test_memory_shares_in_proportion():
    workers = "placement: {policy: memory}\nworkers: [{name: a, memory: 3GiB}, {name: b, memory: 1GiB}]"
    placement = plan_placement(layers(4, 64), topology(workers))
    assert [len(shard.experts) for shard in placement.layers[0]] == [48, 16]


def test_memory_fills_workers_to_the_last_expert():
    workers = "placement: {policy: memory}\nworkers: [{name: a, memory: 44MiB}, {name: b, memory: 36MiB}]"
    placement = plan_placement(layers(10, 2), topology(workers))
    assert placement.bytes_by_holder() == {"a": 44 * MIB, "b": 36 * MIB}


@pytest.mark.parametrize(
    ("budget", "kept"),
    [("0GiB", [0, 0]), ("25%", [16, 16]), ("100%", [64, 64]), ("1GiB", [64, 64]), ("44MiB", [6, 5]), ("3MiB", [0, 0])],
)
def test_the_host_keeps_what_fits_its_budget(budget, kept):
    placement = plan_placement(layers(), topology(f"host: {{experts: {{memory: {budget}}}}}\nworkers: [{{name: w0}}]"))
    held = [sum(len(shard.experts) for shard in layer if shard.holder == HOST) for layer in placement.layers]
    assert held == kept
    assert all(shard.shard_id == 0 for layer in placement.layers for shard in layer if shard.holder == HOST)


def test_experts_of_no_list_stay_at_the_host_where_it_has_room():
    host = "host: {experts: {memory: 32MiB}}\n"
    placement = plan_placement(layers(2, 8), explicit("{'*': 0-3}", host=host))
    assert shards(placement) == [(0, "w0", (0, 1, 2, 3)), (1, HOST, (4, 5, 6, 7))]
    with pytest.raises(TopologyError, match=r"layer 1 .*expert 3 \(and 4 more\).*budget \(host.experts.memory\) is used up"):
        plan_placement(layers(2, 8), explicit("{'*': 0-3, '1': 0-2}", host=host))


WRONG = [
    (
        explicit("{'*': 0-5}"),
        "t.yaml:2: layer 0 (model.layers.0.mlp.experts): expert 6 (and 57 more) is placed nowhere: no list of w0 has it, "
        "and the host keeps none",
    ),
    (
        explicit("{'*': 0-62}", "{'*': '0,63'}"),
        "t.yaml:5: layer 0 (model.layers.0.mlp.experts): expert 0 is placed on both w0 (line 4) and w1; list it once",
    ),
    (explicit("{'*': 0-64}"), "t.yaml:4: worker w0: expert 64 does not exist in layer 0, which has experts 0-63"),
    (explicit("{'*': 0-63, '7': 0-63}"), "t.yaml:4: worker w0: layer 7 has no routed experts; layers that have: 0..1"),
    (
        topology("workers:\n  - {name: w0, memory: 384MiB, weights_layout: packed}"),
        "t.yaml:3: worker w0 needs 512.0 MiB for 2 layers x 64 experts but has memory: 384.0 MiB; short by 128.0 MiB; "
        "it fits 48 experts a layer. Give it more memory, add a worker, or let the host keep some (host.experts.memory)",
    ),
    (
        topology("placement: {policy: memory}\nworkers: [{name: a, memory: 300MiB}, {name: b, memory: 100MiB}]"),
        "t.yaml:2: the workers need 512.0 MiB for their experts but have memory: 400.0 MiB (a 300.0 MiB, b 100.0 MiB); "
        "short by 112.0 MiB. Give them more memory, add a worker, or let the host keep some (host.experts.memory)",
    ),
    (
        topology("placement: {policy: memory}\nworkers: [{name: a, memory: 511MiB}, {name: b, memory: 1MiB}]"),
        "t.yaml:2: the workers need 512.0 MiB for their experts but have memory: 512.0 MiB (a 511.0 MiB, b 1.0 MiB); "
        "short because whole experts do not fill it. "
        "Give them more memory, add a worker, or let the host keep some (host.experts.memory)",
    ),
]


@pytest.mark.parametrize(("where", "message"), WRONG)
def test_a_placement_that_cannot_be_says_why(where, message):
    with pytest.raises(TopologyError) as caught:
        plan_placement(layers(), where)
    assert str(caught.value) == message


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_expert_is_in_one_shard_and_no_memory_is_exceeded(data):
    policy = data.draw(st.sampled_from(["even", "memory"]))
    memories = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=5))
    layout = data.draw(st.sampled_from(["auto", "packed"]))
    workers = ", ".join(f"{{name: w{index}, memory: {size}, weights_layout: {layout}}}" for index, size in enumerate(memories))
    where = topology(
        f"host: {{experts: {{memory: {data.draw(st.integers(0, 100))}%}}}}\n"
        f"placement: {{policy: {policy}}}\nworkers: [{workers}]"
    )
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=5))
    model = [Layer(index, num_experts, expert_bytes) for index, (num_experts, expert_bytes) in enumerate(sizes)]
    try:
        placement = plan_placement(model, where)
    except TopologyError:
        return  # refused, with one of the messages above
    for layer, found in zip(model, placement.layers, strict=True):
        assert sorted(expert for shard in found for expert in shard.experts) == list(range(layer.num_experts))
        assert [shard.shard_id for shard in found] == list(range(len(found)))
        assert [shard.experts[0] for shard in found] == sorted(shard.experts[0] for shard in found)
    needed = placement.bytes_by_holder()
    assert all(needed.get(f"w{index}", 0) <= size for index, size in enumerate(memories))
    shards = [(layer, shard) for layer, found in zip(model, placement.layers, strict=True) for shard in found]
    packed = sum(len(shard.experts) * layer.expert_bytes for layer, shard in shards if shard.holder not in placement.mapped)
    assert sum(needed.values()) == packed
    assert layout == "auto" or not placement.mapped
    assert plan_placement(model, where) == placement


def test_a_worker_without_the_memory_computes_from_the_mapped_checkpoint_unless_it_must_pack(caplog):
    text = "workers: [{name: a, memory: 255MiB}, {name: b, memory: 256MiB}, {name: c, weights_layout: mapped, memory: 1MiB}]"
    placement = plan_placement([Layer(0, 192, 4 << 20)], topology(text))
    assert placement.mapped == {"a", "c"}
    assert [placement.layout_of(name) for name in "abc"] == ["mapped", "packed", "mapped"]
    assert placement.bytes_by_holder() == {"a": 0, "b": 256 << 20, "c": 0}
    assert "worker a computes from the mapped checkpoint, for its packed experts need 256.0 MiB" in caplog.text
    assert placement.slots == frozenset()
    for packs, refusal in (
        ("packed", "worker a needs 256"),
        ("stored", "memory: 255.0 MiB, and its experts of one layer need 256"),
    ):
        with pytest.raises(TopologyError, match=refusal):
            plan_placement([Layer(0, 192, 4 << 20)], topology(text.replace("255MiB", f"255MiB, weights_layout: {packs}")))


@pytest.mark.parametrize("layout", ["auto", "stored"])
def test_memory_for_a_layer_but_not_for_all_is_room_for_slots(layout, caplog):
    text = (
        f"workers: [{{name: a, memory: 300MiB, weights_layout: {layout}}}, {{name: b, memory: 300MiB, weights_layout: mapped}}]"
    )
    placement = plan_placement([Layer(at, 128, 4 << 20) for at in range(3)], topology(text))
    assert placement.largest_layer("a") == 256 << 20
    assert (placement.mapped, placement.slots) == ({"a", "b"}, {"a"})
    assert placement.bytes_by_holder()["a"] == 0
    assert "worker a has memory: 300.0 MiB for experts that need 768.0 MiB" in caplog.text


def test_stored_weights_count_as_packed_ones():
    placements = [
        plan_placement([Layer(0, 8)], topology(f"workers: [{{name: a, weights_layout: {layout}}}]"))
        for layout in ("packed", "stored", "auto")
    ]
    assert placements[0] == placements[1] == placements[2]
    assert placements[0].layout_of("a") == "packed"


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ("{name: a, weights: int8, weights_layout: mapped}", "worker a keeps weights made at load; mapped needs weights: auto"),
        ("{name: a, backend: sim, simulate: cuda, weights_layout: mapped}", "only cpu computes from the mapped checkpoint"),
        ("{name: a, backend: sim, simulate: cuda, weights_layout: stored}", "only cpu computes from stored panels"),
    ],
)
def test_a_layout_that_cannot_be_says_why(worker, message):
    with pytest.raises(TopologyError, match=message):
        topology(f"workers: [{worker}]")


def test_weights_that_no_kernel_reads_are_mapped_and_said_so(caplog):
    model = [Layer(0, 8), Layer(1, 8, weight_dtype="q4_k+iq1_s")]
    placement = plan_placement(model, topology("workers: [{name: a}]\nhost: {experts: {memory: 8MiB}}"))
    assert "a" in placement.mapped
    assert "worker a computes from the mapped checkpoint, for it has weights in iq1_s, which no kernel reads" in caplog.text
    assert set(plan_placement([Layer(0, 8, weight_dtype="iq2_s")], topology("workers: [{name: a}]")).bytes_by_holder()) == {"a"}


@pytest.mark.parametrize(
    ("worker", "weight_dtype", "message"),
    [
        ("weights_layout: packed", "tq1_0", "has weights_layout: packed, and layer 0 .* has weights in tq1_0, which no kernel"),
        ("weights_layout: stored", "tq1_0", "has weights_layout: stored, and layer 0 .* has weights in tq1_0, which no kernel"),
        ("weights: int8", "bf16+nvfp4", "has weights: int8, which are packed, and layer 0 .* has weights in nvfp4"),
        (
            "backend: sim, simulate: cuda",
            "q4_k+iq3_s",
            "backend sim, and layer 0 .* has weights in iq3_s, for which cards have",
        ),
        ("backend: cuda", "iq1_m", "backend cuda, and layer 0 .* has weights in iq1_m, for which cards have no kernels"),
    ],
)
def test_weights_that_a_holder_has_no_kernels_for_are_refused_by_name(worker, weight_dtype, message):
    with pytest.raises(UnsupportedError, match=message):
        plan_placement([Layer(0, 8, weight_dtype=weight_dtype)], topology(f"workers: [{{name: a, {worker}}}]"))
