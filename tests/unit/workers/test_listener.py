"""A listener that cannot be had says why and what to do; one that can has the buffers asked for, as
has who dials it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from dflash_moe.cli.worker import worker
from dflash_moe.errors import ConfigError
from dflash_moe.holders.dialing import dial
from dflash_moe.protocol.keys import write_key_file
from dflash_moe.protocol.tcp_sockets import open_tcp_listener
from dflash_moe.topology.addresses import Address
from dflash_moe.workers.listener import open_unix_listener

BUFFER_BYTES = 64 << 10  # within every system's bounds, and no system's default


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


def buffers_of(sock: socket.socket) -> tuple[int, int]:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF), sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)


def test_a_listening_socket_has_the_buffers_before_it_accepts_and_so_has_what_it_accepts() -> None:
    wanted = (2 * BUFFER_BYTES, 2 * BUFFER_BYTES)  # Linux reports twice what was asked for
    with open_tcp_listener("127.0.0.1", 0, BUFFER_BYTES) as listening:
        assert buffers_of(listening) == wanted
        with socket.create_connection(listening.getsockname()):
            accepted, _ = listening.accept()
            with accepted:
                assert buffers_of(accepted) == wanted
    with open_tcp_listener("127.0.0.1", 0) as untouched, socket.socket() as fresh:
        assert buffers_of(untouched) == buffers_of(fresh)


def test_a_worker_by_hand_listens_with_the_buffers_of_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = tmp_path / "far.yaml"
    topology.write_text(f"version: 1\nipc: {{socket_buffer_bytes: {BUFFER_BYTES}}}\nworkers: [{{name: far}}]\n")
    key_file = tmp_path / "shared.key"
    write_key_file(key_file)
    listened: list[int] = []

    def note_and_stop(_host: str, _port: int, buffer_bytes: int) -> socket.socket:
        listened.append(buffer_bytes)
        raise ConfigError("seen enough")

    monkeypatch.setattr("dflash_moe.workers.listener.open_tcp_listener", note_and_stop)
    monkeypatch.setattr("dflash_moe.workers.process.set_up_worker_logging", lambda: None)
    with pytest.raises(ConfigError, match="seen enough"):
        worker("far", tmp_path, topology, "tcp://127.0.0.1:0", [key_file])
    assert listened == [BUFFER_BYTES]


def test_a_host_dials_with_the_buffers_set_before_the_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    connect = socket.socket.connect

    def note_and_connect(sock: socket.socket, target: tuple[str, int]) -> None:
        seen.append(buffers_of(sock))
        connect(sock, target)

    with open_tcp_listener("127.0.0.1", 0) as listening, monkeypatch.context() as patch:
        patch.setattr(socket.socket, "connect", note_and_connect)
        address = Address("tcp", host="127.0.0.1", port=listening.getsockname()[1])
        dial("far", address, BUFFER_BYTES, deadline=time.monotonic() + 30).close()
    assert seen == [(2 * BUFFER_BYTES, 2 * BUFFER_BYTES)]
