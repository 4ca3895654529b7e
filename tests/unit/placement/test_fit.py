"""The fit: no place gets more than it has room for, whole layers move in the order that was
promised, more memory never brings fewer layers, and refusals say what is missing.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dflash_moe.errors import ConfigError
from dflash_moe.placement import plan_placement
from dflash_moe.placement.fit import (
    DEFAULT_CONTEXT,
    KV_PART,
    MARGIN_BYTES,
    Card,
    Fit,
    FitLayer,
    FitModel,
    FitWishes,
    HostNeeds,
    Machine,
    fit,
)
from dflash_moe.placement.fit_text import cache_line, describe, ranges, speed_line
from dflash_moe.topology import Topology
from dflash_moe.topology.write import to_yaml

GIB = 1 << 30


def model(sizes: list[int], *, dense: int = GIB, kv_token: int = 1 << 16, positions: int = 40960) -> FitModel:
    layers = tuple(FitLayer(at + 1, 8, size) for at, size in enumerate(sizes))
    return FitModel("made-up", "q4_k", layers, HostNeeds(dense, kv_token), HostNeeds(2 * dense, 2 * kv_token), positions)


def card(number: int, free: int, sizes: list[int], **fields: object) -> Card:
    return Card(f"cuda:{number}", "made-up card", free, tuple(sizes), **fields)  # type: ignore[arg-type]


def layers_of(found: Fit) -> dict[str, tuple[int, ...]]:
    return {place.name: place.layers for place in found.places}


@dataclass(frozen=True)
class Placed:
    """A layer as placement sees it."""

    index: int
    num_experts: int
    name: str = "experts"

    def resident_bytes(self, weights: str) -> int:
        return 1

    def resident_dtype(self, weights: str) -> str:
        return "q4_k"


SIZES = st.lists(st.integers(1 << 20, 3 * GIB), min_size=1, max_size=12)
FREE = st.lists(st.integers(0, 30 * GIB), max_size=5)


@given(SIZES, FREE, st.integers(2 * GIB, 64 * GIB), st.none() | st.integers(0, 12), st.integers(1, 64))
def test_no_place_gets_more_than_it_has_and_every_layer_is_whole_in_one(sizes, free, memory, wished, cores):
    made = model(sizes)
    machine = Machine(tuple(card(at, bytes_, sizes) for at, bytes_ in enumerate(free)), memory, cores)
    try:
        found = fit(made, machine, FitWishes(layers_on_cards=wished))
    except ConfigError:
        return
    needs = made.in_memory if found.host is None else made.on_card
    taken = needs.with_context(found.context)
    for one in machine.cards:
        held = sum(place.num_bytes for place in found.places if place.card is one)
        if held or one is found.host:
            assert held + MARGIN_BYTES + (taken if one is found.host else 0) <= one.free_bytes
    packed = sum(place.num_bytes for place in found.places if place.name == "memory")
    assert not packed or packed + MARGIN_BYTES + (taken if found.host is None else 0) <= memory
    everywhere = [at for place in found.places for at in place.layers]
    assert sorted(everywhere) == list(range(len(sizes)))
    # The last layers are on the fastest card, and each place continues where the one before ended.
    assert [at for place in found.places for at in place.layers[::-1]] == list(range(len(sizes)))[::-1]
    assert wished is None or found.layers_on_cards == wished
    # Each layer is one shard with one holder, so that its bits do not depend on the fit.
    placement = plan_placement([Placed(layer.index, layer.num_experts) for layer in made.layers], found.topology)
    assert all([shard.experts for shard in shards] == [tuple(range(8))] for shards in placement.layers)


@given(SIZES, st.lists(st.integers(0, 30 * GIB), min_size=1, max_size=4), st.integers(0, 3), st.integers(0, 8 * GIB))
def test_more_memory_on_a_card_never_brings_fewer_layers(sizes, free, which, more):
    made, memory = model(sizes), 64 * GIB
    assume(which < len(free))
    machines = [
        Machine(tuple(card(at, bytes_ + (extra if at == which else 0), sizes, no_host="no torch") for at, bytes_ in
                      enumerate(free)), memory, 4)
        for extra in (0, more)
    ]  # fmt: skip
    before, after = (fit(made, machine).layers_on_cards for machine in machines)
    assert before <= after


@given(SIZES, st.integers(5 * GIB, 64 * GIB), st.integers(0, 8 * GIB))
def test_more_memory_never_brings_more_layers_from_the_file(sizes, memory, more):
    counts = [len(layers_of(fit(model(sizes), Machine((), bytes_, 4))).get("mapped", ())) for bytes_ in (memory, memory + more)]
    assert counts[0] >= counts[1]


def test_attention_is_on_the_fastest_card_that_has_room_and_experts_follow_in_order():
    sizes = [GIB] * 8
    machine = Machine((card(0, 7 * GIB, sizes), card(1, 3 * GIB, sizes)), 5 * GIB, 6)
    found = fit(model(sizes), machine)
    # 7 GiB, of them 1 free, 2 of weights and 1 of keys and values: 3 layers.
    assert (found.host, found.context, found.kv_bytes) == (machine.cards[0], DEFAULT_CONTEXT, GIB)
    assert layers_of(found) == {"cuda0": (5, 6, 7), "cuda1": (3, 4), "memory": (0, 1, 2)}
    assert found.topology.host.device == "cuda:0"
    by_name = {worker.name: worker for worker in found.topology.workers}
    assert [(name, worker.address, worker.threads) for name, worker in by_name.items()] == [
        ("cuda0", "loopback", None), ("cuda1", None, None), ("memory", None, 5),
    ]  # fmt: skip
    smaller = fit(model(sizes), dataclasses.replace(machine, memory_bytes=3 * GIB))
    assert layers_of(smaller) == {"cuda0": (5, 6, 7), "cuda1": (3, 4), "memory": (1, 2), "mapped": (0,)}
    layouts = {worker.name: worker.weights_layout for worker in smaller.topology.workers}
    assert (layouts["memory"], layouts["mapped"]) == ("auto", "mapped")
    # The fastest card has no room for attention, or torch cannot use it: the next one, or none.
    second = Machine((card(0, 3 * GIB, sizes), card(1, 7 * GIB, sizes)), 9 * GIB, 6)
    assert fit(model(sizes), second).host is second.cards[1]
    alone = fit(model(sizes), Machine((card(0, 7 * GIB, sizes, no_host="torch is for processors"),), 9 * GIB, 6))
    assert (alone.host, layers_of(alone)) == (None, {"cuda0": (2, 3, 4, 5, 6, 7), "memory": (0, 1)})
    assert {worker.name: worker.address for worker in alone.topology.workers} == {"cuda0": None, "memory": "loopback"}


def test_a_stated_number_and_a_longer_context_narrow_the_fit():
    sizes = [GIB] * 8
    machine = Machine((card(0, 10 * GIB, sizes),), 20 * GIB, 6)
    assert layers_of(fit(model(sizes), machine))["cuda0"] == (2, 3, 4, 5, 6, 7)
    assert layers_of(fit(model(sizes), machine, FitWishes(layers_on_cards=2)))["cuda0"] == (6, 7)
    none = fit(model(sizes), machine, FitWishes(layers_on_cards=0))
    assert (none.host, layers_of(none)) == (machine.cards[0], {"memory": tuple(range(8))})
    longer = fit(model(sizes), machine, FitWishes(max_context=4 * DEFAULT_CONTEXT))
    assert (len(layers_of(longer)["cuda0"]), longer.topology.engine["max_context"]) == (3, 4 * DEFAULT_CONTEXT)
    assert fit(model(sizes, positions=512), machine).context == 512
    assert fit(model(sizes, positions=0), machine).context == DEFAULT_CONTEXT


def test_a_layer_whose_format_a_card_does_not_compute_goes_elsewhere():
    sizes = [GIB] * 4
    machine = Machine((card(0, 30 * GIB, [GIB, None, GIB, GIB]),), 20 * GIB, 2)  # type: ignore[list-item]
    assert layers_of(fit(model(sizes), machine)) == {"cuda0": (0, 2, 3), "memory": (1,)}
    with pytest.raises(
        ConfigError, match=r"--experts-on-card 4: cards here compute with the formats of 3 of 4 layers \(q4_k\)"
    ):
        fit(model(sizes), machine, FitWishes(layers_on_cards=4))


@pytest.mark.parametrize(
    ("wished", "text"),
    [
        (9, r"^--experts-on-card 9: the model has 8 layers with experts; give 0..8, or auto$"),
        (8, r"^--experts-on-card 8: the cards hold 6 layers .* 2 more are short by 2\.0 GiB; give 0..6, auto, or a smaller"),
    ],
)
def test_more_layers_than_there_are_or_fit_are_refused_with_the_shortfall(wished, text):
    sizes = [GIB] * 8
    with pytest.raises(ConfigError, match=text):
        fit(model(sizes), Machine((card(0, 10 * GIB, sizes),), 20 * GIB, 6), FitWishes(layers_on_cards=wished))


def test_cards_that_are_not_there_are_refused_unless_none_are_wanted():
    with pytest.raises(ConfigError, match=r"^--experts-on-card 1: no card that could be used was found here"):
        fit(model([GIB]), Machine((), 20 * GIB, 6), FitWishes(layers_on_cards=1))
    assert fit(model([GIB]), Machine((), 20 * GIB, 6), FitWishes(layers_on_cards=0)).layers_on_cards == 0


@given(st.integers(0, 4 * GIB), st.integers(0, 4 * GIB), st.integers(1, 1 << 17))
def test_too_large_a_model_is_refused_with_what_would_fit(memory, dense, kv_token):
    made = model([GIB], dense=dense, kv_token=kv_token)
    needed = made.in_memory.with_context(DEFAULT_CONTEXT) + MARGIN_BYTES
    if needed <= memory:
        assert fit(made, Machine((), memory, 1)).host is None
        return
    with pytest.raises(ConfigError, match="short") as caught:
        fit(made, Machine((), memory, 1))
    fitting = re.search(r"--max-context (\d+)", str(caught.value))
    if fitting is None:
        assert made.in_memory.with_context(1) + MARGIN_BYTES > memory
        return
    tokens = int(fitting[1])
    assert fit(made, Machine((), memory, 1), FitWishes(max_context=tokens)).context == tokens
    with pytest.raises(ConfigError, match="short"):
        fit(made, Machine((), memory, 1), FitWishes(max_context=tokens + 1))


def test_the_kv_cache_is_stated_where_a_quarter_of_what_is_free_is_too_little():
    assert "kv_memory" not in fit(model([GIB]), Machine((), 64 * GIB, 2)).topology.engine
    tight = fit(model([GIB]), Machine((), 4 * GIB, 2))
    assert tight.topology.engine["kv_memory"].num_bytes == tight.kv_bytes == GIB // 2
    assert KV_PART == 4  # what the default of engine.kv_memory, 25%, is
    stated = fit(model([GIB]), Machine((), 4 * GIB, 2), FitWishes(kv_bytes=GIB))
    assert (stated.kv_bytes, "kv_memory" in stated.topology.engine) == (GIB, False)


@given(SIZES, FREE, st.integers(4 * GIB, 64 * GIB))
def test_the_plan_has_at_most_eight_lines_and_the_topology_can_be_written(sizes, free, memory):
    made = model(sizes)
    machine = Machine(tuple(card(at, bytes_, sizes) for at, bytes_ in enumerate(free)), memory, 8)
    try:
        found = fit(made, machine)
    except ConfigError:
        return
    lines = describe(made, machine, found, "dflash-moe plan --model m --write FILE")
    assert len(lines) <= 8
    assert lines[-1].endswith("dflash-moe plan --model m --write FILE")
    read = Topology.parse(to_yaml(found.topology))
    workers = [dataclasses.replace(worker, line=0, experts=None) for worker in read.workers]
    assert workers == [dataclasses.replace(worker, experts=None) for worker in found.topology.workers]
    for written, planned in zip(read.workers, found.topology.workers, strict=True):
        assert written.experts.ids_by_layer == planned.experts.ids_by_layer
    assert (read.engine, dataclasses.replace(read.host, line=0)) == (found.topology.engine, found.topology.host)


def test_a_server_leaves_memory_to_its_front_and_says_so():
    sizes = [GIB] * 8
    # Without a front three layers and half a gibibyte have room.
    alone, served = Machine((), 6 * GIB, 1), Machine((), 6 * GIB, 1, front_bytes=GIB)
    assert [layers_of(fit(model(sizes), one))["memory"] for one in (alone, served)] == [(5, 6, 7), (6, 7)]
    (line,) = [line for line in describe(model(sizes), served, fit(model(sizes), served), "x") if "memory, 6.0 GiB" in line]
    assert line.endswith("experts of layers 7..8 (2.0 GiB); the server's front (1.0 GiB); 1.5 GiB left")
    with pytest.raises(ConfigError, match=re.escape("3.0 GiB of memory are free, of which the server's front takes 1.0 GiB")):
        fit(model(sizes), Machine((), 3 * GIB, 1, front_bytes=GIB))


def test_the_plan_says_what_lies_where_how_much_is_left_and_what_to_change():
    sizes = [GIB] * 8
    first = card(0, 7 * GIB, sizes)
    second = card(1, 2 * GIB, sizes, no_host="torch is for processors")
    machine = Machine((first, second), 5 * GIB, 6)
    assert describe(model(sizes), machine, fit(model(sizes), machine), "write it") == [
        "made-up, fitted to this machine: 8 layers with experts in q4_k, 8.0 GiB",
        "  cuda:0 made-up card, 7.0 GiB free: attention and all but experts (2.0 GiB); keys and values of 8,192 tokens "
        "(1.0 GiB); experts of layers 6..8 (3.0 GiB); 1.0 GiB left",
        "  cuda:1 made-up card, 2.0 GiB free: experts of layer 5 (1.0 GiB); 1.0 GiB left",
        "  memory, 5.0 GiB free, 6 cores: experts of layers 1..4 (4.0 GiB); 1.0 GiB left",
        "  to change: --experts-on-card (now 4 of 8 layers); --max-context (now 8,192 tokens, 128.0 KiB each)",
        "  as a topology to edit: write it",
    ]
    alone = Machine((), 5 * GIB, 1)
    lines = describe(model(sizes), alone, fit(model(sizes), alone), "write it")
    assert lines[1] == (
        "  memory, 5.0 GiB free, 1 core: attention and all but experts (1.0 GiB); keys and values of 8,192 tokens "
        "(512.0 MiB); experts of layers 7..8 (2.0 GiB); 1.5 GiB left"
    )
    assert lines[3] == (
        "  to change: --max-context (now 8,192 tokens, 64.0 KiB each); a smaller quantisation, or 6.0 GiB more of free "
        "memory, for the layers in the mapped file"
    )


def test_the_guess_at_the_speed_names_what_a_token_reads_from_where():
    sizes = [GIB] * 8
    made = model(sizes)
    layers = tuple(dataclasses.replace(layer, token_bytes=GIB // 8) for layer in made.layers)
    made, alone = dataclasses.replace(made, layers=layers), Machine((), 64 * GIB, 1)
    found = fit(made, alone)
    assert speed_line(made, found, 20 * GIB) == (
        "  speed: of the weights a token reads 2.0 GiB from memory; memory gives 20.0 GiB/s just now: about 10 tokens/s at most"
    )
    # Nobody knows how fast this memory is.
    assert speed_line(made, found, 0.0) == "  speed: of the weights a token reads 2.0 GiB from memory"
    tight = fit(made, Machine((), 5 * GIB, 1))
    assert speed_line(made, tight, 3 * GIB) == (
        "  speed: of the weights a token reads 1.2 GiB from memory and 768.0 MiB from the mapped file; memory gives 3.0 GiB/s "
        "just now: about 2.4 tokens/s at most, less what the rest takes"
    )
    cards = fit(made, Machine((card(0, 7 * GIB, sizes),), 64 * GIB, 1))
    assert speed_line(made, cards, 20 * GIB) == (
        "  speed: of the weights a token reads 2.4 GiB from cuda0 and 640.0 MiB from memory; memory gives 20.0 GiB/s just now: "
        "about 32 tokens/s at most, less what the rest takes"
    )
    assert "memory" not in speed_line(made, fit(made, Machine((card(0, 64 * GIB, sizes),), 64 * GIB, 1)), 20 * GIB)


def test_what_the_cache_will_hold_is_said_where_experts_lie_in_memory_as_a_whole():
    made, folder = model([GIB] * 8), Path("/kept")
    found = fit(made, Machine((), 64 * GIB, 1))
    assert cache_line(made, found, folder, 9 * GIB) == (
        "  cache: 8.0 GiB of packed experts, /kept has room for 9.0 GiB; starts map them from there, "
        "into the page cache's memory"
    )
    assert cache_line(made, found, folder, 3 * GIB) == (
        "  cache: 8.0 GiB of packed experts are more than fit, /kept has room for 3.0 GiB: the rest is "
        "packed at each start; raise `cache.max_bytes`, or name another folder by `cache.path`"
    )
    told = cache_line(made, found, folder, 0)
    assert told == "  cache: no packed experts are kept on disk, so that each start packs them"
    # Slots have a line of their own, and cards no panels.
    wishes = FitWishes(None, None, None, 64 * GIB)
    assert cache_line(made, fit(made, Machine((), 5 * GIB, 1), wishes), folder, 64 * GIB) == ""
    on_card = fit(made, Machine((card(0, 64 * GIB, [GIB] * 8),), 64 * GIB, 1))
    assert cache_line(made, on_card, folder, 64 * GIB) == ""


def test_too_little_memory_names_the_context_the_quantisation_and_the_memory_that_would_do():
    made = model([GIB], dense=2 * GIB, kv_token=1 << 17)
    with pytest.raises(ConfigError) as caught:
        fit(made, Machine((), 3 * GIB + (512 << 20), 1))
    assert str(caught.value) == (
        "made-up is too large for this machine even with all experts in the mapped file: its other weights take 2.0 GiB and "
        "its keys and values of 8,192 tokens 1.0 GiB, beside 1.0 GiB that stays free; 3.5 GiB of memory are free: 512.0 MiB "
        "short; what would fit: --max-context 4096, or a smaller quantisation, whose weights beside the experts take at most "
        "1.5 GiB, or 512.0 MiB more of free memory"
    )
    with pytest.raises(ConfigError, match=r"5\.5 GiB short; what would fit: 5\.5 GiB more of free memory$"):
        fit(model([GIB], dense=4 * GIB), Machine((), 0, 1))


def test_ranges_join_neighbours():
    assert (ranges([]), ranges([3]), ranges([0, 1, 2, 5, 7, 8])) == ("", "3", "0..2, 5, 7..8")


def test_a_layer_that_cannot_be_packed_stays_in_the_file_and_does_not_stop_the_others():
    made = model([GIB] * 3)
    layers = (made.layers[0], dataclasses.replace(made.layers[1], can_pack=False), made.layers[2])
    made, machine = dataclasses.replace(made, layers=layers), Machine((), 30 * GIB, 2)
    found = fit(made, machine)
    assert layers_of(found) == {"memory": (0, 2), "mapped": (1,)}
    assert any("mapped file: experts of layer 2, 1.0 GiB; read and dequantised anew" in line for line in
               describe(made, machine, found, "x"))  # fmt: skip


def test_memory_is_slots_for_all_layers_where_the_disk_has_room_for_their_panels() -> None:
    made = model([GIB] * 8)
    machine = Machine((), 6 * GIB, 4)
    packed = fit(made, machine)
    assert layers_of(packed) == {"memory": (5, 6, 7), "mapped": (0, 1, 2, 3, 4)}
    found = fit(made, machine, FitWishes(panel_bytes=9 * GIB))
    assert layers_of(found) == {"memory": tuple(range(8))}
    (worker,) = found.topology.workers
    assert (worker.weights_layout, worker.memory) == ("auto", found.places[0].free_bytes)
    assert worker.memory < 4 * GIB
    text = "\n".join(describe(made, machine, found, "command"))
    assert "some of the experts of all layers (3.5 GiB)" in text
    assert "disk: all of these experts, 8.0 GiB in panels; calls read those that are not in memory" in text
    assert "or 4.5 GiB more of free memory, so that none are read from disk" in text
    assert "memory and disk" in speed_line(made, found, 1e9)
    # Not where disk has no room for them, where memory has none for one layer, or where all fit.
    assert layers_of(fit(made, machine, FitWishes(panel_bytes=8 * GIB))) == layers_of(packed)
    assert "mapped" in layers_of(fit(model([4 * GIB] * 2), machine, FitWishes(panel_bytes=90 * GIB)))
    assert fit(made, Machine((), 20 * GIB, 4), FitWishes(panel_bytes=9 * GIB)).places[0].layout == "packed"


def test_layers_that_cannot_be_packed_stay_in_the_mapped_file_beside_slots() -> None:
    made = model([GIB] * 4)
    made = replace(made, layers=(*made.layers[:3], replace(made.layers[3], can_pack=False)))
    found = fit(made, Machine((), 5 * GIB, 4), FitWishes(panel_bytes=9 * GIB))
    assert layers_of(found) == {"memory": (0, 1, 2), "mapped": (3,)}
