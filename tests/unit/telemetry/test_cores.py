"""The kernel's lists of nodes and siblings, read from fixture trees.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_moe.errors import ConfigError
from dflash_moe.telemetry.affinity import check_cpus, pin_to_first, running_on
from dflash_moe.telemetry.cores import Core, last_cache_bytes, machine_cores, numa_nodes, parse_cpu_list


def make_tree(root: Path, nodes: dict[int, str], siblings: dict[int, str]) -> Path:
    for node, cpus in nodes.items():
        (root / f"node/node{node}").mkdir(parents=True)
        (root / f"node/node{node}/cpulist").write_text(cpus + "\n")
    for cpu, text in siblings.items():
        (root / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
        (root / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("", ()), ("\n", ()), ("3", (3,)), ("0-3,8\n", (0, 1, 2, 3, 8)), ("8,0-1,1", (0, 1, 8)), ("a-b,2,-", (2,)), ("3-1", ())],
)
def test_a_cpu_list_is_read(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus


def test_nodes_without_cpus_are_left_out(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, {10: "4-7", 0: "0-3", 2: ""}, {})
    (tree / "node/possible").write_text("0-10")
    assert numa_nodes(tree) == {0: (0, 1, 2, 3), 10: (4, 5, 6, 7)}
    assert numa_nodes(tmp_path / "nothing") == {}


def test_cores_come_before_their_second_hardware_threads_and_node_by_node(tmp_path: Path) -> None:
    siblings = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    tree = make_tree(tmp_path, {0: "0-1,4-5", 1: "2-3,6-7"}, siblings)
    cores = machine_cores(range(8), tree)
    assert [core.cpu for core in cores] == list(range(8))
    assert [core.rank for core in cores] == [0] * 4 + [1] * 4
    assert [core.node for core in cores] == [0, 0, 1, 1] * 2
    # only usable siblings count
    assert machine_cores({5, 6}, tree) == (Core(5, 0, 0), Core(6, 1, 0))


def test_a_silent_kernel_gives_one_node_of_whole_cores(tmp_path: Path) -> None:
    assert machine_cores({4, 2}, tmp_path) == (Core(2, 0, 0), Core(4, 0, 0))
    assert {core.cpu for core in machine_cores()} == os.sched_getaffinity(0)


def test_running_on_cores_ends_with_the_block_and_concerns_this_thread() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    with running_on((one,)):
        assert os.sched_getaffinity(0) == {one}
    assert os.sched_getaffinity(0) == before
    with running_on(()):
        pin_to_first(())
        assert os.sched_getaffinity(0) == before


def test_a_core_of_somebody_else_is_named_with_those_there_are() -> None:
    check_cpus(sorted(os.sched_getaffinity(0)), name="w0")
    with pytest.raises(ConfigError, match=r"worker w0: CPU 60000 of its `cpus` is not one this process may use; it may use \d"):
        check_cpus((60_000,), name="w0")


def test_the_last_cache_is_the_largest_of_any_cpu(tmp_path: Path) -> None:
    for at, (cpu, size) in enumerate(((0, "48K\n"), (0, "32768K\n"), (1, "2M"), (2, "many"), (3, ""))):
        folder = tmp_path / f"cpu/cpu{cpu}/cache/index{at}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(size)
    assert last_cache_bytes(tmp_path) == 32 << 20
    assert last_cache_bytes(tmp_path / "nothing") == 0
