"""The leak check sees a process and a descriptor that were left, and forgives one that goes within
the grace.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from tests import leaks


def test_process_left_running_is_seen() -> None:
    before = leaks.take()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = leaks.leaks_since(before, grace_s=0)
        process.communicate(b"\n")
    assert any(f"process {process.pid}" in line for line in found)
    assert leaks.leaks_since(before) == []


def test_open_segment_and_socket_are_seen() -> None:
    before = leaks.take()
    segment = os.memfd_create("left")
    left, right = socket.socketpair()
    found = leaks.leaks_since(before, grace_s=0)
    os.close(segment)
    left.close()
    right.close()
    assert "1 more open memfd descriptors than before" in found
    assert "2 more open socket descriptors than before" in found
    assert leaks.leaks_since(before) == []


def test_process_that_ends_within_the_grace_is_forgiven() -> None:
    before = leaks.take()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.2)"])
    assert leaks.leaks_since(before, grace_s=0)
    process.wait()
    assert leaks.leaks_since(before) == []
