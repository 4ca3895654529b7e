"""Of many lines about one thing one is written, and then one in a while.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging

import pytest

from dflash_moe.telemetry.spaced_log import SPACE_S, SpacedLog


def test_the_first_of_many_lines_is_written_and_the_next_tells_how_many_were_not(caplog: pytest.LogCaptureFixture) -> None:
    now = 7.0
    spaced = SpacedLog(logging.getLogger("spaced"), clock=lambda: now)
    for number in range(1000):
        spaced.warning("trouble %d", number)
    now += SPACE_S
    spaced.warning("trouble %d", 1000)
    now += SPACE_S
    spaced.warning("trouble %d", 1001)
    assert [record.message for record in caplog.records] == [
        "trouble 0",
        "trouble 1000 (and 999 times since it was last said)",
        "trouble 1001",
    ]


def test_an_exception_comes_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("no")
    except ValueError:
        SpacedLog(logging.getLogger("spaced")).exception("it failed")
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
