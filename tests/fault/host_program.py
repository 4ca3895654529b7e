"""A host that is meant to be killed: it starts a runtime, says who its workers are, and keeps one
call under way.

It is run as `python -m tests.fault.host_program CHECKPOINT`, and prints one line `ready PID PID`.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.topology import Emulate
from tests.expert_cases import local_topology, make_batch, tiny_spec


def main(directory: str) -> None:
    slowed = local_topology(emulate=Emulate(slowdown=100_000.0))
    started: list[ExpertRuntime] = []

    def start() -> None:
        started.append(ExpertRuntime.start(slowed, model=tiny_spec(Path(directory))))

    # The thread that starts the runtime ends at once. Workers must live as long as the process, not
    # as long as the thread that asked for them.
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    runtime = started[0]
    call = runtime.submit(0, *make_batch(500))
    print("ready", *(process.pid for process in runtime.worker_processes()), flush=True)
    call.result(timeout=60)


if __name__ == "__main__":
    main(sys.argv[1])
