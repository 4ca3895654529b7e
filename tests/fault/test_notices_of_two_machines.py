"""A host and a worker as on two machines: over TCP, encrypted, and each coming and going is told
once.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest

from dflash_moe.cli.generate.generate_report import carried
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol import control
from tests.fault.conftest import StartWorker, far_topology, wait_until

BACK_S = 120.0


def test_each_coming_and_going_is_told_once_with_its_way(
    spec: ModelSpec,
    key_file: Path,
    start_worker: StartWorker,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DFLASH_MOE_HOST_FALLBACK")
    options = ("--key-file", str(key_file), "--encryption", "on")
    worker = start_worker(Path(spec.path), "tcp://127.0.0.1:0", *options)
    caplog.set_level(logging.INFO, logger="dflash_moe.notices")
    told = [("INFO", f"worker far at {worker.address} is connected (TCP, encrypted)")]

    def all_told() -> list[tuple[str, str]]:
        return [(one.levelname, one.getMessage()) for one in caplog.records if one.name == "dflash_moe.notices"]

    with ExpertRuntime.start(far_topology(worker.address), model=spec, key_file=key_file, encryption="on") as runtime:
        for number, level, going in (
            (signal.SIGTERM, "INFO", "has left: it was told to stop"),
            (signal.SIGKILL, "WARNING", "is lost: hung up"),
        ):
            worker.process.send_signal(number)
            told.append((level, f"worker far (TCP, encrypted) {going}; it is dialled until it is back"))
            assert wait_until(lambda: all_told() == told, BACK_S), all_told()
            worker.process.wait(BACK_S)
            worker = start_worker(Path(spec.path), worker.address, *options)
            told.append((level, "worker far is back (TCP, encrypted)"))
            assert wait_until(lambda: all_told() == told, BACK_S), all_told()
        rows = {row["name"]: row["way"] for row in control.ask(os.getpid(), {"order": "list"}, timeout_s=30.0)["workers"]}
        assert (rows["near"], rows["far"]) == ("shared memory", "TCP, encrypted")
        # What stands in at the host is no worker.
        assert wait_until(lambda: "host:far" in runtime.stats()["workers"], BACK_S)
        assert carried(runtime.stats()).startswith("2 workers over shared, tcp")
    assert all_told() == told
