"""Which positions a receipt has does not depend on the steps in which they were computed, and a
digest is of a row's own bytes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from dflash_moe.forward.residuals import EMBEDDING, ResidualDigests

LAYERS, WIDTH = 3, 8


def row(position: int, layer: int, draft: int = 0) -> torch.Tensor:
    return torch.arange(WIDTH, dtype=torch.float32) + 100 * position + 10 * layer + 1000 * draft


def compute(digests: ResidualDigests, positions: range, draft: int = 0) -> None:
    where = np.array(positions)
    digests.begin(positions[0])
    digests.see(EMBEDDING, where, torch.zeros(len(positions), WIDTH))
    for layer in range(LAYERS):
        digests.see(layer, where, torch.stack([row(position, layer, draft) for position in positions]))


def kept(steps, seed: int = 5) -> ResidualDigests:
    digests = ResidualDigests(seed)
    for step in steps:
        compute(digests, *step) if isinstance(step, tuple) else compute(digests, step)
    return digests


def found(digests: ResidualDigests, num_positions: int) -> dict[int, tuple[str, ...]]:
    return {position: digests.digests(position) for position in digests.chosen(num_positions)}


ONE_BY_ONE = [range(at, at + 1) for at in range(100)]


@pytest.mark.parametrize("steps", [[range(100)], [range(64), range(64, 100)], [range(40), *ONE_BY_ONE[40:]]], ids=str)
def test_positions_do_not_depend_on_steps(steps):
    assert found(kept(steps), 100) == found(kept(ONE_BY_ONE), 100)


def test_first_last_and_fourteen_positions_are_chosen():
    chosen = kept(ONE_BY_ONE).chosen(100)
    assert len(chosen) == 16
    assert (chosen[0], chosen[-1]) == (0, 99)
    assert chosen != kept(ONE_BY_ONE, seed=6).chosen(100)


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (2, 2), (16, 16), (17, 16)])
def test_short_sequences_have_all_their_positions(count, expected):
    assert len(kept([range(count)]).chosen(count)) == expected


def test_a_rejected_draft_leaves_nothing():
    drafted = [range(50), (range(50, 54), 1), *[range(at, at + 1) for at in range(51, 60)]]
    digests = kept(drafted)
    assert digests.digests(51)[0] == hashlib.sha256(row(51, 0).numpy().tobytes()).hexdigest()
    assert digests.digests(50)[0] != hashlib.sha256(row(50, 0).numpy().tobytes()).hexdigest()


def test_positions_behind_the_end_do_not_count():
    assert found(kept([range(50), range(50, 58)]), 50) == found(kept([range(50)]), 50)


def test_digests_are_of_the_rows_bytes_by_layer():
    digests = kept([range(20)])
    expected = tuple(hashlib.sha256(row(19, layer).numpy().tobytes()).hexdigest() for layer in range(LAYERS))
    assert digests.digests(19) == expected
    values = digests.values(19)
    assert values.shape == (LAYERS, 9)
    assert np.array_equal(values[1, 1:], row(19, 1).numpy())


def test_asked_positions_alone_are_kept():
    digests = ResidualDigests(0, [3, 7])
    compute(digests, range(10))
    assert [position for position in range(10) if digests.digests(position)] == [3, 7]
