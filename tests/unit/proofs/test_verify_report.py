"""What `verify` judges of a whole model, and why it does not judge the rest.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from dflash_moe.proofs.layer_parity import LayerParity, _judged_max
from dflash_moe.proofs.two_passes import Bounds
from dflash_moe.proofs.verify_report import GreedyParity, PositionParity, VerifyReport, judge
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


def test_where_eager_rounds_its_weights_the_difference_from_eager_in_float32_is_judged() -> None:
    far = replace(LAYER, difference_rms=0.5, difference_max=5.0, judged_max=5.0)
    assert any("rms difference from eager: 0.5" in excess for excess in judged("bf16", far).excesses)
    near = replace(far, eager_error=1e-3, widened_rms=1e-4, widened_max=1e-3, widened_judged_max=1e-3)
    assert judged("bf16", near).excesses == []
    report = judged("bf16", replace(near, widened_rms=0.02, widened_max=0.2, widened_judged_max=0.2))
    assert [excess.split(": ")[1] for excess in report.excesses] == [
        "rms difference from eager in float32", "largest difference from eager in float32",
    ]  # fmt: skip


def test_a_difference_is_ours_to_answer_for_only_where_eager_is_nearer_the_truth():
    import torch

    truth = torch.tensor([10.0, 10.0, 10.0], dtype=torch.float64)
    ours, theirs = torch.tensor([10.5, 12.0, 10.0]), torch.tensor([14.0, 10.25, 10.0])
    # The first output is nearer than eager's and counts by its own error, the second by the
    # difference.
    assert _judged_max(ours, theirs, truth) == 1.75
    assert _judged_max(ours[:1], theirs[:1], truth[:1]) == 0.5
    far = replace(LAYER, eager_error=1e-3, difference_max=0.2, judged_max=0.02)
    assert judged("bf16", far).excesses == []
    assert any("largest difference" in excess for excess in judged("bf16", replace(far, judged_max=0.2)).excesses)


@pytest.mark.parametrize(("rms", "is_too_far"), [(1e-6, False), (1e-3, True)])
def test_far_positions_are_held_to_the_bounds_of_logits_in_f32(rms, is_too_far) -> None:
    report = judged(logits_rms=0.0, logits_max=0.0, positions=PositionParity(40, 4095, rms, rms, rms))
    assert any("at positions up to 4095" in excess for excess in report.excesses) is is_too_far


@pytest.mark.parametrize(
    ("near", "far", "is_too_far"), [(0.01, 0.09, False), (0.01, 0.11, True), (0.1, 0.29, False), (0.1, 0.31, True)]
)
def test_far_positions_are_held_to_the_first_ones_where_rounding_was_chosen(near, far, is_too_far) -> None:
    report = judged("bf16", rows_rms=near, positions=PositionParity(40, 4095, far, far, far))
    assert any("at positions up to 4095" in excess for excess in report.excesses) is is_too_far
