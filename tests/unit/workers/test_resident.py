"""The one store of a worker: shared by its sessions if they need the same kind, kept for a while
after the last one, freed for another kind, and at the end.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest

from dflash_moe import _core
from dflash_moe.errors import ConfigError
from dflash_moe.protocol.devices import DeviceChoice
from dflash_moe.workers.resident import MAX_KEEP_S, ResidentWeights, SharedStore, StoreKind
from tests.fault.conftest import wait_until

KIND = StoreKind("scalar", 1, (), DeviceChoice(), "packed")


class Store:
    """As much of an ExpertStore as is asked for here. What it has is nobody's any more."""

    def __init__(self, resident_bytes: int = 1 << 20) -> None:
        self.resident_bytes = resident_bytes
        self.left_s = 0.0

    def drop_unborrowed(self, kept_s: float = 0.0) -> float:
        if kept_s and self.left_s:
            return self.left_s
        self.resident_bytes = 0
        return 0.0

    def close(self) -> None:
        self.resident_bytes = 0


class Scrub:
    """The pace that was asked for."""

    period_s = -1.0

    def start(self) -> None:
        pass

    def set_period(self, period_s: float) -> None:
        self.period_s = period_s

    def close(self) -> None:
        pass


class Session:
    """A session's loans and counters."""

    def __init__(self, resident: ResidentWeights, calls: int = 0) -> None:
        self.resident = resident
        self.calls = calls

    def stats(self) -> dict[str, int]:
        return {"calls": self.calls, "rows": 2 * self.calls, "pairs": 0, "compute_ns": 0}

    def join(self, kind: StoreKind = KIND, scrub_s: float = 0.0, store: Any = None) -> Any:
        def make(kind: StoreKind) -> SharedStore:
            made: Any = SharedStore(kind, None, store or Store(), Scrub())  # type: ignore[arg-type]
            made.store.left_s = 60.0
            return made

        return self.resident.join(kind, self, scrub_s, name="far", make=make)  # type: ignore[arg-type]

    def leave(self) -> None:
        self.resident.leave(self)  # type: ignore[arg-type]


def test_sessions_share_one_store_and_the_next_one_gets_what_was_kept() -> None:
    resident = ResidentWeights(60.0)
    first, second = Session(resident, 3), Session(resident, 4)
    shared = first.join()
    assert second.join() is shared
    assert resident.counters() == {"sessions": 2, "total_calls": 7, "total_rows": 14, "total_pairs": 0, "total_compute_ns": 0}
    for one in (first, second):
        one.leave()
    assert shared.store.resident_bytes
    assert Session(resident).join() is shared
    assert resident.counters()["sessions"] == 1
    assert resident.counters()["total_calls"] == 7
    resident.drop()
    assert shared.store.resident_bytes


def test_the_shortest_period_that_a_session_asks_for_is_that_of_the_scrub() -> None:
    resident = ResidentWeights(60.0)
    first, second, third = (Session(resident) for _ in range(3))
    scrub = first.join(scrub_s=0.0).scrub
    assert scrub.period_s == 0.0
    second.join(scrub_s=9.0)
    third.join(scrub_s=5.0)
    assert scrub.period_s == 5.0
    third.leave()
    assert scrub.period_s == 9.0


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"isa": _core.best_isa()}, f"isa: this host asks for {_core.best_isa()}, the worker has scalar"),
    ({"threads": 2}, "threads: this host asks for 2, the worker has 1"),
    ({"cpus": (1,)}, r"cpus: this host asks for \(1,\), the worker has \(\)"),
    ({"choice": DeviceChoice("sim", 1)}, "device: this host asks for sim:1, the worker has cpu"),
    ({"weights_layout": "mapped"}, "weights_layout: this host asks for mapped, the worker has packed"),
    ({"slots_bytes": 5}, "slots_bytes: this host asks for 5, the worker has 0"),
]


@pytest.mark.parametrize(("change", "text"), CHANGES)
def test_another_kind_is_refused_while_a_session_lives_and_replaces_the_store_afterwards(
    change: dict[str, Any], text: str
) -> None:
    resident = ResidentWeights(60.0)
    former, latter = Session(resident), Session(resident)
    gone = weakref.ref(former.join().store)
    with pytest.raises(ConfigError, match=f"worker far: {text}"):
        latter.join(replace(KIND, **change))
    former.leave()
    seen = []

    class Watching(Store):
        def __init__(self) -> None:
            super().__init__()
            gc.collect()
            seen.append(gone())

    def make(kind: StoreKind) -> Any:
        return SharedStore(kind, None, Watching(), Scrub())  # type: ignore[arg-type]

    kind = replace(KIND, **change)
    found = resident.join(kind, latter, 0.0, name="far", make=make)  # type: ignore[arg-type]
    assert found.kind == kind
    assert seen == [None]


def test_what_a_host_leaves_open_is_that_of_the_hosts_before_it_or_the_best() -> None:
    resident = ResidentWeights(60.0)
    first = Session(resident)
    first.join(replace(KIND, cpus=(0,)))
    left_open = replace(KIND, isa="", threads=0)
    assert Session(resident).join(left_open).kind == replace(KIND, cpus=(0,))
    assert left_open.settled() == replace(KIND, isa=_core.best_isa())


def test_nothing_is_kept_longer_than_was_said() -> None:
    resident = ResidentWeights(0.01)
    session, store = Session(resident), Store()
    session.join(store=store)
    store.left_s = 0.01
    session.leave()
    assert store.resident_bytes
    store.left_s = 0.0
    assert wait_until(lambda: not store.resident_bytes, 60.0)
    assert wait_until(lambda: resident.counters() == {}, 60.0)


@pytest.mark.parametrize("keep_s", [0.0, 60.0])
def test_a_store_without_weights_or_without_time_is_not_kept(keep_s: float) -> None:
    resident = ResidentWeights(keep_s)
    session, store = Session(resident), Store(0 if keep_s else 1 << 20)
    shared = session.join(store=store)
    session.leave()
    assert store.resident_bytes == 0
    assert Session(resident).join() is not shared


def test_drop_frees_what_is_kept() -> None:
    resident = ResidentWeights(60.0)
    session = Session(resident)
    shared = session.join()
    session.leave()
    resident.drop()
    assert Session(resident).join() is not shared


def test_a_store_that_cannot_be_made_leaves_nothing_behind() -> None:
    resident = ResidentWeights(60.0)

    def make(_kind: StoreKind) -> SharedStore:
        raise ConfigError("no such device")

    with pytest.raises(ConfigError, match="no such device"):
        resident.join(KIND, Session(resident), 0.0, name="far", make=make)  # type: ignore[arg-type]
    assert resident.counters() == {}


@pytest.mark.parametrize("keep_s", [-1.0, float("nan"), float("inf"), MAX_KEEP_S + 1])
def test_a_time_out_of_range_is_refused(keep_s: float) -> None:
    with pytest.raises(ConfigError, match="--keep-s"):
        ResidentWeights(keep_s)
