"""A host in a network namespace of its own, that calls a worker and captures the packets of its
link meanwhile: `python host_on_a_network.py MODEL KEY_FILE ADDRESS WORKER SETTINGS`. WORKER is what
the topology says of the worker besides, in YAML; SETTINGS are those of the runtime, in JSON. It
prints what it found as JSON.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dflash_moe.errors import DflashError  # noqa: E402 - the repository is on the path from here on
from dflash_moe.experts.expert_runtime import ExpertRuntime  # noqa: E402
from dflash_moe.topology import Topology  # noqa: E402
from tests.expert_cases import Expected, make_batch, tiny_spec  # noqa: E402

EVERY_PACKET = 3  # ETH_P_ALL of linux/if_ether.h
NUM_ROWS = 20
# Where workers that register find this host.
HEAD = "tcp://192.0.2.1:7170"


class Capture:
    """Every packet of one link, from now until `close`."""

    def __init__(self, link: str) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PACKET))
        self._socket.bind((link, 0))
        self._socket.settimeout(0.1)
        self._packets: list[bytes] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                self._packets.append(self._socket.recv(1 << 17))
            except TimeoutError:
                continue

    def close(self) -> bytes:
        self._is_over.set()
        self._thread.join()
        self._socket.close()
        return b"".join(self._packets)


def main(model: str, key_file: str, address: str, worker: str, settings: str) -> dict[str, Any]:
    spec = tiny_spec(Path(model))
    batch = make_batch(NUM_ROWS)
    head = f"registration: {{listen: '{HEAD}'}}\n" if address == "registered" else ""
    topology = Topology.parse(f"version: 1\n{head}workers:\n  - {{name: far, threads: 1, address: {address!r}{worker}}}\n")
    capture = Capture("dm0")
    try:
        overrides: dict[str, Any] = {"key_file": key_file, "dtype": "f32", **json.loads(settings)}
        with ExpertRuntime.start(topology, model=spec, **overrides) as runtime:
            transport = runtime.stats()["transports"]["far"]
            found = np.asarray(runtime.experts(0, *batch))
            expected = Expected(runtime.placement, spec).experts(0, batch)
    except DflashError as error:
        return {"error": str(error)}
    finally:
        seen = capture.close()
    num_seen = sum(row.tobytes() in seen for row in batch.hidden_states)
    is_equal = bool(np.array_equal(found, expected))
    return {"is_equal": is_equal, "num_captured_bytes": len(seen), "num_rows_seen": num_seen, "transport": transport}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
