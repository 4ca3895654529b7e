"""A `dflash-moe serve` of our own, for the length of a bench.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from dflash_moe.errors import DflashError
from dflash_moe.handover import tied_program
from dflash_moe.holders.launcher import ISOLATION, PACKAGE, isolated_environment

# A model of hundreds of gigabytes is read from a slow disk within this time.
START_S = 3600.0
LOOK_S = 0.1
# Without open requests a server ends within a second.
END_S = 30.0
READY = re.compile(r"^ready on (\S+)$", re.MULTILINE)
# The end of what it said on stderr is quoted where it does not start.
QUOTED_BYTES = 4000
PROGRAM = "dflash_moe"


class ServedModel:
    """The processes of a server that is ready at `url`."""

    def __init__(self, pid: int, url: str) -> None:
        self._pid = pid
        self.url = url

    def cpu_s(self) -> dict[str, float]:
        """Returns the CPU seconds that each process has taken so far, by what it is: "serve" (the
        engine), "front", "worker", or "other".
        """
        found: dict[str, float] = {}
        for pid in _tree(self._pid):
            # A process may have ended since it was listed.
            with suppress(OSError):
                name = _name(pid)
                found[name] = found.get(name, 0.0) + time.clock_gettime(_cpu_clock(pid))
        return found


@contextmanager
def served_model(model: str, topology: Path | None, say: Callable[[str], None]) -> Iterator[ServedModel]:
    """Starts a server of the model on a free port, and ends it with the block. It ends with this
    process too, whatever happens to that. Raises DflashError with the end of its log where it does
    not become ready.
    """
    command = [sys.executable, *ISOLATION, "-m", PROGRAM, "serve", "--model", model, "--port", "0", "--drain-s", "0"]
    command += [] if topology is None else ["--topology", str(topology)]
    launcher = [sys.executable, "-I", "-S", str(Path(tied_program.__file__)), str(os.getpid())]
    environment = isolated_environment(os.environ)
    # The package need not be installed.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE.parent), environment.get("PYTHONPATH", "")]))
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*launcher, *command], stdin=subprocess.DEVNULL, stdout=out, stderr=log, env=environment)
        try:
            say(f"starting `dflash-moe serve --model {model}`")
            yield ServedModel(process.pid, _ready_url(process, out, log))
        finally:
            _end(process)


def _ready_url(process: subprocess.Popen[bytes], out: IO[bytes], log: IO[bytes]) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        # Before the file is read, or its last line could be missed.
        has_ended = process.poll() is not None
        if found := READY.search(_text(out)):
            return found[1]
        if has_ended:
            raise DflashError(f"the server ended with exit code {process.returncode} before it was ready{_quoted(log)}")
        time.sleep(LOOK_S)
    raise DflashError(f"the server was not ready within {START_S:g} s{_quoted(log)}")


def _quoted(log: IO[bytes]) -> str:
    text = _text(log).strip()
    return f"; last lines of its log:\n{text}" if text else ""


def _text(file: IO[bytes]) -> str:
    # The child writes at the position of the open file, which reading must not move.
    descriptor = file.fileno()
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, QUOTED_BYTES, max(0, size - QUOTED_BYTES)).decode("utf-8", "replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                yield from _tree(int(child))


def _name(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    known = words[words.index(PROGRAM) + 1 :][:1] if PROGRAM in words else []
    return known[0] if known and known[0] in ("serve", "front", "worker") else "other"


def _cpu_clock(pid: int) -> Any:
    """Returns the clock of a process's CPU time, in nanoseconds and with threads that have ended,
    as clock_getcpuclockid(3) makes it.
    """
    return (~pid << 3) | 2
