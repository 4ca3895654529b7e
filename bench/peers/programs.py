"""Runs the programs of a comparison one after another on chosen cores, watches the memory of each,
and shows their command lines without the folders of this machine.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# What one program may take, loading and compiling included, before the campaign gives up.
PROGRAM_S = 900.0
START_S = 180.0
# Between two looks at a program's memory. A look takes 30 us.
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Finished:
    """What a program left behind. Peaks are of the program itself, without processes of its own.
    `anonymous_bytes` is the largest amount that was seen; `resident_bytes`, the kernel's own peak,
    counts mapped files too.
    """

    output: str
    anonymous_bytes: int
    resident_bytes: int


def run_program(command: Sequence[object], cores: Sequence[int], environment: Mapping[str, str] | None = None) -> Finished:
    """Runs a program on these cores until it ends. Raises SystemExit with its last words where it
    fails, or takes longer than PROGRAM_S.
    """
    words = pinned(command, cores)
    peak = _Peak()
    with (
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
        # In this folder `python -m dflash_moe` is the tree of this campaign, installed or not.
        subprocess.Popen(words, stdout=output, stderr=errors, cwd=ROOT, env=os.environ | dict(environment or {})) as process,
    ):
        watcher = threading.Thread(target=peak.watch, args=(process,))
        watcher.start()
        try:
            code = process.wait(PROGRAM_S)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            # Whatever ended the wait, no program outlives its measurement.
            process.kill()
            process.wait()
            watcher.join()
        if code:
            errors.seek(0)
            last = "\n".join(errors.read().splitlines()[-12:])
            raise SystemExit(f"{' '.join(shown(words))}: {'too slow' if code == -1 else f'exit status {code}'}\n{last}")
        output.seek(0)
        return Finished(output.read(), peak.anonymous_bytes, peak.resident_bytes)


class _Peak:
    """The largest amounts of memory that a program had whenever it was looked at."""

    def __init__(self) -> None:
        self.anonymous_bytes = 0
        self.resident_bytes = 0

    def watch(self, process: subprocess.Popen[Any]) -> None:
        """Looks until the program has ended."""
        status = Path("/proc") / str(process.pid) / "status"
        while process.returncode is None:
            with contextlib.suppress(OSError):
                found = dict(line.split(":", 1) for line in status.read_text().splitlines())
                # A process that has ended but was not waited for has no memory any more.
                if "RssAnon" in found:
                    self.anonymous_bytes = max(self.anonymous_bytes, _kilobytes(found["RssAnon"]))
                    self.resident_bytes = max(self.resident_bytes, _kilobytes(found["VmHWM"]))
            time.sleep(LOOK_S)


def _kilobytes(value: str) -> int:
    return int(value.split()[0]) << 10


class Neighbours:
    """Tells how busy others keep this machine's cores while our programs run. Programs that wait at
    barriers by spinning lose far more to a neighbour than its share: one compiler took llama.cpp
    with a thread on each core from 88 tokens/s to 6.
    """

    def __init__(self, running: Callable[[], Iterable[int]] = tuple) -> None:
        """`running` returns the ids of processes of ours that this one does not wait for before the
        end, such as those of a server. What they start themselves may come and go meanwhile.
        """
        self._running = running
        self._before = _busy_s(running())

    def busy_cores(self) -> float:
        """Returns the cores that others, and the hypervisor, took on average since the beginning.
        All programs that were started since then must have ended.
        """
        now = _busy_s(self._running())
        machine, own, wall = (after - before for after, before in zip(now, self._before, strict=True))
        return max(0.0, machine - own) / wall


def _busy_s(running: Iterable[int]) -> tuple[float, float, float]:
    """Returns the seconds that the machine's cores were busy, those that this process, its ended
    programs and the processes `running` took of them, and the time.
    """
    user, nice, system, _idle, _wait, interrupts, soft, stolen = map(int, Path("/proc/stat").read_text().split()[1:9])
    ticks = user + nice + system + interrupts + soft + stolen
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    per_s = os.sysconf("SC_CLK_TCK")
    own_s = sum(one.ru_utime + one.ru_stime for one in own)
    for pid in running:
        # One that has just ended is among the children of another.
        with contextlib.suppress(OSError):
            # A program's name, in brackets, may have spaces. Fields 14 to 17 are its user and
            # system time, and those of its children that it has waited for.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            own_s += sum(map(int, fields[11:15])) / per_s
    return ticks / per_s, own_s, time.monotonic()


@contextlib.contextmanager
def serving(command: Sequence[object], cores: Sequence[int], port: int, is_ready: Callable[[], bool]) -> Iterator[None]:
    """Runs a server on these cores for the length of the block. Raises SystemExit where it is not
    ready within START_S.
    """
    with tempfile.TemporaryFile("w+") as said:
        server = subprocess.Popen(pinned(command, cores), stdout=said, stderr=said)
        try:
            deadline = time.monotonic() + START_S
            while not is_ready():
                if server.poll() is not None or time.monotonic() > deadline:
                    said.seek(0)
                    last = "\n".join(said.read().splitlines()[-12:])
                    raise SystemExit(f"{' '.join(shown(command))} did not start within {START_S:g} s\n{last}")
                time.sleep(0.05)
            yield
        finally:
            server.kill()
            server.wait()


def free_port() -> int:
    """Returns a port of 127.0.0.1 on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_listening(port: int) -> bool:
    """Says whether something accepts connections on this port of 127.0.0.1."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def pinned(command: Sequence[object], cores: Sequence[int]) -> list[str]:
    """Returns the command line on these cores."""
    return ["taskset", "-c", ",".join(map(str, cores)), *map(str, command)]


def shown(command: Sequence[object]) -> list[str]:
    """Returns the words of a command line with the name alone of every absolute path, so that a
    recorded command does not name a machine's folders.
    """
    return [Path(word).name if word.startswith("/") else word for word in map(str, command)]
