"""The speed of memory is measured with any number of threads, and given up where it takes too long.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

from dflash_moe.telemetry import memory_speed


@pytest.mark.parametrize("threads", [1, 3, 1000])
def test_memory_is_read_by_any_number_of_threads(threads, monkeypatch):
    monkeypatch.setattr(memory_speed, "READ_BYTES", 1 << 20)
    assert memory_speed.memory_bytes_per_s(threads) > 0


def test_a_machine_that_does_not_answer_in_time_has_no_speed(monkeypatch):
    monkeypatch.setattr(memory_speed, "READ_BYTES", 64 << 20)
    monkeypatch.setattr(memory_speed, "PASS_LIMIT_S", 0.0)
    assert memory_speed.memory_bytes_per_s(1) == 0.0
