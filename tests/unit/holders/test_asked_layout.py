"""Which layout of its weights a holder is asked for, by its topology and the settings of what is
kept on disk.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_moe.config import Settings
from dflash_moe.holders.fleet import Fleet
from dflash_moe.holders.holder import asked_layout
from dflash_moe.protocol.devices import DeviceChoice
from dflash_moe.topology import WorkerSpec
from dflash_moe.topology.addresses import Address

KEEPS = {"auto": Settings(), "on": Settings(cache_panels="on")}
KEEPS_NOT = {"off": Settings(cache_panels="off"), "none": Settings(cache_path="none", cache_panels="on")}


@pytest.mark.parametrize("layout", ["auto", "packed", "stored"])
def test_packed_weights_may_come_from_panels_where_this_host_keeps_some(layout: str) -> None:
    spec = WorkerSpec("w0", weights_layout=layout)
    asked = {name: asked_layout("packed", spec, DeviceChoice(), one.cache) for name, one in (KEEPS | KEEPS_NOT).items()}
    assert asked == dict.fromkeys(KEEPS, layout) | dict.fromkeys(KEEPS_NOT, "packed")


def test_experts_in_the_hosts_process_may_come_from_panels() -> None:
    assert asked_layout("packed", None, DeviceChoice(), KEEPS["auto"].cache) == "auto"
    assert asked_layout("mapped", None, DeviceChoice(), KEEPS["auto"].cache) == "mapped"


@pytest.mark.parametrize("backend", ["cuda", "hip", "sim"])
def test_a_card_is_asked_for_packed_weights(backend: str) -> None:
    spec = WorkerSpec("w0", backend, simulate="cuda" if backend == "sim" else None)
    assert asked_layout("packed", spec, DeviceChoice.of(spec), KEEPS["on"].cache) == "packed"


@pytest.mark.parametrize("layout", ["auto", "mapped"])
def test_what_is_placed_in_the_mapped_checkpoint_stays_there(layout: str) -> None:
    spec = WorkerSpec("w0", weights_layout=layout)
    assert asked_layout("mapped", spec, DeviceChoice(), KEEPS["on"].cache) == "mapped"


def test_stored_weights_that_this_host_does_not_keep_are_packed_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    spec = WorkerSpec("w0", weights_layout="stored")
    for settings, reason in (
        (KEEPS["auto"], ""), (KEEPS_NOT["off"], "cache.panels is off"), (KEEPS_NOT["none"], "cache.path is none"),
    ):  # fmt: skip
        model: Any = SimpleNamespace(path="")
        fleet = Fleet(
            model, settings, SimpleNamespace(), decorate=None, watch=None, on_damage=lambda *_: None, retries_unfit=False
        )  # type: ignore[arg-type]
        caplog.clear()
        member = fleet.new_holder("w0", Address("shared"), "shared", "f32-canonical", "packed", spec=spec)
        assert member.layout == ("packed" if reason else "stored")
        assert reason in caplog.text
        assert bool(caplog.records) == bool(reason)
        fleet.close()
