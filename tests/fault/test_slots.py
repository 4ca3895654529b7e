"""Workers with memory for a part of their experts: every call has the bits of packed memory, with
slots, with damaged files under them, and where no panels can be kept.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.store import panel_file
from dflash_moe.store.folder import PANELS
from dflash_moe.topology import Topology
from tests.expert_cases import make_checkpoint, tiny_spec
from tests.fault.conftest import FAR
from tests.fault.test_panels import are_equal, flip, outputs, packed_outputs

# Memory for the experts of two of the four layers.
MEMORY = "1200KiB"


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return tiny_spec(make_checkpoint(tmp_path / "model", num_layers=4), num_layers=4)


def start(spec: ModelSpec, cache: Path, *, address: str = "", layout: str = "auto", **overrides: Any) -> ExpertRuntime:
    where = f", address: {address}" if address else ""
    text = f"version: 1\nworkers: [{{name: w0, threads: 1, memory: {MEMORY}, weights_layout: {layout}{where}}}]\n"
    # Panels are written however full this disk is.
    settings: dict[str, Any] = {"cache_path": cache, "cache_panels": "on", "audit_cpu": "off", **FAR, **overrides}
    return ExpertRuntime.start(Topology.parse(text), model=spec, **settings)


@pytest.mark.parametrize("address", ["", "loopback", "unix"])
def test_slots_give_the_bits_of_packed_memory_at_the_first_start_and_later(spec, tmp_path, address):
    expected = packed_outputs(spec, tmp_path / "none")
    for layout in ("stored", "auto"):
        with start(spec, tmp_path / "cache", address=address, layout=layout) as runtime:
            for _again in range(3):
                assert are_equal(outputs(runtime), expected)
            counters = runtime.worker_stats()["w0"]
            assert counters["slot_misses"] > 0
            if address != "loopback":  # whose memory is the host's
                assert 0 < counters["resident_weight_bytes"] <= 1200 << 10
    assert list((tmp_path / "cache" / PANELS).iterdir())


def test_a_file_that_is_damaged_under_slots_changes_no_result(spec, tmp_path):
    expected = packed_outputs(spec, tmp_path / "none")
    with start(spec, tmp_path / "cache") as runtime:
        outputs(runtime)
        for path in (tmp_path / "cache" / PANELS).iterdir():
            flip(path)
        for _again in range(3):
            assert are_equal(outputs(runtime), expected)
        assert runtime.worker_stats()["w0"]["scrub_reloads"] > 0
    with start(spec, tmp_path / "cache") as runtime:
        assert are_equal(outputs(runtime), expected)


def test_where_no_panels_can_be_kept_experts_are_mapped_from_the_checkpoint(spec, tmp_path, caplog):
    expected = packed_outputs(spec, tmp_path / "none")
    for overrides in ({"cache_max_bytes": 4096}, {"cache_panels": "off"}, {"cache_path": "none"}):
        with caplog.at_level(logging.WARNING), start(spec, tmp_path / "cache", **overrides) as runtime:
            assert are_equal(outputs(runtime), expected)
            assert runtime.worker_stats()["w0"].get("slot_misses", 0) == 0


def test_a_layer_of_which_only_some_files_fit_is_mapped_and_others_keep_slots(spec, tmp_path, caplog, monkeypatch):
    expected = packed_outputs(spec, tmp_path / "none")
    # Several files to a layer, and a budget that ends within one.
    monkeypatch.setattr(panel_file, "PANEL_FILE_BYTES", 160 << 10)
    some = {"address": "loopback", "cache_max_bytes": 1800 << 10}
    for _again in range(2):
        with caplog.at_level(logging.WARNING), start(spec, tmp_path / "cache", **some) as runtime:
            for _call in range(3):
                assert are_equal(outputs(runtime), expected)
            assert runtime.worker_stats()["w0"]["slot_misses"] > 0
        said = [line.message for line in caplog.records if "computed from the mapped checkpoint" in line.message]
        assert 0 < len(said) < 4
        caplog.clear()
    with start(spec, tmp_path / "cache", address="loopback") as runtime:  # with room for all
        assert are_equal(outputs(runtime), expected)
