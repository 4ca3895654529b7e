"""`bench fault` on two workers that hold all shards: every call succeeds with the right bits, every
killed worker comes back, and nothing is left.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from dflash_moe.bench.fault import FaultParams, default_topology, run_fault
from dflash_moe.bench.harness import Recorder
from dflash_moe.errors import ConfigError


def test_kills_cost_no_call_and_leave_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "fault.json")
    run_fault(FaultParams(kills=3, tokens=(1, 64)), default_topology(), recorder=recorder, overrides={"call_timeout_s": 90.0})
    row = json.loads((tmp_path / "fault.json").read_text())["rows"][0]
    counted = {key: row[key] for key in ("kills", "failed_calls", "wrong_bits", "left_processes", "left_descriptors")}
    assert counted == {"kills": 3, "failed_calls": 0, "wrong_bits": 0, "left_processes": 0, "left_descriptors": 0}
    assert len(row["samples_s"]) == 3
    assert row["stall_p50_ms"] <= row["stall_p99_ms"]


def test_a_topology_without_processes_to_kill_is_refused() -> None:
    made = default_topology()
    placement = dataclasses.replace(made.placement, replicas=1)
    workers = tuple(dataclasses.replace(worker, address="loopback") for worker in made.workers)
    topology = dataclasses.replace(made, workers=workers, placement=placement)
    with pytest.raises(ConfigError, match="kills workers that this host starts"):
        run_fault(FaultParams(kills=1), topology, recorder=Recorder(), overrides={})
