"""A host that is a process of its own: `python head_program.py MODEL KEY_FILE`, with the topology
on stdin until a line of `---`. Once its workers serve it prints their processes as JSON. For each
further line, which names a worker, it calls without a pause until that worker was lost and serves
again, and prints the same. After the last line it waits until all have gone, and prints the
reasons. The bits of every call are compared.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.cluster.conftest import CLUSTER_S, check_bits, host
from tests.expert_cases import tiny_spec
from tests.fault.conftest import pids, state_of, wait_until


def main(model: str, key_file: str) -> None:
    text = "".join(iter(sys.stdin.readline, "---\n"))
    with host(text, tiny_spec(Path(model)), Path(key_file)) as runtime:
        known = pids(runtime)
        print(json.dumps(known), flush=True)
        for worker in map(str.strip, sys.stdin):
            deaths = state_of(runtime, worker).deaths

            def is_back(worker: str = worker, deaths: int = deaths) -> bool:
                check_bits(runtime)
                return state_of(runtime, worker).deaths > deaths and state_of(runtime, worker).state == "ready"

            assert wait_until(is_back, CLUSTER_S), state_of(runtime, worker)
            print(json.dumps(pids(runtime)), flush=True)
        assert wait_until(lambda: all(state_of(runtime, name).state != "ready" for name in known), CLUSTER_S)
        print(json.dumps({name: state_of(runtime, name).reason for name in known}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
