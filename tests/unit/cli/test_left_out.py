"""The lines on tensors that workers cannot compute.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dflash_moe.cli.left_out import LeftOut, grouped

PARTS = ("gate", "up", "down")


def test_one_line_for_each_reason():
    names = [f"blk.{layer}.ffn_{part}_exps.weight" for layer in range(4) for part in PARTS]
    left_out = dict.fromkeys(names, "the layer has biases") | {"blk.9.ffn_up_chexps.weight": "smaller"}
    assert grouped(left_out) == [
        LeftOut("blk.0.ffn_gate_exps.weight and 11 more", False, "the layer has biases"),
        LeftOut("blk.9.ffn_up_chexps.weight", True, "smaller"),
    ]


def test_reasons_that_name_a_tensor_of_their_layer_are_one():
    left_out = {
        f"blk.{layer}.ffn_{part}_exps.weight": f"blk.{layer}.ffn_down_exps.weight has format X"
        for layer in (1, 20)
        for part in PARTS
    }
    names, reason = "blk.1.ffn_gate_exps.weight and 5 more", "blk.N.ffn_down_exps.weight has format X"
    assert grouped(left_out) == [LeftOut(names, False, reason)]
    of_one_layer = {name: reason for name, reason in left_out.items() if name.startswith("blk.1.")}
    reason = "blk.1.ffn_down_exps.weight has format X"
    names = "blk.1.ffn_gate_exps.weight and 2 more"
    assert grouped(of_one_layer) == [LeftOut(names, False, reason)]


def test_a_tensor_is_not_named_twice():
    left_out = {"blk.1.ffn_up_exps.weight": "blk.1.ffn_up_exps.weight has 5 dimensions"}
    assert grouped(left_out) == [LeftOut("blk.1.ffn_up_exps.weight", True, "has 5 dimensions")]
    assert grouped({}) == []
