"""A listener that cannot be had says why and what to do.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from dflash_moe.errors import ConfigError
from dflash_moe.workers.listener import open_tcp_listener, open_unix_listener


def test_a_port_in_use_names_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"tcp://127\.0\.0\.1:{port}: .*another program listens there"):
            open_tcp_listener("127.0.0.1", port)


def test_an_address_of_another_machine_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match="this machine has no such address; take one of its own"):
        open_tcp_listener("192.0.2.1", 0)  # TEST-NET-1: nobody's


def test_a_missing_folder_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make that folder first"):
        open_unix_listener(str(tmp_path / "absent" / "socket"))
