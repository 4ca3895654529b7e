"""What a request has cost, as its last delta says, and what the engine counts of all of them:
percentiles of the latest, and histograms that only grow.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from dflash_moe.engine.engine_stats import BOUNDS_S, HISTOGRAMS, EngineStats, Histogram
from dflash_moe.engine.request import CANCELLED, STOP, RequestTimes
from dflash_moe.engine.text import ChoiceText
from tests.scheduled_steps import Steps
from tests.token_forward import (
    BLOCK_TOKENS,
    Held,
    TokenForward,
    end_of,
    engine_over,
    greedy,
    plain,
    prompt_of,
    rest_of,
    tokens_of,
)


def cost_of(engine, prompt, salt: bytes = b"", **fields) -> int:
    """The cached tokens of a prompt, whose tokens are as they must be."""
    deltas = rest_of(engine.submit(prompt, plain(3, **fields), cache_salt=salt))
    assert tokens_of(deltas) == greedy(prompt, 3)
    assert {delta.num_cached_tokens for delta in deltas if delta.finish_reason is None} <= {0}
    return end_of(deltas).num_cached_tokens


def test_prefixes_are_found_with_the_same_salt_alone() -> None:
    prompt = prompt_of(4 * BLOCK_TOKENS + 1)
    with engine_over(TokenForward()) as engine:
        for salt in (b"", b"one", b"other", b"one\\0"):
            assert cost_of(engine, prompt, salt) == 0
            assert cost_of(engine, prompt, salt) == 4 * BLOCK_TOKENS
        assert cost_of(engine, [*prompt[: 2 * BLOCK_TOKENS], 0, 0, 0], b"one") == 2 * BLOCK_TOKENS
        assert engine.stats()["cached_tokens"] == 4 * 4 * BLOCK_TOKENS + 2 * BLOCK_TOKENS
        engine.check_integrity()


def test_every_choice_says_what_was_cached_of_the_prompt_that_they_share() -> None:
    prompt = prompt_of(2 * BLOCK_TOKENS + 1)
    with engine_over(TokenForward()) as engine:
        assert cost_of(engine, prompt) == 0
        deltas = rest_of(engine.submit(prompt, plain(3, n=3)))
        assert [end_of(deltas, choice).num_cached_tokens for choice in range(3)] == [2 * BLOCK_TOKENS] * 3


def test_preemptions_and_waiting_are_told_by_the_request_that_had_them() -> None:
    # Four requests of nine blocks each, in the end, share twenty.
    forward, prompts = TokenForward(20), [prompt_of(4, seed) for seed in range(4)]
    with engine_over(forward, prefix_cache=False) as engine:
        streams = [engine.submit(prompt, plain(32)) for prompt in prompts]
        deltas = [rest_of(stream) for stream in streams]
        for prompt, found in zip(prompts, deltas, strict=True):
            assert tokens_of(found) == greedy(prompt, 32)
        counts = [end_of(found).num_preemptions for found in deltas]
        assert counts[0] == 0, "the oldest never gives up its blocks"
        assert sum(counts) == engine.stats()["preemptions"] > 0


def test_a_request_that_never_ran_has_waited_until_its_end() -> None:
    forward = TokenForward()
    held = forward.before = Held()
    with engine_over(forward, max_requests=1) as engine:
        first, waiting = engine.submit(prompt_of(3), plain(2)), engine.submit(prompt_of(3), plain(2))
        held.wait()
        waiting.cancel()
        held.may_go.set()
        last = end_of(rest_of(waiting))
        assert last.finish_reason == CANCELLED
        assert last.queue_s > 0
        ran = end_of(rest_of(first))
        assert 0 < ran.queue_s < last.time_s
        stats = engine.stats()
        # Only the one that ran is among those whose waiting has ended.
        assert stats["histograms"]["queue_s"]["counts"][-1] == 1
        assert stats["queue_s"]["mean"] == pytest.approx(ran.queue_s)


def test_a_completion_says_what_its_choice_has_cost_behind_a_stop_string_too() -> None:
    class Letters:
        all_special_ids = ()

        def decode(self, token_ids, **_options):
            return "".join(chr(97 + token) for token in token_ids)

    prompt = prompt_of(2 * BLOCK_TOKENS + 1)
    with engine_over(TokenForward()) as engine:
        assert cost_of(engine, prompt) == 0
        stop = chr(97 + greedy(prompt, 1)[0])
        choice, stream = ChoiceText(Letters(), [stop], 0), engine.submit(prompt, plain(3))
        for delta in rest_of(stream):
            choice.push(delta)
        found = choice.completion(0, len(prompt))
        assert (found.finish_reason, found.token_ids) == (STOP, (greedy(prompt, 1)[0],))
        assert (found.num_cached_tokens, found.num_preemptions) == (2 * BLOCK_TOKENS, 0)
        assert found.queue_s > 0


# -- histograms ------------------------------------------------------------------------------------


def test_a_bucket_has_what_took_at_most_its_bound() -> None:
    histogram = Histogram()
    for seconds in (0.0, BOUNDS_S[0], BOUNDS_S[0] * 1.5, BOUNDS_S[1], BOUNDS_S[-1], BOUNDS_S[-1] * 2):
        histogram.add(seconds)
    histogram.add(BOUNDS_S[2], 4)
    counts = histogram.report()["counts"]
    assert len(counts) == len(BOUNDS_S) + 1
    assert counts[:4] == [2, 4, 8, 8]
    assert counts[-3:] == [8, 9, 10]
    assert histogram.report()["sum"] == pytest.approx(2.5 * BOUNDS_S[0] + BOUNDS_S[1] + 4 * BOUNDS_S[2] + 3 * BOUNDS_S[-1])


def test_tokens_of_one_step_share_its_time_and_the_first_has_none() -> None:
    stats, (request,) = EngineStats(), Steps().submit(3)
    request.times = RequestTimes(submitted=100.0)
    stats.began(request, 101.0)
    stats.advanced(request, 1, 103.0)
    stats.advanced(request, 1, 103.004)
    stats.advanced(request, 3, 103.033)
    request.tokens += [1] * 5
    stats.ended(request, STOP, 104.0)
    found = stats.report()["histograms"]
    assert found["bounds_s"] == list(BOUNDS_S)
    assert {name: found[name]["counts"][-1] for name in HISTOGRAMS} == {
        "queue_s": 1, "ttft_s": 1, "itl_s": 4, "request_s": 1, "step_s": 0,
    }  # fmt: skip
    sums = {"queue_s": 1.0, "ttft_s": 3.0, "itl_s": 0.033, "request_s": 4.0, "step_s": 0.0}
    assert {name: found[name]["sum"] for name in HISTOGRAMS} == pytest.approx(sums)
    assert [found["itl_s"]["counts"][BOUNDS_S.index(bound)] for bound in (0.002, 0.005, 0.01)] == [0, 1, 4]
    assert (stats.report()["ttft_s"]["p50"], stats.report()["tpot_s"]["p50"]) == (3.0, pytest.approx(0.033 / 4))
    assert stats.generated_tokens == 5


def test_histograms_count_every_request_since_the_start_and_percentiles_the_latest() -> None:
    with engine_over(TokenForward(1024), max_queue=4000) as engine:
        streams = [engine.submit(prompt_of(3, seed), plain(2)) for seed in range(1100)]
        for stream in streams:
            rest_of(stream)
        engine.settle()
        stats = engine.stats()
        found = {name: stats["histograms"][name]["counts"] for name in HISTOGRAMS}
        assert {name: counts[-1] for name, counts in found.items()} == {
            "queue_s": 1100, "ttft_s": 1100, "itl_s": 1100, "request_s": 1100, "step_s": stats["steps"],
        }  # fmt: skip
        assert all(counts == sorted(counts) for counts in found.values())
        assert len(engine._stats.ttft_s) == 1024
        assert stats["histograms"]["request_s"]["sum"] >= stats["histograms"]["ttft_s"]["sum"] > 0
