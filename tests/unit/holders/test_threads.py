"""Cores are shared, and nobody spins where threads outnumber them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dflash_moe.config import Settings
from dflash_moe.holders.threads import SPIN_NS, plan_threads, thread_plan
from dflash_moe.topology import Topology


def plan(host: int | None, workers: dict[str, int | None], cores: int, spin_us: int | None = None):  # type: ignore[no-untyped-def]
    return plan_threads(host_threads=host, worker_threads=workers, usable_cores=cores, physical_cores=cores, spin_us=spin_us)


def test_unset_workers_share_what_the_host_leaves() -> None:
    assert plan(1, {"a": None, "b": None}, 9).workers == {"a": 4, "b": 4}
    assert plan(1, {"a": 5, "b": None}, 9).workers == {"a": 5, "b": 3}


def test_a_worker_gets_at_least_one_and_at_most_eight_threads() -> None:
    assert plan(1, {"a": None, "b": None}, 1).workers == {"a": 1, "b": 1}
    assert plan(1, {"a": None}, 64).workers == {"a": 8}


def test_all_threads_together_stay_within_the_cores_where_that_is_possible() -> None:
    for cores in range(3, 40):
        made = plan(1, {"a": None, "b": None}, cores)
        assert made.host + sum(made.workers.values()) <= cores
        assert made.spin_ns == SPIN_NS


def test_nobody_spins_on_too_few_cores_whatever_was_asked() -> None:
    made = plan(1, {"a": 1, "b": 1}, 2, spin_us=500)
    assert made.is_oversubscribed
    assert made.spin_ns == 0


def test_a_stated_budget_is_taken_where_there_is_room() -> None:
    assert plan(1, {"a": 1}, 2, spin_us=7).spin_ns == 7000
    assert plan(1, {"a": 1}, 2, spin_us=0).spin_ns == 0


def test_physical_cores_bound_the_default_and_logical_ones_the_spinning() -> None:
    made = plan_threads(host_threads=1, worker_threads={"a": None}, usable_cores=8, physical_cores=4)
    assert made.workers == {"a": 3}
    assert not made.is_oversubscribed


def test_a_worker_at_loopback_computes_in_the_hosts_pool() -> None:
    text = "version: 1\nhost: {threads: 2}\nworkers: [{name: inside, address: loopback, threads: 3}, {name: w, threads: 1}]\n"
    made = thread_plan(Topology.parse(text), Settings())
    assert (made.host, made.workers) == (3, {"w": 1})


def test_workers_without_experts_take_no_threads() -> None:
    text = "version: 1\nhost: {threads: 1}\nworkers: [{name: a, threads: 1}, {name: b, threads: 5}]\n"
    assert thread_plan(Topology.parse(text), Settings(), {"a"}).workers == {"a": 1}


def test_an_unset_host_gets_what_workers_leave() -> None:
    assert plan(None, {"a": 2}, 6).host == 4
    assert plan(None, {}, 64).host == 8
    assert plan(None, {"a": 2}, 2).host == 1
