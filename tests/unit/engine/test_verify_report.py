"""What `verify` judges of a whole model, and why it does not judge the rest.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from dflash_moe.engine.verify_report import Bounds, GreedyParity, VerifyReport, judge
from dflash_moe.integrations.layer_parity import LayerParity
from dflash_moe.topology.numerics import CLASSES, class_on

LAYER = LayerParity(0, "model.layers.0.mlp.experts", 96, 1e-7, 1e-7, 3e-8, 1e-7, 1e-6, True, 2, 2)


class Spec:
    """Stands in for the one layer with experts."""


def judged(dtype: str = "f32", layer: LayerParity = LAYER, **found: object) -> VerifyReport:
    """A report whose logits are beyond every bound, judged."""
    report = VerifyReport("m", "M", dtype, dtype, dtype, {}, 0, Bounds.of(dtype, 2), [layer])
    for name, value in ({"logits_rms": 1.0, "logits_max": 2.0, "host_numerics": ("f32-canonical",)} | found).items():
        setattr(report, name, value)
    judge(report, (Spec(),))  # type: ignore[arg-type]
    return report


def test_logits_beyond_their_bound_are_excesses_in_f32() -> None:
    report = judged()
    assert report.not_judged == ""
    assert report.excesses == [
        "rms difference of the logits: 1, allowed 2e-06",
        "largest difference of the logits: 2, allowed 1e-05",
    ]


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"dtype": "bf16"}, "the model runs in bf16"),
        ({"layer": replace(LAYER, is_requantised=True)}, "workers hold requantised weights"),
        ({"layer": replace(LAYER, numerics=("int8-groups",))}, "experts round their inputs"),
        ({"host_numerics": ("f32-canonical", class_on("bf16", "cpu"))}, "the host's linear layers round their inputs"),
        ({"host_numerics": ("int8-groups",)}, "the host's linear layers round their inputs (int8-groups)"),
        ({"kv_dtype": "f16"}, "keys and values are kept in f16"),
    ],
)
def test_whatever_rounds_by_choice_leaves_logits_reported_and_not_judged(found, reason) -> None:
    report = judged(**found)
    assert report.not_judged.startswith(reason)
    assert not any("logits" in excess for excess in report.excesses)


def test_no_class_that_takes_inputs_as_they_come_hides_logits() -> None:
    for name, facts in CLASSES.items():
        assert (judged(host_numerics=(name,)).not_judged == "") == (facts.activations == "f32")


def test_bounds_grow_with_the_layers_as_the_rules_say() -> None:
    assert (Bounds.of("f32", 6).logits_max, Bounds.of("f32", 12).logits_rms) == (1e-5, 2e-6)
    assert Bounds.of("f32", 24).logits_max == pytest.approx(4e-5)
    assert Bounds.of("f32", 24).logits_rms == pytest.approx(4e-6)
    assert Bounds.of("bf16", 24).tie is None


def test_another_token_is_excused_only_where_eager_has_a_tie() -> None:
    bounds = Bounds.of("f32", 2)
    assert bounds.tie == 2e-5
    fits = {"logits_rms": 0.0, "logits_max": 0.0}
    tied = GreedyParity.of([1, 2, 3], [1, 4, 3], [0.5, 1e-5, 0.5], bounds.tie)
    assert tied == GreedyParity(tokens=3, equal=2, compared=2, flip_gap=1e-5)
    assert judged(greedy=tied, **fits).excesses == []
    clear = GreedyParity.of([1, 2, 3], [1, 4, 5], [0.5, 1e-5, 0.25], bounds.tie)
    assert clear == GreedyParity(tokens=3, equal=1, compared=2, flip_gap=0.25)
    assert judged(greedy=clear, **fits).excesses == [
        "gap of eager's top two logits where a greedy token differs: 0.25, allowed 2e-05"
    ]


def test_equal_tokens_have_no_gap_and_json_is_flat() -> None:
    found = judged(greedy=GreedyParity.of([1, 2], [1, 2], [0.0, 1.0], None)).to_json()
    assert {key: value for key, value in found.items() if key.startswith("greedy")} == {
        "greedy_tokens": 2, "greedy_equal": 2, "greedy_compared": 2, "greedy_flip_gap": None,
    }  # fmt: skip
    assert (found["attention_paged"], found["rows_independent"], found["host"]) == (False, False, None)
