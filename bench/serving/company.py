"""Sends requests one after another without a pause, each once or in turns until it is told to end:

    python -m bench.serving.company PORT once|endless FILE...

Each file is a whole HTTP request whose answer ends with its connection. A line with the status
comes on stdout for each. It is a process of its own, so that it delays no client whose gaps between
tokens are measured.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.peers.programs import ROOT

# An answer that takes so long never ends.
ANSWER_S = 120.0
READ_BYTES = 1 << 20
ONCE, ENDLESS = "once", "endless"
READY = "ready"


def main() -> None:
    """Does what the module text says."""
    port, times, *names = sys.argv[1:]
    requests = [Path(name).read_bytes() for name in names]
    print(READY, flush=True)
    for request in requests if times == ONCE else itertools.cycle(requests):
        print(_status(int(port), request), flush=True)


def _status(port: int, request: bytes) -> str:
    """Returns the status of an answer, whose body is read and dropped."""
    first = b""
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as connection:
        connection.sendall(request)
        while received := connection.recv(READ_BYTES):
            first = first or received
    return first.split(b" ", 2)[1].decode() if first.startswith(b"HTTP/") else "none"


@contextmanager
def company(port: int, times: str, files: Sequence[Path], statuses: list[str]) -> Iterator[None]:
    """Keeps a server company from the beginning of the block to its end, and adds the statuses that
    came. Raises SystemExit where a request could not be made.
    """
    command = [sys.executable, "-m", "bench.serving.company", str(port), times, *map(str, files)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, cwd=ROOT) as process:
        try:
            # Without a buffer, in which `communicate` does not look.
            assert process.stdout is not None
            # The interpreter has started, or ended.
            process.stdout.readline()
            yield
            # There is an answer, however short the block was.
            first = process.stdout.readline()
            has_failed = not first or (process.poll() is not None and (times == ENDLESS or process.returncode != 0))
        finally:
            process.kill()
            said, errors = process.communicate()
        if has_failed:
            raise SystemExit(f"{' '.join(command[1:4])} has failed\n{errors[-2000:].decode(errors='replace')}")
        statuses += (first + said).decode().split()


if __name__ == "__main__":
    main()
