"""Who answers for a lost worker: which shards the host's processor can compute, what is refused,
and what people are told.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dflash_moe.config import Settings, resolve_settings
from dflash_moe.errors import UnsupportedError
from dflash_moe.placement import plan_placement
from dflash_moe.placement.fallback import check_fallback, class_gap, gaps
from dflash_moe.placement.remedies import shard_remedies, worker_remedies
from dflash_moe.topology import Topology

ISA = "avx2"


@dataclass(frozen=True)
class Layer:
    index: int = 0
    name: str = "model.layers.0.mlp.experts"
    num_experts: int = 12
    stored: str = "bf16"

    def resident_bytes(self, weights: str) -> int:
        return 100

    def resident_dtype(self, weights: str) -> str:
        return {"int8": "int8_g32"}.get(weights, self.stored)


LAYERS = [Layer(), Layer(1, "model.layers.1.mlp.experts"), Layer(3, "model.layers.3.mlp.experts")]


def two_workers(second: str, more: str = "") -> Topology:
    return Topology.parse(f"version: 1\n{more}workers: [{{name: w0, threads: 1}}, {{name: w1, {second}}}]\n", "two.yaml")


def reasons(topology: Topology, layers: list[Layer] = LAYERS) -> dict[str, str]:
    return {shard.holder: reason for _, shard, reason in gaps(layers, plan_placement(layers, topology), topology, ISA)}


def test_classes_that_every_processor_computes_have_no_gap() -> None:
    assert class_gap("f32-canonical", ISA) == ""
    assert class_gap("int8-groups", ISA) == ""
    assert reasons(two_workers("threads: 1")) == {}


@pytest.mark.parametrize(("numerics", "word"), [("bf16-mma", "bf16-mma"), ("f16-dot2", "f16-dot2"), ("bf16-dot", "bf16-dot")])
def test_a_class_that_the_kernel_set_lacks_is_named(numerics: str, word: str) -> None:
    assert class_gap(numerics, ISA) == f"class {word}, which the host's kernel set {ISA} does not compute"


def test_a_card_that_has_still_to_say_its_class_counts_as_all_that_it_may_become() -> None:
    assert "bf16-mfma or bf16-wmma" in class_gap(
        two_workers("backend: hip, device: 0, activations: bf16").numerics_of("w1"), ISA
    )


def test_weights_that_are_made_at_load_cannot_be_mapped_and_those_of_the_checkpoint_can() -> None:
    made = two_workers("threads: 1, weights: int8")
    assert reasons(made) == {"w1": "weights: int8, which its worker makes of bf16 at load, so that no checkpoint has them"}
    assert reasons(made, [Layer(stored="int8_g32")]) == {}


def test_a_worker_in_this_process_needs_nobody_who_stands_in() -> None:
    assert reasons(two_workers("threads: 1, weights: int8, address: loopback")) == {}


def test_only_a_fallback_that_was_asked_for_by_name_is_refused() -> None:
    made = two_workers("backend: cuda, device: 0, activations: bf16", "host: {fallback: mapped}\n")
    # Layers of one class, so that nothing but the fallback is wrong.
    placement = plan_placement(LAYERS, made)
    with pytest.raises(UnsupportedError) as caught:
        check_fallback(LAYERS, placement, made, resolve_settings(made.stated_settings, environ={}))
    text = str(caught.value)
    assert text.startswith("two.yaml:2: host.fallback: mapped cannot compute layer 0 (model.layers.0.mlp.experts), shard 1")
    assert "worker w1 has class bf16-mma, which the host's kernel set" in text
    for overrides in ({"host_fallback": "none"}, {"required": True}, {"failure_order": ["reconnect"]}):
        check_fallback(LAYERS, placement, made, resolve_settings(made.stated_settings, environ={}, **overrides))
    check_fallback(LAYERS, placement, made, Settings())


def test_layers_with_the_same_remedies_share_a_line() -> None:
    made = two_workers("threads: 1, weights: int8")
    lines = shard_remedies(LAYERS, plan_placement(LAYERS, made), made, Settings(cpu_isa=ISA))
    assert lines == [
        "layers 0-1, 3, w0: no replica (placement.replicas is 1), reconnect (started again), "
        "host (its processor, from the mapped checkpoint)",
        "layers 0-1, 3, w1: no replica (placement.replicas is 1), reconnect (started again), "
        "no host (weights: int8, which its worker makes of bf16 at load, so that no checkpoint has them)",
    ]


def test_replicas_and_the_host_itself_are_told() -> None:
    made = two_workers("threads: 1", "placement: {replicas: 2}\nhost: {experts: {memory: 1200}}\n")
    lines = shard_remedies(LAYERS, plan_placement(LAYERS, made), made, Settings(cpu_isa=ISA))
    assert "layers 0-1, 3, host: in the host's process, which is not lost alone" in lines
    assert any(line.startswith("layers 0-1, 3, w1: replica w0, reconnect") for line in lines)


def test_remedies_come_in_the_order_that_is_asked_for_and_missing_ones_say_why() -> None:
    made = two_workers('address: "tcp://10.0.0.2:7171"')
    told = worker_remedies(made, resolve_settings(environ={}, failure_order=["host", "reconnect"], required=True))
    assert told == [
        "w0: no host (ipc.required is 1), reconnect (started again), no replica (failure.order has none)",
        "w1: no host (ipc.required is 1), reconnect (dialled again), no replica (failure.order has none)",
    ]
    assert worker_remedies(two_workers("threads: 1"), Settings(restart=False)) == [
        "w0, w1: no replica (placement.replicas is 1), no reconnect (failure.restart is off), "
        "host (its processor, from the mapped checkpoint)"
    ]
