"""The preset fast: the best class that all holders of a layer offer and take, never a mixture, and
what was stated wins; errors of classes are the recorded ones.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from dflash_moe.placement import Placement, Shard
from dflash_moe.placement.numerics import holder_classes, mixed_layers
from dflash_moe.placement.preset import Offer, choose_classes, class_errors, dense_class, describe, preferred
from dflash_moe.topology import Topology

ROOT = Path(__file__).resolve().parents[3]
EXACT, INT8, DOT, MMA, MFMA = "f32-canonical", "int8-groups", "bf16-dot", "bf16-mma", "bf16-mfma"
CPU = Offer((EXACT, INT8, DOT), "avx512bf16")
OLD_CPU = Offer((EXACT, INT8), "avx2")
CARD = Offer((EXACT, INT8, MMA), "sm_89")
NEW_CARD = Offer((EXACT, INT8, MMA), "sm_90")


@dataclass(frozen=True)
class Layer:
    """A layer as the choice sees it."""

    stored: str

    def resident_dtype(self, weights: str) -> str:
        return self.stored if weights == "auto" else "int8_g32"


def chosen(formats: list[str], offers: dict[str, Offer], weights: dict[str, str] | None = None) -> list[list[str]]:
    """The classes of each layer's shards, where every holder has one of each layer."""
    shards = tuple(Shard(at, name, (at,), (weights or {}).get(name, "auto")) for at, name in enumerate(offers))
    placement = Placement((shards,) * len(formats), ({},) * len(formats))
    found = choose_classes([Layer(name) for name in formats], placement, offers)  # type: ignore[arg-type]
    assert not mixed_layers(found)
    return [[shard.numerics for shard in shards] for shards in found.layers]


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ([CPU], [INT8, DOT, EXACT, EXACT]),
        ([CPU, OLD_CPU], [INT8, EXACT, EXACT, EXACT]),
        ([CPU, CARD], [INT8, EXACT, EXACT, EXACT]),
        # A card rounds every format to bf16; two of unlike architectures would not give equal bits.
        ([CARD], [INT8, MMA, MMA, MMA]),
        ([CARD, CARD], [INT8, MMA, MMA, MMA]),
        ([CARD, NEW_CARD], [INT8, EXACT, EXACT, EXACT]),
    ],
)
def test_each_layer_gets_the_first_class_that_all_its_holders_offer_and_take(offers, expected):
    named = {f"w{at}": offer for at, offer in enumerate(offers)}
    found = chosen(["q4_k", "bf16", "fp8_e4m3_b128", "f32"], named)
    assert found == [[name] * len(offers) for name in expected]


def test_what_is_stated_binds_the_others_of_the_layer():
    stated = Offer(CPU.classes, CPU.architecture, stated=EXACT)
    assert chosen(["q4_k", "bf16"], {"a": CPU, "b": stated}) == [[EXACT] * 2] * 2
    stated = Offer(CPU.classes, CPU.architecture, stated=DOT)
    assert chosen(["bf16"], {"a": CPU, "b": stated}) == [[DOT] * 2]
    # Weights that are made at load count as what they are made into.
    assert chosen(["bf16"], {"a": CPU, "b": CPU}, {"a": "int8", "b": "int8"}) == [[INT8] * 2]
    assert chosen(["bf16"], {"a": CPU, "b": CPU}, {"a": "int8"}) == [[EXACT] * 2]


def test_whoever_stands_in_for_a_holder_is_asked_too():
    shards = (Shard(0, "a", (0,), replicas=("b",)),)
    placement = Placement((shards,), ({},))
    for other, expected in ((CPU, INT8), (Offer((EXACT,), "avx2"), EXACT), (Offer(CPU.classes, "avx2", stated=EXACT), EXACT)):
        found = choose_classes([Layer("q4_k")], placement, {"a": CPU, "b": other})  # type: ignore[list-item]
        assert found.layers[0][0].numerics == expected


def test_a_holder_of_unlike_layers_reports_all_its_classes():
    found = choose_classes(
        [Layer("q4_k"), Layer("f16")],  # type: ignore[list-item]
        Placement(((Shard(0, "a", (0,)),),) * 2, ({},) * 2),
        {"a": CPU},
    )
    assert holder_classes(found) == {"a": f"{INT8}, {EXACT}"}
    line = describe("fast", found, Topology.parse("version: 1\nworkers: [{name: a}]"), [INT8, DOT])
    percent = {name: f"{100 * class_errors()[name]:.2g}%" for name in (INT8, DOT)}
    assert line == (
        f"preset fast: {INT8} in 1 of 2 layers (rms {percent[INT8]} of the output), {EXACT} in 1 of 2 layers (exact), the "
        f"host's own matrices by their formats {INT8} (rms {percent[INT8]} of the output) or {DOT} (rms {percent[DOT]} of the "
        "output)"
    )


def test_the_line_names_what_was_stated_and_is_empty_where_nobody_rounds():
    topology = Topology.parse("version: 1\nhost: {activations: f32}\nworkers: [{name: a, activations: int8}, {name: b}]")
    shards = (Shard(0, "a", (0,), numerics=INT8), Shard(1, "b", (1,), numerics=INT8))
    line = describe("exact", Placement((shards,), ({},)), topology)
    assert line.startswith(f"preset exact: {INT8} in 1 of 1 layers")
    assert line.endswith("; stated and kept: host.activations, activations of a")
    assert describe("exact", Placement(((Shard(0, "a", (0,)),),), ({},)), topology) == ""


def test_the_hosts_own_matrices_get_what_the_host_offers_for_their_format():
    assert [dense_class(CPU, name) for name in ("q8_0", "bf16", "f32")] == [INT8, DOT, EXACT]
    assert [dense_class(OLD_CPU, name) for name in ("q8_0", "bf16")] == [INT8, EXACT]
    assert preferred([CPU]) == [INT8, DOT]


def test_the_errors_of_the_package_are_the_recorded_ones():
    rows = json.loads((ROOT / "bench" / "results" / "class_errors.json").read_text(encoding="utf-8"))["rows"]
    assert class_errors() == {row["name"]: round(row["error_rms"], 6) for row in rows}
