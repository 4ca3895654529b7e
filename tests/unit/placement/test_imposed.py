"""Shards that are fixed already are given to whatever holders there are, and keep their ids,
experts and classes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.placement import plan_placement
from dflash_moe.placement.imposed import impose, settle
from dflash_moe.placement.preset import Offer
from dflash_moe.topology import Topology
from dflash_moe.topology.spec import ShardTerms


@dataclass(frozen=True)
class Layer:
    index: int
    num_experts: int = 8
    name: str = "layer"

    def resident_dtype(self, weights: str) -> str:
        return "bf16"

    def resident_bytes(self, weights: str) -> int:
        return 100


THREE = tuple(ShardTerms(experts) for experts in ((0, 1, 2), (3, 5), (4, 6, 7)))
LAYERS = (Layer(0), Layer(1))


def placed(topology: Topology, shards=(THREE, THREE)):
    return plan_placement(LAYERS, impose(topology, shards)).layers


@pytest.mark.parametrize("num_workers", range(1, 6))
def test_any_number_of_workers_holds_the_same_shards(num_workers):
    for shards in placed(Topology.local(num_workers)):
        assert [shard.shard_id for shard in shards] == [0, 1, 2]
        assert tuple(shard.experts for shard in shards) == tuple(terms.experts for terms in THREE)
        assert len({shard.holder for shard in shards}) == min(3, num_workers)


def test_the_worker_with_fewest_experts_of_a_layer_gets_the_next_shard():
    holders = [[shard.holder for shard in shards] for shards in placed(Topology.local(2))]
    assert holders == [["w0", "w1", "w1"]] * 2


def test_the_host_takes_whole_shards_within_its_budget():
    topology = Topology.parse("version: 1\nhost: {experts: {memory: 500}}\nworkers:\n  - {name: w0, backend: cpu}\n")
    holders = [[shard.holder for shard in shards] for shards in placed(topology)]
    # 300 and 200 bytes of the first layer; nothing is left for the second.
    assert holders == [["host", "host", "w0"], ["w0", "w0", "w0"]]


def test_a_worker_with_room_is_preferred_to_one_without():
    topology = Topology.parse(
        "version: 1\nworkers:\n  - {name: small, backend: cpu, memory: 350}\n  - {name: large, backend: cpu, memory: 2000}\n"
    )
    holders = [[shard.holder for shard in shards] for shards in placed(topology)]
    assert holders == [["small", "large", "large"], ["large", "large", "large"]]


INT8 = tuple(ShardTerms(terms.experts, numerics="int8-groups") for terms in THREE)
OFFER = Offer(("f32-canonical", "int8-groups"), "avx2")


def settled(shards, offer: Offer):
    topology = impose(Topology.local(1), (shards, THREE))
    return settle(plan_placement(LAYERS, topology), (shards, THREE), {"w0": offer})


def test_a_worker_computes_each_layer_in_its_own_class():
    classes = [{shard.numerics for shard in layer} for layer in settled(INT8, OFFER).layers]
    assert classes == [{"int8-groups"}, {"f32-canonical"}]


def test_a_class_that_a_holder_lacks_is_refused():
    with pytest.raises(UnsupportedError, match=r"worker w0 \(avx2\) does not compute it"):
        settled(INT8, Offer(("f32-canonical",), "avx2"))


def test_whoever_stands_in_for_a_holder_must_compute_the_class_too():
    two = Topology.local(2)
    two = replace(two, placement=replace(two.placement, replicas=2))
    placement = plan_placement(LAYERS, impose(two, (INT8, THREE)))
    assert all(len(shard.holders) == 2 for layer in placement.layers for shard in layer)
    settle(placement, (INT8, THREE), {"w0": OFFER, "w1": OFFER})
    with pytest.raises(UnsupportedError, match=r"worker w1 \(avx2\) does not compute it"):
        settle(placement, (INT8, THREE), {"w0": OFFER, "w1": Offer(("f32-canonical",), "avx2")})


def test_a_card_of_another_kind_is_refused():
    shards = (ShardTerms(tuple(range(8)), numerics="bf16-mma", architecture="sm_90"),)
    offer = Offer(("f32-canonical", "bf16-mma"), "sm_80")
    with pytest.raises(UnsupportedError, match="sm_90 is asked for, and worker w0 is a sm_80"):
        settled(shards, offer)


def test_without_classes_holders_keep_their_own():
    shards = tuple(ShardTerms(terms.experts, numerics="") for terms in THREE)
    where = Topology.parse("version: 1\nworkers:\n  - {name: w0, backend: cpu, activations: int8}\n")
    topology = impose(where, (shards, shards))
    placement = plan_placement(LAYERS, topology)
    assert {shard.numerics for layer in placement.layers for shard in layer} == {"int8-groups"}
    assert settle(placement, (shards, shards), {"w0": OFFER}) == placement


@pytest.mark.parametrize(
    "shards",
    [(THREE,), (THREE, THREE[:2]), (THREE, (*THREE, ShardTerms((7,)))), (THREE, (*THREE, ShardTerms((8,))))],
    ids=["a layer is missing", "experts are missing", "an expert is there twice", "one that does not exist"],
)
def test_a_map_of_another_model_is_refused(shards):
    with pytest.raises(ConfigError, match="the shard map"):
        placed(Topology.local(2), shards)
