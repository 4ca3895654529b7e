"""Without a topology: experts of whole layers on simulated cards, in memory and in the mapped file
give the same bits however many of them are where, from facts that stand in for a machine's.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import dflash_moe as dm
from dflash_moe.cli.main import run
from dflash_moe.config import Settings
from dflash_moe.errors import ConfigError
from dflash_moe.forward import fitted
from dflash_moe.forward.fitted import find_cards, look_at_card
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.sizing import model_sizes
from dflash_moe.model.spec import model_spec
from dflash_moe.placement.fit import Card, FitModel, FitWishes, Machine, fit
from dflash_moe.protocol.devices import DeviceChoice
from tests.host_models import checkpoint

GIB = 1 << 30
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def spec():
    return model_spec(checkpoint("qwen3_moe", "f32"))


@pytest.fixture(scope="module")
def needs(spec) -> FitModel:
    return fitted.fit_model(model_sizes(Checkpoint.open(spec.path)), Settings())


@pytest.fixture(scope="module")
def cards(spec) -> tuple[Card, ...]:
    """Two simulated cards, on which a host can be too."""
    found = [look_at_card(DeviceChoice("sim", 0, vendor), "simulated", spec.layers)[0] for vendor in ("cuda", "hip")]
    # Their names must differ, as those of two cards of one machine do.
    return found[0], dataclasses.replace(found[1], device="sim:1")


def logits(topology: dm.Topology, path: str) -> tuple[list[int], bytes]:
    with dm.LLM(path, topology, kv_memory="16MiB") as llm:
        params = dm.SamplingParams(temperature=0, max_tokens=6, logprobs=5)
        found = llm.generate([PROMPT], params)[0]
        return list(found.token_ids), np.float64([step.best for step in found.logprobs]).tobytes()


def test_no_simulated_card_is_ever_taken_by_itself(spec):
    assert all("sim" not in card.device and card.simulate is None for card in find_cards(spec.layers))


def test_the_bits_do_not_depend_on_how_many_layers_are_on_cards(spec, needs, cards):
    """Attention stays on the processor here, as it does on a machine whatever the number is."""
    cards = tuple(dataclasses.replace(card, no_host="told so") for card in cards)
    count = len(spec.layers)
    sizes = [layer.memory_bytes for layer in needs.layers]
    results = {}
    for name, machine, wished in (
        ("none", Machine(cards, 64 * GIB, 2), 0),
        ("one", Machine(cards, 64 * GIB, 2), 1),
        ("all on one", Machine(cards, 64 * GIB, 2), count),
        # The first card has room for one layer only.
        ("on both", Machine((dataclasses.replace(cards[0], free_bytes=GIB + sizes[-1]), cards[1]), 64 * GIB, 2), count),
        ("no cards, one layer in memory", Machine((), GIB + needs.in_memory.with_context(64) + sizes[-1], 2), None),
    ):
        found = fit(needs, machine, FitWishes(layers_on_cards=wished, max_context=64))
        assert found.layers_on_cards == (wished or 0)
        results[name] = logits(found.topology, spec.path)
    assert [place.layout for place in found.places] == ["packed", "mapped"]
    assert len(set(map(str, results.values()))) == 1, {name: tokens for name, (tokens, _) in results.items()}


def test_attention_on_a_card_runs_with_experts_beside_it_and_in_memory(spec, needs, cards):
    found = fit(needs, Machine(cards[:1], 64 * GIB, 2), FitWishes(layers_on_cards=1))
    assert found.topology.host.device == "sim:0"
    tokens, _ = logits(found.topology, spec.path)
    others = fit(needs, Machine((), 64 * GIB, 2))
    assert tokens == logits(others.topology, spec.path)[0]


def test_a_model_runs_in_python_without_a_topology_and_says_where_it_went(spec, caplog):
    with caplog.at_level("INFO", "dflash_moe.plan"), dm.LLM(spec.path, kv_memory="16MiB") as llm:
        assert llm.runtime.stats()["transports"] == {"memory": "loopback"}
        assert len(llm.generate([PROMPT], dm.SamplingParams(max_tokens=3))[0].token_ids) == 3
    assert "fitted to this machine" in caplog.text


def test_a_topology_that_is_given_is_never_fitted(spec):
    with pytest.raises(ConfigError, match=r"^--experts-on-card auto beside the topology <local>: .* never fitted"):
        dm.ExpertRuntime.start(dm.Topology.local(1), model=spec, experts_on_card="auto")


def test_plan_writes_a_topology_that_runs(spec, tmp_path, capsys):
    path = tmp_path / "fit.yaml"
    assert run(["plan", "--model", spec.path, "--write", str(path), "--max-context", "64"]) == 0
    out, err = capsys.readouterr()
    assert "fitted to this machine" not in err, "the plan is the result, and goes to stdout"
    lines = out.splitlines()
    assert lines[0].startswith(
        f"{Path(spec.path).name}, fitted to this machine: {len(spec.layers)} layers with experts in f32, "
    )
    # What lies where, how much is left, what to change, how fast, and how it is written down.
    for line, words in zip(
        lines[1:],
        (
            r"  memory, .* free, .*: attention and all but experts \(.*\); keys and values of 64 tokens \(.*\); .* left",
            r"  to change: --max-context \(now 64 tokens, .* each\)",
            r"  speed: of the weights a token reads .* from memory(; memory gives .*/s just now: about .* tokens/s at most)?",
            r"  cache: .*",
            r"  as a topology to edit: dflash-moe plan --model .* --max-context 64 --write FILE",
            r"wrote .*fit\.yaml; use it with --topology .*",
        ),
        strict=True,
    ):
        assert re.fullmatch(words, line), line
    assert logits(dm.Topology.load(path), spec.path)[0]
    assert run(["plan", "--model", spec.path, "--experts-on-card", "1"]) in (0, 2)


def test_who_stands_in_for_whom_is_said_only_where_a_worker_can_be_lost_or_somebody_asks(spec, cards, capsys, monkeypatch):
    assert run(["plan", "--model", spec.path]) == 0
    assert "lost" not in capsys.readouterr().out
    assert run(["plan", "-v", "--model", spec.path]) == 0
    assert "memory: in the host's process, which is not lost alone" in capsys.readouterr().out
    # The worker of a card that attention is not on has a process of its own.
    monkeypatch.setattr(fitted, "find_cards", lambda _layers: (dataclasses.replace(cards[0], no_host="told so"),))
    assert run(["plan", "--model", spec.path]) == 0
    lost = capsys.readouterr().out.partition("where a worker is lost:\n")[2]
    assert "reconnect (started again)" in lost
