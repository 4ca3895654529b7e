"""Socket buffers as asked and as granted, and the timeouts, as `doctor` shows them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_moe.cli.doctor.probe_sockets import probe_sockets, probe_timeouts, socket_lines, socket_problems
from dflash_moe.config import resolve_settings
from dflash_moe.errors import ConfigError

VARIABLE = "DFLASH_MOE_EXPERT_COMPUTE_IPC_SOCKET_BUFFER_BYTES"


def test_without_the_setting_the_systems_own_sizes_are_shown_and_nothing_is_wrong() -> None:
    found = probe_sockets(resolve_settings(environ={}))
    assert found["asked_bytes"] is None
    assert all(size and size > 0 for sizes in found["granted_bytes"].values() for size in sizes.values())
    assert socket_problems(found) == []
    assert "the system's own" in "\n".join(socket_lines(found, probe_timeouts(resolve_settings(environ={}))))


def test_a_modest_size_is_granted_in_full() -> None:
    found = probe_sockets(resolve_settings(environ={VARIABLE: "16KiB"}))
    assert found["asked_bytes"] == 16 << 10
    assert {size for sizes in found["granted_bytes"].values() for size in sizes.values()} == {16 << 10}
    assert socket_problems(found) == []


def test_what_the_system_withholds_is_a_problem_with_a_remedy() -> None:
    # no system allows 1 GiB by default
    found = probe_sockets(resolve_settings(environ={VARIABLE: str(1 << 30)}))
    assert any("net.core.wmem_max" in problem for problem in socket_problems(found))


def test_bounds_come_from_the_kernels_files_and_may_be_unreadable(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "wmem_max").write_text("212992\n", encoding="ascii")
    found = probe_sockets(resolve_settings(environ={}), sysctl=tmp_path)
    assert found["max_bytes"] == {"send": [212992], "receive": []}
    assert "receive unknown" in "\n".join(socket_lines(found, {}))


def test_every_timeout_is_shown_with_value_and_meaning() -> None:
    shown = probe_timeouts(resolve_settings({"ipc.call_timeout_s": 7}, environ={}))
    assert shown["ipc.call_timeout_s"]["seconds"] == 7
    assert shown.keys() == {"ipc.call_timeout_s", "ipc.start_timeout_s", "ipc.stall_timeout_s"}
    assert all(entry["meaning"] for entry in shown.values())


@pytest.mark.parametrize("value", ["4095", "2GiB", "-1", "many", "", "1e6", "0"])
def test_sizes_out_of_range_name_variable_value_and_bounds(value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{VARIABLE}.*4 KiB to 1 GiB"):
        resolve_settings(environ={VARIABLE: value})
