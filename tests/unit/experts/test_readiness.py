"""What a host says of shards that nobody can be asked for.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

import pytest

from dflash_moe.experts.readiness import unready_reason

NAMES = {0: "layers.0.experts", 1: "layers.1.experts"}
HOLDERS = {(0, 0): (0, 1), (0, 1): (1,), (1, 0): (0,)}


def told(*states: str) -> str:
    reports: list[dict[str, Any]] = [
        {"name": f"w{place}", "state": state, "reason": {"lost": "hung up", "suspect": "answers nothing"}.get(state, "")}
        for place, state in enumerate(states)
    ]
    return unready_reason(HOLDERS, reports, layer_names=NAMES, remedy_of=lambda name: f"{name} is started again")


@pytest.mark.parametrize("state", ["ready", "retired", "draining"])
def test_nothing_is_missing_where_each_shard_has_somebody_to_ask(state: str) -> None:
    assert told(state, "ready") == ""


def test_shards_whose_only_holder_is_lost_are_counted_and_the_loss_is_told() -> None:
    assert told("ready", "lost") == (
        "1 of 3 shards cannot be computed now, shard 1 of layers.0.experts for one: worker w1 is lost (hung up), "
        "and w1 is started again"
    )


def test_everybody_who_is_missed_is_named_once() -> None:
    text = told("suspect", "lost")
    assert text.startswith("3 of 3 shards cannot be computed now, shard 0 of layers.0.experts for one: ")
    assert text.count("worker w0 answers nothing") == text.count("worker w1 is lost") == 1


def test_a_shard_without_any_holder_is_told_too() -> None:
    text = unready_reason({(0, 0): ()}, [], layer_names=NAMES, remedy_of=str)
    assert text == "1 of 1 shards cannot be computed now, shard 0 of layers.0.experts for one: they have no holder"
