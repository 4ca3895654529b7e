"""Changes of who holds what: which shards a newcomer takes, what is refused, and who comes first.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import pytest

from dflash_moe.errors import ConfigError
from dflash_moe.placement import Placement
from dflash_moe.placement.elastic import (
    Newcomer,
    Place,
    balanced,
    choose_shards,
    only_at,
    with_holder,
    without_holder,
)
from dflash_moe.placement.shards import Shard
from dflash_moe.topology import HOST, ExpertSelection, WorkerSpec


@dataclasses.dataclass(frozen=True)
class Layer:
    index: int
    num_experts: int = 12
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        return f"model.layers.{self.index}.mlp.experts"

    def resident_bytes(self, weights: str) -> int:
        return {"int8": 50}.get(weights, 100)

    def resident_dtype(self, weights: str) -> str:
        return {"int8": "int8_g32"}.get(weights, self.dtype)


LAYERS = [Layer(0), Layer(3)]
MEMBERS = ("w0", "w1", "w2")
# A shard of four experts takes 400 bytes.
SHARDS = tuple(Shard(index, f"w{index}", tuple(range(4 * index, 4 * index + 4))) for index in range(3))
PLACEMENT = Placement((SHARDS, SHARDS), ({"auto": 100}, {"auto": 100}))
ALL = [(at, shard) for at in range(2) for shard in range(3)]
EVEN: dict[Place, float] = dict.fromkeys(ALL, 1.0)


def newcomer(room: int | None = None, numerics: tuple[str, ...] = ("f32-canonical",), **changes: object) -> Newcomer:
    return Newcomer(WorkerSpec("new", **changes), numerics, room)  # type: ignore[arg-type]


def choose(found: Newcomer, placement: Placement = PLACEMENT, load: dict[Place, float] | None = None) -> list[Place]:
    return choose_shards(LAYERS, placement, found, EVEN if load is None else load, MEMBERS)


def changed(**changes: object) -> Placement:
    """The placement whose first shard of all is another one."""
    first = dataclasses.replace(SHARDS[0], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(PLACEMENT, layers=((first, *SHARDS[1:]), SHARDS))


def test_all_shards_are_taken_where_they_fit() -> None:
    assert sorted(choose(newcomer())) == ALL
    assert sorted(choose(newcomer(2400))) == ALL
    assert len(choose(newcomer(2399))) == 5


def test_the_most_loaded_come_first_and_a_second_holder_halves_a_load() -> None:
    load = {**EVEN, (0, 1): 10.0, (1, 2): 7.0}
    assert choose(newcomer(800), load=load) == [(0, 1), (1, 2)]
    shared = with_holder(PLACEMENT, "w0", [(0, 1)], MEMBERS)
    assert choose(newcomer(400), shared, load) == [(1, 2)]


def test_a_newcomer_that_maps_its_weights_needs_no_room() -> None:
    assert sorted(choose(newcomer(0, weights_layout="mapped"))) == ALL
    more = with_holder(PLACEMENT, "new", [(0, 1)], (*MEMBERS, "new"), is_mapped=True)
    assert more.mapped == {"new"}
    assert more.bytes_by_holder() == {**PLACEMENT.bytes_by_holder(), "new": 0}
    # A worker of the same name that is added later may pack.
    assert with_holder(more, "new", [(0, 1)], MEMBERS).mapped == frozenset()


def test_weights_that_no_kernel_reads_packed_are_only_for_a_newcomer_that_maps_them() -> None:
    unread = dataclasses.replace(PLACEMENT, mapped=frozenset(MEMBERS))
    layers = [dataclasses.replace(layer, dtype="iq1_s") for layer in LAYERS]
    with pytest.raises(ConfigError, match="shard 0 has weights in iq1_s, which no kernel reads packed; say weights_layout"):
        choose_shards(layers, unread, newcomer(), EVEN, MEMBERS)
    assert sorted(choose_shards(layers, unread, newcomer(weights_layout="mapped"), EVEN, MEMBERS)) == ALL


def test_a_shard_that_nobody_holds_comes_before_all_others() -> None:
    load = {**EVEN, (0, 1): 10.0}
    assert choose_shards(LAYERS, PLACEMENT, newcomer(800), load, ("w0", "w1")) == [(0, 2), (1, 2)]


def test_a_large_shard_that_does_not_fit_leaves_room_for_small_ones() -> None:
    large = changed(experts=(0, 1, 2, 3, 12, 13, 14, 15))
    assert choose(newcomer(500), large, {**EVEN, (0, 0): 9.0, (1, 1): 5.0}) == [(1, 1)]


def test_experts_that_are_listed_are_taken_and_no_others() -> None:
    listed = ExpertSelection(MappingProxyType({"3": (0, 1, 2, 3, 8, 9, 10, 11)}))
    assert sorted(choose(newcomer(experts=listed))) == [(1, 0), (1, 2)]


@pytest.mark.parametrize(
    ("found", "placement", "text"),
    [
        (newcomer(399), PLACEMENT, r"layer 0 \(model.*\), shard 0 needs 400 bytes of memory, and 399 bytes are left there"),
        (
            newcomer(weights="int8"),
            PLACEMENT,
            "shard 0: its holders would disagree in weights: worker w0 has auto, worker new int8",
        ),
        (newcomer(numerics=("bf16-dot",)), PLACEMENT, "disagree in numerics: worker w0 has f32-canonical, worker new bf16-dot"),
    ],
)
def test_a_newcomer_that_can_hold_nothing_is_refused(found: Newcomer, placement: Placement, text: str) -> None:
    with pytest.raises(ConfigError, match="worker new is not added: .*" + text):
        choose(found, placement)


@pytest.mark.parametrize(
    ("experts", "placement", "room", "text"),
    [
        ({"*": (0, 1)}, PLACEMENT, None, "lists 2 of the 4 experts of layer 0 .*, shard 0; shards never change"),
        ({"1": (0,)}, PLACEMENT, None, "lists no experts of any layer"),
        ({"0": (12,)}, PLACEMENT, None, "expert 12 does not exist in layer 0"),
        ({"*": (0, 1, 2, 3)}, PLACEMENT, 700, "shard 0 needs 400 bytes of memory, and 300 bytes are left there"),
        ({"0": (0, 1, 2, 3)}, changed(holder=HOST), None, "is computed in the host's own process"),
    ],
)
def test_experts_that_cannot_be_had_are_refused(
    experts: dict[str, tuple[int, ...]], placement: Placement, room: int | None, text: str
) -> None:
    with pytest.raises(ConfigError, match="worker new is not added: .*" + text):
        choose(newcomer(room, experts=ExpertSelection(MappingProxyType(experts))), placement)


def test_shards_that_do_not_suit_are_left_out_where_others_do() -> None:
    for placement in (changed(holder=HOST), changed(weights="int8"), changed(numerics="bf16-dot")):
        assert sorted(choose(newcomer(), placement)) == ALL[1:]


def test_a_holder_that_comes_and_goes_leaves_everything_as_it_was() -> None:
    more = with_holder(PLACEMENT, "new", [(0, 1), (1, 0)], (*MEMBERS, "new"))
    assert [shard.holders for shard in more.layers[0]] == [("w0",), ("w1", "new"), ("w2",)]
    assert [shard.holders for shard in more.layers[1]] == [("w0", "new"), ("w1",), ("w2",)]
    assert without_holder(more, "new") == PLACEMENT
    # What nobody else holds has no other holder that could be named.
    assert without_holder(PLACEMENT, "w1") == PLACEMENT
    # Until somebody takes its place.
    again = with_holder(PLACEMENT, "new", [(0, 1)], ("w0", "w2", "new"))
    assert again.layers[0][1].holders == ("new",)


def test_the_last_ready_holder_is_known() -> None:
    more = with_holder(PLACEMENT, "w2", [(0, 1), (1, 1)], MEMBERS)
    assert only_at(more, "w1", MEMBERS) == []
    assert only_at(more, "w1", ("w0", "w1")) == [(0, 1), (1, 1)]
    assert only_at(more, "w2", MEMBERS) == [(0, 2), (1, 2)]


def test_without_replicas_or_gain_everybody_keeps_his_place() -> None:
    assert balanced(PLACEMENT, EVEN) == PLACEMENT
    everywhere = with_holder(PLACEMENT, "new", ALL, (*MEMBERS, "new"))
    assert balanced(everywhere, EVEN) == everywhere
    assert balanced(everywhere, {}) == everywhere


@pytest.mark.parametrize("load", [EVEN, {}])
def test_a_holder_of_all_shards_hands_its_part_over(load: dict[Place, float]) -> None:
    one = Placement(
        tuple(tuple(dataclasses.replace(shard, holder="w0") for shard in shards) for shards in PLACEMENT.layers), ()
    )
    both = balanced(with_holder(one, "new", ALL, ("w0", "new")), load)
    for shards in both.layers:
        assert sorted(shard.holder for shard in shards) == ["new", "w0", "w0"]
        assert all(set(shard.holders) == {"w0", "new"} for shard in shards)


def test_a_heavy_shard_weighs_as_much_as_two_light_ones() -> None:
    load = {**EVEN, (0, 2): 2.0}
    one = Placement(
        tuple(tuple(dataclasses.replace(shard, holder="w0") for shard in shards) for shards in PLACEMENT.layers), ()
    )
    both = balanced(with_holder(one, "new", ALL, ("w0", "new")), load)
    first = [shard.holder for shard in both.layers[0]]
    assert first[0] == first[1] != first[2]
