"""recognise: formulas of experts modules, by identity for the interface's own gate, by numbers
where a class has its own.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math

import pytest

from dflash_moe.errors import UnsupportedError
from dflash_moe.model.gates import recognise

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
functional = torch.nn.functional


def module(apply_gate=None, act=None, **attributes):
    """An experts module as far as `recognise` looks at one."""
    from transformers.activations import ACT2FN
    from transformers.integrations.moe import _default_apply_gate

    class ToyExperts(torch.nn.Module):
        _apply_gate = apply_gate or _default_apply_gate

    made = ToyExperts()
    made.has_gate, made.has_post_expert_norm = True, False
    if act is not None:
        made.act_fn = ACT2FN[act]
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("act", "activation"),
    [
        ("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh"),
        ("relu", "relu"), ("relu2", "relu_squared"), ("linear", "identity"), ("sigmoid", "sigmoid"),
        ("quick_gelu", "quick_gelu"),
    ],
)  # fmt: skip
def test_the_interfaces_gate_is_known_by_its_activation(act, activation):
    formula = recognise(module(act=act))
    assert (formula.gate, formula.activation) == ("gated", activation)
    assert (formula.gate_part, formula.up_part) == ("first_half", "second_half")


def test_without_a_gate_the_activation_alone_is_the_formula():
    formula = recognise(module(act="relu2", has_gate=False))
    assert (formula.gate, formula.activation, formula.up_part) == ("none", "relu_squared", "all")


@pytest.mark.parametrize("act", ["gelu_10", "hardswish", "tanh", "xielu", "prelu", None])
def test_other_activations_are_refused_by_class_and_field(act):
    with pytest.raises(UnsupportedError, match=r"ToyExperts\.act_fn"):
        recognise(module(act=act))


def test_a_clamped_swiglu_is_known_with_its_constants():
    def gate_of(self, packed):
        gate, up = packed[..., ::2], packed[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)

    formula = recognise(module(gate_of, limit=5.5, alpha=1.3))
    assert (formula.gate, formula.gate_max, formula.up_limit) == ("clamped_swiglu", 5.5, 5.5)
    assert (formula.alpha, formula.up_offset) == (1.3, 1.0)
    assert (formula.gate_part, formula.up_part) == ("even", "odd")


def test_a_clamped_gate_is_known_with_its_limits():
    def gate_of(self, packed):
        gate, up = packed.chunk(2, dim=-1)
        return functional.silu(gate.clamp(max=self.swiglu_limit)) * up.clamp(-self.swiglu_limit, self.swiglu_limit)

    formula = recognise(module(gate_of, swiglu_limit=10.0, num_experts=64))
    assert (formula.gate, formula.activation, formula.gate_max, formula.up_limit) == ("gated", "silu", 10.0, 10.0)


def test_a_gate_in_float32_with_swapped_halves_is_known():
    def gate_of(self, packed):
        up, gate = packed.float().chunk(2, dim=-1)
        return self.act_fn(gate) * up

    formula = recognise(module(gate_of, act="gelu"))
    assert (formula.activation, formula.gate_max) == ("gelu", math.inf)
    assert (formula.gate_part, formula.up_part) == ("second_half", "first_half")


@pytest.mark.parametrize(
    "gate_of",
    [
        lambda self, packed: functional.hardswish(packed.chunk(2, dim=-1)[0]) * packed.chunk(2, dim=-1)[1],
        lambda self, packed: functional.silu(packed.chunk(2, dim=-1)[0].clamp(max=2.5)) * packed.chunk(2, dim=-1)[1],
        lambda self, packed: functional.silu(packed),
        lambda self, packed: self.missing(packed),
    ],
    ids=["other-function", "limit-not-kept-on-the-module", "other-shape", "raises"],
)
def test_other_gates_are_refused_by_class_and_field(gate_of):
    with pytest.raises(UnsupportedError, match=r"ToyExperts\._apply_gate"):
        recognise(module(gate_of, act="silu"))
