"""Which holders may share a layer, by what they say they compute on.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_moe.errors import ConfigError, TopologyError, UnsupportedError
from dflash_moe.placement import Placement, Shard
from dflash_moe.placement.numerics import are_mixed, check_architectures, check_classes, check_replicas, settle_classes
from dflash_moe.placement.preset import Offer
from dflash_moe.protocol.identity import choose_numerics
from dflash_moe.topology import Topology

BF16_OF_CARD = "bf16"  # of AMD's: which class it is, the card says

CARDS = {"near": ("bf16-mma", "sm_80"), "far": ("bf16-mma", "sm_90"), "helper": ("f32-canonical", "avx512")}


def test_matrix_units_of_two_generations_are_refused_by_name():
    expected = r"bf16-mma on sm_80 \(worker near\) and on sm_90 \(worker far\) has not the same bits; .*--numerics close"
    with pytest.raises(ConfigError, match=expected):
        check_architectures(CARDS, "exact")


def test_close_allows_and_tells_it(caplog):
    check_architectures(CARDS, "close")
    assert "bf16-mma on sm_80 (worker near) and on sm_90 (worker far)" in caplog.text


@pytest.mark.parametrize("numerics", ["f32-canonical", "int8-groups"])
def test_classes_with_one_set_of_bits_run_on_any_architectures(numerics):
    check_architectures({"near": (numerics, "sm_80"), "far": (numerics, "gfx906"), "helper": (numerics, "avx2")}, "exact")


def test_who_has_said_nothing_yet_is_no_other_kind():
    check_architectures({"near": ("bf16-mma", "sm_90"), "lost": ("bf16-mma", "")}, "exact")


def test_two_cards_of_one_architecture_share_a_layer():
    check_architectures({"near": ("bf16-mma", "sm_90"), "far": ("bf16-mma", "sm_90")}, "exact")


def card(*classes: str) -> Any:
    return SimpleNamespace(label="hip:0 (a card)", numerics_classes=lambda: list(classes))


@pytest.mark.parametrize("numerics", ["bf16-mma", "bf16-mfma", "bf16-wmma"])
def test_bf16_is_the_bf16_class_of_the_card_at_hand(numerics):
    offered = ("f32-canonical", "int8-groups", numerics)
    assert choose_numerics(BF16_OF_CARD, "scalar", name="red", device=card(*offered)) == (numerics, offered)
    assert choose_numerics(numerics, "scalar", name="red", device=card(*offered)) == (numerics, offered)


@pytest.mark.parametrize(("asked", "other"), [("bf16-mfma", ["bf16-wmma"]), (BF16_OF_CARD, [])])
def test_a_card_without_the_class_is_refused_with_those_it_has(asked, other):
    offered = ", ".join(["f32-canonical", *other])
    expected = rf"worker red: its device hip:0 \(a card\) does not compute numerics class {asked}; it offers {offered}: "
    with pytest.raises(UnsupportedError, match=expected):
        choose_numerics(asked, "scalar", name="red", device=card("f32-canonical", *other))


LAYER: Any = SimpleNamespace(index=3, name="layers.3", resident_dtype=lambda _weights: "bf16")


def two_cards(asked: str = "bf16") -> tuple[Topology, Placement]:
    workers = f"[{{name: old, backend: hip, activations: bf16}}, {{name: new, backend: hip, device: 1, activations: {asked}}}]"
    topology = Topology.parse(f"version: 1\nworkers: {workers}", "t.yaml")
    shards = tuple(Shard(at, name, (at,), numerics=topology.numerics_of(name)) for at, name in enumerate(("old", "new")))
    return topology, Placement((shards,), ({"auto": 1},))


def test_classes_that_cards_decide_are_compared_once_they_have_said_them():
    topology, placement = two_cards()
    check_classes([LAYER], placement, topology, "exact")
    settled = settle_classes(placement, {"old": "bf16-wmma", "new": "bf16-wmma"})
    assert [shard.numerics for shard in settled.layers[0]] == ["bf16-wmma", "bf16-wmma"]
    check_classes([LAYER], settled, topology, "exact")
    unlike = settle_classes(placement, {"old": "bf16-mfma", "new": "bf16-wmma"})
    with pytest.raises(TopologyError, match=r"t.yaml:2: layer 3 .*worker old computes in bf16-mfma and worker new in bf16-wm"):
        check_classes([LAYER], unlike, topology, "exact")


def test_what_no_card_can_say_is_refused_before_one_is_asked():
    check_classes([LAYER], two_cards("bf16-wmma")[1], two_cards("bf16-wmma")[0], "exact")
    topology, placement = two_cards("f32")
    expected = r"worker old computes in its card's bf16-mfma or bf16-wmma and worker new in f32-canonical"
    with pytest.raises(TopologyError, match=expected):
        check_classes([LAYER], placement, topology, "exact")
    assert are_mixed([BF16_OF_CARD, "bf16-mfma", "bf16-wmma"])


def replicated(numerics: str, *offers: Offer) -> tuple[Placement, dict[str, Offer]]:
    """One shard that every holder of an offer has."""
    names = [f"w{at}" for at in range(len(offers))]
    shard = Shard(0, names[0], (0, 1), numerics=numerics, replicas=tuple(names[1:]))
    return Placement(((shard,),), ({"auto": 1},)), dict(zip(names, offers, strict=True))


def test_whoever_stands_in_computes_the_class_of_the_shard():
    placement, offers = replicated("int8-groups", Offer(("int8-groups",), "avx2"), Offer(("f32-canonical",), "sm_90"))
    expected = r"layer 3 .*, shard 0: its holders disagree in numerics: worker w0 has int8-groups, worker w1 \(sm_90\) offers"
    with pytest.raises(UnsupportedError, match=expected):
        check_replicas([LAYER], placement, offers)
    # One that is not there, or of a version that says nothing, is asked when it loads.
    check_replicas([LAYER], placement, {"w0": offers["w0"]})
    check_replicas([LAYER], placement, offers | {"w1": Offer((), "")})


def test_a_stand_in_of_another_generation_is_refused_where_that_has_other_bits():
    classes = ("f32-canonical", "bf16-mma")
    placement, offers = replicated("bf16-mma", Offer(classes, "sm_80"), Offer(classes, "sm_90"))
    with pytest.raises(UnsupportedError, match=r"disagree in architecture: worker w0 has sm_80, worker w1 sm_90, on which "):
        check_replicas([LAYER], placement, offers)
    check_replicas([LAYER], placement, dict.fromkeys(offers, offers["w0"]))
    for lost in offers:
        check_replicas([LAYER], placement, offers | {lost: Offer((), "")})
    check_replicas([LAYER], *replicated("f32-canonical", *offers.values()))
