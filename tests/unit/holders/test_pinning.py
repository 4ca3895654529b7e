"""Which cores workers are pinned to: their own, of one node, whole physical ones first; never where
there are too few for all workers.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

from dflash_moe.config import Settings
from dflash_moe.errors import ConfigError
from dflash_moe.holders.threads import plan_cpus, thread_plan
from dflash_moe.telemetry.cores import Core
from dflash_moe.topology import Topology

# Two nodes of four physical cores, two hardware threads each: CPUs 0-3 and 8-11, 4-7 and 12-15.
TWO_NODES = tuple(sorted((Core(cpu, cpu % 8 // 4, cpu // 8) for cpu in range(16)), key=lambda core: (core.rank, core.node)))


def workers(*lines: str) -> Topology:
    return Topology.parse("version: 1\nworkers:\n" + "".join(f"  - {{name: w{at}, {line}}}\n" for at, line in enumerate(lines)))


def plan(topology: Topology, threads: dict[str, int], *, host: int = 1, cores=TWO_NODES, may_choose: bool = True):  # type: ignore[no-untyped-def]
    return plan_cpus(topology, threads, host_threads=host, cores=cores, may_choose=may_choose)


def test_each_worker_gets_cores_of_one_node_and_the_host_keeps_the_first() -> None:
    assert plan(workers("threads: 3", "threads: 4"), {"w0": 4, "w1": 3}) == {"w0": (4, 5, 6, 7), "w1": (1, 2, 3)}


def test_second_hardware_threads_come_last() -> None:
    assert plan(workers("threads: 6"), {"w0": 6}) == {"w0": (4, 5, 6, 7, 12, 13)}


def test_a_worker_wider_than_a_node_spreads() -> None:
    found = plan(workers("threads: 10"), {"w0": 10})["w0"]
    assert found == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)


def test_cores_are_never_shared() -> None:
    found = plan(workers(*["threads: 3"] * 5), {f"w{at}": 3 for at in range(5)})
    cpus = [cpu for each in found.values() for cpu in each]
    assert len(found) == 5
    assert len(set(cpus)) == len(cpus) == 15
    assert 0 not in cpus


def test_workers_keep_their_own_cores_where_the_host_has_to_share_them() -> None:
    two_cores = TWO_NODES[:2]
    assert plan(workers("threads: 1", "threads: 1"), {"w0": 1, "w1": 1}, cores=two_cores) == {"w0": (0,), "w1": (1,)}
    found = plan(workers("threads: 7", "threads: 7"), {"w0": 7, "w1": 7}, host=4)
    assert sorted(cpu for cpus in found.values() for cpu in cpus) == sorted(core.cpu for core in TWO_NODES[2:])


def test_nobody_is_pinned_where_workers_outnumber_cores_or_a_quota_binds() -> None:
    two = workers("threads: 8", "threads: 9")
    assert plan(two, {"w0": 8, "w1": 9}) == {}
    assert plan(two, {"w0": 1, "w1": 1}, may_choose=False) == {}


def test_named_cores_are_kept_and_taken_by_nobody_else() -> None:
    topology = workers("cpus: '1,4'", "threads: 2", "cpus: none", "cpus: 3, address: 'tcp://10.0.0.9:1'")
    found = plan(topology, {"w0": 2, "w1": 2, "w2": 1})
    assert found == {"w0": (1, 4), "w1": (5, 6), "w3": (3,)}  # w3 runs on a machine of its own
    assert plan(topology, {"w0": 2, "w1": 2, "w2": 1}, may_choose=False) == {"w0": (1, 4), "w3": (3,)}


def test_threads_follow_the_length_of_the_list_and_more_of_them_are_refused() -> None:
    assert thread_plan(workers("cpus: '0-1'"), Settings()).workers == {"w0": 2}
    with pytest.raises(ConfigError, match="worker w0 has 3 threads for 2 cpus; name one CPU per thread"):
        thread_plan(workers("cpus: '0-1', threads: 3"), Settings())
