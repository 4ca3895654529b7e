"""Replicas: who holds a shard beside its first holder, and what is refused before anything starts.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from dflash_moe.errors import TopologyError
from dflash_moe.placement import Placement, plan_placement
from dflash_moe.topology import Topology
from dflash_moe.topology.write import to_yaml


@dataclass(frozen=True)
class Layer:
    index: int = 0
    name: str = "model.layers.0.mlp.experts"
    num_experts: int = 12
    expert_bytes: int = 100
    dtype: str = "bf16"

    def resident_bytes(self, weights: str) -> int:
        return {"int8": 50}.get(weights, self.expert_bytes)

    def resident_dtype(self, weights: str) -> str:
        return {"int8": "int8_g32"}.get(weights, self.dtype)


def topology(replicas: int, workers: int = 3, **changes: object) -> Topology:
    made = Topology.local(num_workers=workers)
    placement = dataclasses.replace(made.placement, replicas=replicas)
    return dataclasses.replace(made, placement=placement, **changes)


def with_worker(made: Topology, name: str, **changes: object) -> Topology:
    workers = tuple(dataclasses.replace(worker, **changes) if worker.name == name else worker for worker in made.workers)  # type: ignore[arg-type]
    return dataclasses.replace(made, workers=workers)


def holders(placement: Placement) -> list[tuple[str, ...]]:
    return [shard.holders for shard in placement.layers[0]]


def test_each_shard_is_held_by_its_worker_and_those_after_it() -> None:
    placement = plan_placement([Layer()], topology(2))
    assert holders(placement) == [("w0", "w1"), ("w1", "w2"), ("w2", "w0")]
    assert holders(plan_placement([Layer()], topology(3))) == [("w0", "w1", "w2"), ("w1", "w2", "w0"), ("w2", "w0", "w1")]
    assert placement.bytes_by_holder() == {"w0": 800, "w1": 800, "w2": 800}


def test_replicas_change_no_shard() -> None:
    alone, replicated = (plan_placement([Layer()], topology(replicas)) for replicas in (1, 3))
    assert [(shard.shard_id, shard.holder, shard.experts) for shard in alone.layers[0]] == [
        (shard.shard_id, shard.holder, shard.experts) for shard in replicated.layers[0]
    ]


def test_a_worker_without_room_is_passed_over() -> None:
    made = with_worker(topology(2), "w1", memory=400)
    assert holders(plan_placement([Layer()], made)) == [("w0", "w2"), ("w1", "w2"), ("w2", "w0")]


def test_replicas_that_fit_nowhere_are_refused_with_memory_and_shard() -> None:
    made = topology(2)
    for name in ("w0", "w1", "w2"):
        made = with_worker(made, name, memory=700)
    words = r"placement\.replicas is 2: layer 0 .*shard 0 needs 400 bytes .* than w0, and w1 has 300 bytes"
    with pytest.raises(TopologyError, match=words):
        plan_placement([Layer()], made)


def test_more_replicas_than_workers_are_refused() -> None:
    with pytest.raises(TopologyError, match=r"placement\.replicas is 4, and there are 3 workers"):
        plan_placement([Layer()], topology(4))


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"weights": "int8"}, "weights: worker w0 has auto, worker w1 int8"), ({"activations": "int8"}, "numerics")],
)
def test_holders_that_would_compute_other_bits_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(TopologyError, match=f"disagree in {words}"):
        plan_placement([Layer()], with_worker(topology(2), "w1", **changes))


def test_under_a_preset_one_holder_that_states_its_class_binds_the_other() -> None:
    made = dataclasses.replace(with_worker(topology(2), "w1", activations="int8"), preset="fast")
    assert holders(plan_placement([Layer()], made)) == [("w0", "w1"), ("w1", "w2"), ("w2", "w0")]
    with pytest.raises(TopologyError, match="disagree in numerics: worker w0 has f32-canonical, worker w1 int8-groups"):
        plan_placement([Layer()], with_worker(made, "w0", activations="f32"))


def test_a_worker_that_maps_its_weights_stands_in_without_memory() -> None:
    made = with_worker(topology(2), "w1", weights_layout="mapped", memory=1)
    placement = plan_placement([Layer()], made)
    assert holders(placement) == [("w0", "w1"), ("w1", "w2"), ("w2", "w0")]
    assert placement.mapped == {"w1"}
    needed = placement.bytes_by_holder()
    assert needed["w1"] == 0
    # The other one holds all shards in its memory.
    assert (needed["w0"], needed["w2"]) == (800, 800)


def test_a_replica_of_weights_that_no_kernel_reads_is_mapped_too() -> None:
    placement = plan_placement([Layer(dtype="iq1_s")], topology(2))
    assert placement.mapped == {"w0", "w1", "w2"}


def test_experts_at_the_host_have_no_replicas() -> None:
    made = topology(2)
    host = dataclasses.replace(made.host, experts_memory=type(made.host.experts_memory)(num_bytes=300))
    placement = plan_placement([Layer()], dataclasses.replace(made, host=host))
    assert [shard.holders for shard in placement.layers[0] if shard.holder == "host"] == [("host",)]
    assert all(len(shard.holders) == 2 for shard in placement.layers[0] if shard.holder != "host")


def test_the_key_is_read_and_written() -> None:
    text = "version: 1\nplacement: {replicas: 2}\nworkers:\n  - name: a\n  - name: b\n"
    made = Topology.parse(text, source="t.yaml")
    assert made.placement.replicas == 2
    assert Topology.parse(to_yaml(made), source="again.yaml").placement.replicas == 2
    with pytest.raises(TopologyError, match=r"t\.yaml:2"):
        Topology.parse(text.replace("2}", "0}"), source="t.yaml")
