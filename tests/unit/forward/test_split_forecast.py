"""The forecast of steps in two halves, over made-up times.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

from dflash_moe.forward.halves.split_forecast import LEAST_ROWS, TRY_AGAIN, SplitForecast, StepTimes, pipelined_s

LAYERS = 10


def whole(num_rows: int, host_s: float, remote_s: float) -> StepTimes:
    return StepTimes(num_rows, host_s + remote_s, remote_s, remote_s)


def learned(*steps: StepTimes) -> SplitForecast:
    forecast = SplitForecast(LAYERS)
    for step in steps:
        forecast.learn_whole(step, 0.0)
    return forecast


def test_halves_overlap_but_the_longest_chain():
    # Both halves' host parts, both halves' experts, or one half's way through the layers.
    assert pipelined_s(whole(1, 3.0, 1.0), whole(1, 2.0, 1.0), LAYERS) == pytest.approx(5.0 + 0.1)
    assert pipelined_s(whole(1, 1.0, 3.0), whole(1, 1.0, 2.0), LAYERS) == pytest.approx(5.0 + 0.1)
    assert pipelined_s(whole(1, 1.0, 3.0), whole(1, 0.5, 0.5), LAYERS) == pytest.approx(4.0 + 0.05)


def test_nothing_is_split_before_long_steps_were_measured():
    forecast = learned(whole(512, 1.0, 1.0), whole(512, 1.0, 1.0), whole(1, 0.01, 0.01))
    assert not forecast.choose(512, 0.0, 256).is_split
    forecast.learn_whole(whole(512, 1.0, 1.0), 0.0)
    assert forecast.choose(512, 0.0, 256).is_split


def test_prefill_is_split_and_decode_is_not():
    # Few rows read nearly all experts that many rows read: halves take them twice.
    decode = [whole(rows, 0.02 + 0.0005 * rows, 0.05) for rows in (1, 16, 64, 96)]
    prefill = [whole(rows, 0.02 + 0.002 * rows, 0.05 + 0.002 * rows) for rows in (256, 512, 512, 512)]
    forecast = learned(*decode, *prefill)
    choice = forecast.choose(512, 0.0, 256)
    assert choice.is_split
    assert choice.whole_s == pytest.approx(prefill[-1].total_s)
    # Both halves' experts, 0.05 + 0.002 * 256 each, and a layer's host part of the first.
    assert choice.split_s == pytest.approx(2 * 0.562 + 0.532 / LAYERS)
    assert not forecast.choose(LEAST_ROWS, 0.0, LEAST_ROWS // 2).is_split


def test_where_the_host_hardly_waits_nothing_is_split():
    forecast = learned(*[whole(rows, 0.002 * rows, 0.00005 * rows) for rows in (256, 512, 512)])
    assert not forecast.choose(512, 0.0, 256).is_split


def test_halves_that_do_not_pay_are_given_up_and_tried_again():
    forecast = learned(*[whole(512, 1.0, 1.0)] * 3)
    for _ in range(3):
        assert forecast.choose(512, 0.0, 256).is_split
        forecast.learn_split(512, 0.0, 2.1)
    tried = []
    for place in range(2 * TRY_AGAIN + 2):
        choice = forecast.choose(512, 0.0, 256)
        if choice.is_split:
            tried.append(place)
            forecast.learn_split(512, 0.0, 2.1)
        else:
            forecast.learn_whole(whole(512, 1.0, 1.0), 0.0)
    assert tried == [TRY_AGAIN, 2 * TRY_AGAIN + 1]


def test_halves_that_pay_are_kept_and_one_batch_is_measured_now_and_then():
    forecast = learned(*[whole(512, 1.0, 1.0)] * 3)
    seen = []
    for _ in range(TRY_AGAIN + 2):
        choice = forecast.choose(512, 0.0, 256)
        seen.append(choice.is_split)
        if choice.is_split:
            forecast.learn_split(512, 0.0, 1.5)
        else:
            forecast.learn_whole(whole(512, 1.0, 1.0), 0.0)
    assert seen == [True] * TRY_AGAIN + [False, True]


def test_other_contexts_and_sizes_are_judged_apart():
    forecast = learned(*[whole(512, 1.0, 1.0)] * 3)
    for _ in range(3):
        forecast.learn_split(512, 0.0, 3.0)
    assert not forecast.choose(512, 0.0, 256).is_split
    assert forecast.choose(512, 16000.0, 256).is_split
    assert forecast.choose(2048, 0.0, 1024).is_split


def test_a_disturbed_step_decides_nothing():
    forecast = learned(*[whole(512, 1.0, 1.0)] * 3)
    for total_s in (1.5, 9.0, 1.4):
        forecast.learn_split(512, 0.0, total_s)
    assert forecast.choose(512, 0.0, 256).is_split
