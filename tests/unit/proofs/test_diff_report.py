"""Two tensors part where a bit differs, or beyond a tolerance, and a report names the first place.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")

import torch

from dflash_moe.proofs.diff_report import DiffReport, ExpertDiff, LayerDiff
from dflash_moe.proofs.two_passes import Difference, compare, compare_logits

SAME, PARTED = Difference(0.0, 0.0, None), Difference(0.5, 1.0, 3)


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None] * torch.tensor([1.0, -1.0, 2.0])


def test_equal_bits_are_no_difference():
    assert compare(rows(1, 2, 3), rows(1, 2, 3), None) == SAME


@pytest.mark.parametrize("odd", [2 + 1e-6, math.nan, math.inf], ids=str)
def test_any_other_bit_parts_without_a_tolerance(odd):
    assert compare(rows(1, odd, 3), rows(1, 2, 3), None).first_row == 1


def test_a_sign_of_zero_is_a_bit():
    assert compare(torch.tensor([[-0.0]]), torch.tensor([[0.0]]), None).first_row == 0


def test_nothing_within_the_tolerance_parts():
    wanted = rows(1, 2, 3)
    found = compare(wanted + 0.001, wanted, 0.01)
    assert found.first_row is None
    assert found.rms == pytest.approx(0.001 / float(wanted.std(correction=0)), rel=1e-3)
    assert compare(wanted + 0.1, wanted, 0.01).first_row == 0


@pytest.mark.parametrize("odd", [math.nan, math.inf], ids=str)
def test_what_is_no_number_is_beyond_every_tolerance(odd):
    assert compare(rows(1, 2, odd), rows(1, 2, 3), 1e9).first_row == 2


def test_dtypes_are_compared_by_their_values():
    wanted = rows(1, 2, 3)
    assert compare(wanted.bfloat16(), wanted, None) == SAME


def test_logits_are_compared_as_distributions():
    wanted = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]])
    assert compare_logits(wanted + 5, wanted) == pytest.approx((0.0, 1.0), abs=1e-6)
    found = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    expected = (0.25 * math.log(0.5) + 0.75 * math.log(1.5)) / 2
    assert compare_logits(found, wanted)[0] == pytest.approx(expected, rel=1e-6)
    assert compare_logits(-wanted, wanted)[1] == 0.5


def layer(at: int, **changes) -> LayerDiff:
    fields = {"free": SAME, "fed": SAME, "expert_layer": at, "experts": SAME, **changes}
    return LayerDiff(at, **fields)


def report(*layers: LayerDiff, **changes) -> DiffReport:
    fields = {"not_bits": "", "tolerance": 0.01, "embedding": SAME, "logits": SAME, "fed_logits": SAME, **changes}
    return DiffReport("a", "b", 8, layers=list(layers), **fields)


FAULTS = {
    "": report(layer(0), layer(1)),
    "at the embedding, first at token 3": report(layer(0, fed=PARTED), embedding=PARTED),
    "at layer 1 beside its routed experts": report(layer(0), layer(1, fed=PARTED), layer(2, experts=PARTED)),
    "at layer 1 in the routed experts, first at token 3": report(layer(0, free=PARTED), layer(1, fed=PARTED, experts=PARTED)),
    "routed experts, experts 5, 2, first": report(
        layer(0, experts=PARTED), asked_layer=0, experts=[ExpertDiff(5, 1.0, 1.0), ExpertDiff(2, 0.5, 1.0)]
    ),
    "in what its router is given or chooses, first at token 2": report(layer(0, routing_row=2, fed=PARTED)),
    "in norm or head": report(layer(0), fed_logits=PARTED),
    "weights of layer 4, shard 1 are other bytes, and no token shows it": report(layer(0), contents=[(4, 1)]),
    "after layer 1, first at token 3, where differences": report(layer(0), layer(1, free=PARTED), not_bits="other classes"),
}


@pytest.mark.parametrize("named", FAULTS)
def test_the_first_fault_is_named(named):
    found = FAULTS[named]
    assert named in found.fault()
    assert found.parts == bool(found.fault()) == bool(named)


def test_a_router_that_chooses_otherwise_is_no_fault_under_a_tolerance():
    assert not report(layer(0, routing_row=2), not_bits="other classes").parts
