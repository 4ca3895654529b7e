"""What a worker keeps between two sessions: lent again to a session of the same kind, freed for
another, after a while, and at the end.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest

from dflash_moe.errors import ConfigError
from dflash_moe.protocol.devices import DeviceChoice
from dflash_moe.workers.resident import MAX_KEEP_S, ResidentWeights, StoreKind
from tests.fault.conftest import wait_until

KIND = StoreKind("scalar", 1, (), DeviceChoice(), "packed")


class Store:
    """As much of an ExpertStore as is asked for here."""

    def __init__(self, resident_bytes: int = 1 << 20) -> None:
        self.resident_bytes = resident_bytes

    def drop_unborrowed(self) -> None:
        self.resident_bytes = 0


def taken(resident: ResidentWeights, kind: StoreKind = KIND) -> Any:
    return resident.take(kind, Store)  # type: ignore[arg-type]


def test_a_session_of_the_same_kind_gets_the_store_that_was_kept() -> None:
    resident = ResidentWeights(60.0)
    first = taken(resident)
    resident.keep(KIND, first)
    assert taken(resident) is first
    # It is lent to one session at a time.
    assert taken(resident) is not first


@pytest.mark.parametrize(
    "change",
    [{"isa": "avx2"}, {"threads": 2}, {"cpus": (1,)}, {"choice": DeviceChoice("sim", 1)}, {"weights_layout": "mapped"}],
)
def test_a_session_of_another_kind_gets_a_new_one_and_the_former_is_freed_before(change: dict[str, Any]) -> None:
    resident = ResidentWeights(60.0)
    first = taken(resident)
    gone = weakref.ref(first)
    resident.keep(KIND, first)
    del first
    seen = []

    def make() -> Any:
        gc.collect()
        seen.append(gone())
        return Store()

    resident.take(replace(KIND, **change), make)
    assert seen == [None]


def test_nothing_is_kept_longer_than_was_said() -> None:
    resident = ResidentWeights(0.01)
    first = taken(resident)
    gone = weakref.ref(first)
    resident.keep(KIND, first)
    del first
    assert wait_until(lambda: gone() is None, 60.0)


@pytest.mark.parametrize("keep_s", [0.0, 60.0])
def test_a_store_without_weights_or_without_time_is_not_kept(keep_s: float) -> None:
    resident = ResidentWeights(keep_s)
    first: Any = Store(0 if keep_s else 1 << 20)
    resident.keep(KIND, first)
    assert first.resident_bytes == 0
    assert taken(resident) is not first


def test_drop_frees_what_is_kept() -> None:
    resident = ResidentWeights(60.0)
    first = taken(resident)
    resident.keep(KIND, first)
    resident.drop()
    assert taken(resident) is not first


@pytest.mark.parametrize("keep_s", [-1.0, float("nan"), float("inf"), MAX_KEEP_S + 1])
def test_a_time_out_of_range_is_refused(keep_s: float) -> None:
    with pytest.raises(ConfigError, match="--keep-s"):
        ResidentWeights(keep_s)
