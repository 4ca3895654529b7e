"""A process with a scripted engine and a front, for the test that kills it. It prints the port and
the process id of its front.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import time

from tests.server.scripted_engine import ScriptedEngine
from tests.server.served import served

if __name__ == "__main__":
    with served(ScriptedEngine(step_s=0.05)) as front:
        print(front.bound.port, front.keeper.pid, flush=True)
        time.sleep(120)
