"""Strangers at the address where workers register, while one of them serves: wrong keys,
certificates, garbage, replays of what a real worker sent, connections that say nothing or half of
it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import socket
from pathlib import Path

from bench.campaigns.faults.by_hand import registered_worker
from bench.campaigns.faults.campaign import Campaign, Run
from bench.campaigns.faults.hostile_path import HostilePath
from bench.campaigns.faults.load import ALONE, Load, make_model
from bench.campaigns.faults.strangers import CAMPAIGN as AT_WORKERS
from bench.campaigns.faults.strangers import try_handshakes
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol.keys import write_key_file
from dflash_moe.topology import Topology


def run(given: Run) -> None:
    """Tries `given.size` bad handshakes."""
    spec = make_model(given.folder / "model")
    key = given.folder / "shared.key"
    write_key_file(key)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = ("127.0.0.1", int(taken.getsockname()[1]))
    head = f"tcp://{place[0]}:{place[1]}"
    recorded = given.folder / "recorded"
    with HostilePath(*place) as path:
        path.record()
        with registered_worker(spec, given.folder / "read", path.address, key), _host(spec, key, head) as runtime:
            Load.quiet(runtime, tokens=(1,))
        path.write_dialled(recorded)
    with registered_worker(spec, given.folder / "served", head, key) as worker, _host(spec, key, head) as runtime:
        try_handshakes(given, runtime, place, "registered-control", recorded)
        given.claim("workers that ended", int(worker.poll() is not None), at_most=0)


def _host(spec: ModelSpec, key: Path, head: str) -> ExpertRuntime:
    text = f"version: 1\nregistration: {{listen: '{head}'}}\nworkers:\n  - {{name: far, threads: 1, address: registered}}\n"
    return ExpertRuntime.start(Topology.parse(text), model=spec, key_file=key, **ALONE)


CAMPAIGN = Campaign(
    "registrations", "bad handshakes where workers register", "handshakes", 5_000, 40, run, AT_WORKERS.lacking,
)  # fmt: skip
