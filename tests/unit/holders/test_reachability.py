"""What reaching the workers takes is checked before anything slow: keys, transports, socket paths.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from dflash_moe.cli import options
from dflash_moe.errors import ConfigError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.protocol.keys import write_key_file
from dflash_moe.topology import Topology
from dflash_moe.topology.addresses import parse_address
from dflash_moe.workers.process import run_hand_started_worker

NO_MODEL = Path("/no/such/checkpoint")  # looked at only once everything else is right


def far(address: str) -> Topology:
    return Topology.parse(f"version: 1\nworkers: [{{name: far, address: '{address}'}}]\n")


def test_a_tcp_worker_without_a_key_is_refused_before_the_model_is_read_or_torch_imported() -> None:
    topology = far("tcp://10.0.0.2:7171")
    with pytest.raises(ConfigError, match="worker far at tcp://10.0.0.2:7171: TCP needs the shared key; give --key-file FILE"):
        ExpertRuntime.start(topology, NO_MODEL)
    with pytest.raises(ConfigError, match="TCP needs the shared key"):
        options.prepare_host(topology)


def test_an_unreadable_key_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    key_file = tmp_path / "shared.key"
    for reason in ("cannot be read", "has mode 0644"):
        with pytest.raises(ConfigError, match=reason):
            ExpertRuntime.start(far("tcp://10.0.0.2:7171"), NO_MODEL, key_file=key_file)
        if not key_file.exists():
            write_key_file(key_file)
            key_file.chmod(0o644)


def test_a_transport_that_cannot_be_had_is_refused_before_the_model_is_read() -> None:
    with pytest.raises(ConfigError, match="'pigeon' is not allowed; allowed: auto, shared, stream, fabric"):
        ExpertRuntime.start(Topology.local(1), NO_MODEL, transport="pigeon")
    with pytest.raises(ConfigError, match="transport shared: worker w0 is reached by tcp"):
        ExpertRuntime.start(Topology.local(1, address="tcp"), NO_MODEL, transport="shared")


def test_a_socket_path_that_is_a_file_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    path = tmp_path / "far.sock"
    path.write_text("not a socket")
    with pytest.raises(ConfigError, match=f"worker far at unix://{path}: that path is no socket"):
        ExpertRuntime.start(far(f"unix://{path}"), NO_MODEL)


def test_a_worker_by_hand_learns_of_a_taken_port_before_it_reads_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_moe.workers.process.set_up_worker_logging", lambda: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = parse_address(f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"another program listens there; stop it or take another port"):
            run_hand_started_worker(name="far", model=NO_MODEL, address=address, key=bytes(32))
