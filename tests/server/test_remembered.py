"""Remembered answers: found by the longest beginning of a text, of one key only, and bounded.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dflash_moe.engine.seen_text import SeenText
from dflash_moe.server.front.remembered import RememberedAnswers


def test_the_longest_beginning_of_the_same_key_is_found():
    kept = RememberedAnswers()
    kept.add(b"a", SeenText((1,), "one"))
    kept.add(b"a", SeenText((1, 2), "one two"))
    kept.add(b"b", SeenText((9,), "one two three"))
    found = kept.find(b"a", "one two three four")
    assert (list(found.token_ids), found.text) == ([1, 2], "one two")
    assert kept.find(b"a", "on") is None
    assert kept.find(b"c", "one two three four") is None


def test_a_key_pushes_out_its_own_and_all_together_stay_below_the_bound():
    kept = RememberedAnswers(max_bytes=12_000, max_key_bytes=5_000)
    kept.add(b"quiet", SeenText((1,), "quiet"))
    for number in range(100):
        kept.add(b"loud", SeenText(tuple(range(50)), f"{number} " + "x" * 500))
        assert kept.num_bytes <= 12_000
    assert kept.find(b"quiet", "quiet it is") is not None
    assert kept.find(b"loud", "99 " + "x" * 600) is not None
    assert kept.find(b"loud", "1 " + "x" * 600) is None
    for number in range(50):
        kept.add(b"%d" % number, SeenText(tuple(range(50)), "x" * 500))
    assert kept.num_bytes <= 12_000
    kept.add(b"large", SeenText((1,), "x" * 6_000))
    assert kept.find(b"large", "x" * 6_000) is None


def test_the_same_text_again_has_the_later_ids():
    kept = RememberedAnswers()
    kept.add(b"", SeenText((1,), "one"))
    kept.add(b"", SeenText((2,), "one"))
    assert list(kept.find(b"", "one").token_ids) == [2]
