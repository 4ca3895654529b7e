"""`bench.lab prefill-cards`: which pairs of cards it measures, how it shares the experts, and
the calls and bytes of a run on simulated cards.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json

import pytest

from bench.lab import prefill_cards
from bench.lab.__main__ import build_app
from bench.lab.prefill_cards import Card, card_pairs, find_cards
from dflash_moe.cli.main import run
from dflash_moe.errors import ConfigError, UnsupportedError

GIB = 1 << 30
PROMPT, NEW = 24, 3


def cards_of(monkeypatch, **devices):
    found = {name: {"built": True, "reason": "", "devices": []} for name in ("cuda", "hip", "sim")}
    for name, sizes in devices.items():
        found[name]["devices"] = [
            {"name": f"{name} card", "vendor": name, "memory_bytes": size * GIB, "reason": "" if size else "too old"}
            for size in sizes
        ]
    monkeypatch.setattr(prefill_cards._core, "probe_backend", found.__getitem__)


def test_every_ordered_pair_and_the_largest_card_with_all_others(monkeypatch):
    cards_of(monkeypatch, cuda=[8, 24], hip=[16, 0])
    cards = find_cards("auto")
    assert [card.label for card in cards] == ["cuda:1", "hip:0", "cuda:0"], "the largest first, no card that cannot be used"
    pairs = [pair.label for pair in card_pairs(cards, 2 * GIB)]
    assert len(pairs) == len(set(pairs)) == 7
    assert pairs[-1] == "cuda:1 > hip:0 + cuda:0"


def test_experts_are_shared_by_the_memory_that_is_left_for_them():
    cards = [Card("hip", 0, "large", 16 * GIB), Card("cuda", 1, "small", 8 * GIB)]
    (pair, _back) = card_pairs(cards, host_bytes=5 * GIB)
    assert pair.topology.host.device == "hip:0"
    assert pair.topology.host.experts_memory.fraction == pytest.approx(10 / 17)
    (worker,) = pair.topology.workers
    assert (worker.backend, worker.device, worker.memory) == ("cuda", 1, 7 * GIB)


def test_a_model_that_fits_one_card_only_has_no_pair_with_the_other_as_host():
    cards = [Card("hip", 0, "large", 16 * GIB), Card("cuda", 0, "small", 8 * GIB)]
    assert [pair.label for pair in card_pairs(cards, host_bytes=10 * GIB)] == ["hip:0 > cuda:0"]
    with pytest.raises(ConfigError, match=r"takes 20\.0 GiB .* hip:0 large, has 16\.0 GiB"):
        card_pairs(cards, host_bytes=20 * GIB)


def test_one_card_is_refused_with_every_reason(monkeypatch):
    cards_of(monkeypatch, cuda=[24, 0])
    with pytest.raises(UnsupportedError, match=r"this machine has cuda:0 cuda card \(cuda:1 cuda card: too old"):
        find_cards("auto")


def test_calls_and_bytes_of_simulated_cards(tmp_path, capsys):
    """The modes' calls follow from their definition: stream cuts the chunk that a layer sends into
    slices of four tokens, batched does not, and neither sends a token without a remote expert.
    """
    pytest.importorskip("torch")
    model, out = tmp_path / "tiny", tmp_path / "cards.json"
    shape = ["--layers", "2", "--hidden-size", "64", "--num-experts", "8", "--top-k", "2", "--moe-intermediate-size", "32"]
    assert run(["model", "make", "--arch", "qwen3_moe", "--out", str(model), *shape]) == 0
    counts = ["--prompt-tokens", str(PROMPT), "--new-tokens", str(NEW), "--repeat", "1", "--stream-tokens", "4"]
    arguments = ["--model", str(model), "--backend", "sim", *counts, "--json", str(out)]
    assert run(["prefill-cards", *arguments], build=build_app) == 0
    assert "sim-cuda > sim-hip" in capsys.readouterr().out
    rows = {(row["cards"], row["mode"]): row for row in json.loads(out.read_text())["rows"]}
    assert {cards for cards, _ in rows} == {"sim-cuda > sim-hip", "sim-hip > sim-cuda"}
    for cards in ("sim-cuda > sim-hip", "sim-hip > sim-cuda"):
        stream, batched = rows[cards, "stream"], rows[cards, "batched"]
        assert stream["digests"] == batched["digests"] == rows[cards, "auto"]["digests"]
        # Two layers, each with a slice for the worker and one for the experts that the host keeps.
        assert batched["calls"] == 2 * 2
        assert batched["calls"] < stream["calls"] <= 2 * 2 * PROMPT // 4
        assert batched["decode_calls"] == stream["decode_calls"] <= 2 * 2 * NEW
        assert batched["request_bytes"] + batched["reply_bytes"] < stream["request_bytes"] + stream["reply_bytes"]


@pytest.mark.parametrize("flags", [["--backend", "metal"], ["--mode", "stream"]])
def test_flags_that_make_no_sense_are_refused(flags, tmp_path, capsys):
    assert run(["prefill-cards", "--model", str(tmp_path), *flags], build=build_app) == 2
    assert flags[0] in capsys.readouterr().err
