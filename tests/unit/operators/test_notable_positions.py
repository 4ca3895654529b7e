"""Every integer of a configuration is a position to look at, with its neighbours and four times it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

from dflash_moe.operators.notable_positions import notable_positions


class _Config:
    """Stands in for a configuration of transformers."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def get_text_config(self) -> _Config:
        return self


def test_integers_their_neighbours_and_four_times_them():
    found = notable_positions(_Config(sliding_window=700), 10_000)
    assert {699, 700, 701, 2800} <= set(found)
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (0, 10_000)


def test_rope_parameters_lists_and_whole_floats_count_and_flags_do_not():
    rope = {"full": {"original_max_position_embeddings": 8192.0, "factor": 1.5}, "floors": [300]}
    found = set(notable_positions(_Config(rope_parameters=rope, is_causal=True, name="9000"), 100_000))
    assert {8191, 8192, 8193, 32768, 299, 300, 301, 1200} <= found
    assert not {8999, 9000, 9001} & found


def test_no_position_lies_behind_the_last_and_none_before_the_first():
    config = _Config(eps=float("inf"), other=float("nan"), pad_token_id=-1, vocab_size=1 << 50, max_position_embeddings=64)
    found = notable_positions(config, 63)
    assert min(found) == 0
    assert max(found) == 63
    assert max(notable_positions(config)) == 1 << 20


def test_powers_of_two_are_looked_at_because_constants_in_code_are():
    assert {2047, 2048} <= set(notable_positions(_Config(), 5000))
