"""`dflash-moe generate` cut short: a worker dies, somebody sends a signal, the reader of its output
leaves. It ends with the right exit status and without a traceback, and so do its workers.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dflash_moe.cli.options import PASSIVE_OPENMP
from tests import leaks
from tests.fault.conftest import READY_S, children_of, is_gone, wait_until

pytestmark = pytest.mark.transformers

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "bench" / "demo_model" / "dflash_moe_demo" / "model"
# A slow link, so that four of them leave the cores to each other.
TOPOLOGY = (
    "version: 1\nhost: {fallback: none}\nfailure: {restart: off}\n"
    "workers: [{name: w0, threads: 1, emulate: {delay_ms: 20}}, {name: w1, threads: 1}]\n"
)
ENDINGS = ("killed worker", "SIGINT", "SIGTERM", "closed stdout")
GONE_S = 30.0  # for workers, once their host is gone
END_S = 60.0


class Hosts:
    """Commands in the midst of their text, and what `forked_commands` says of their ends."""

    def __init__(self, parent: subprocess.Popen[bytes]) -> None:
        self.by_ending: dict[str, Generating] = {}
        self._parent = parent
        self._statuses: dict[int, int] = {}
        self._rest = b""

    def read_numbers(self, seconds: float) -> list[int] | None:
        """The next line it prints; None when none comes in time."""
        assert self._parent.stdout is not None
        while b"\n" not in self._rest:
            if not select.select([self._parent.stdout], [], [], seconds)[0]:
                return None
            chunk = os.read(self._parent.stdout.fileno(), 4096)
            assert chunk, "the commands' parent is gone"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return [int(word) for word in line.split()]

    def status_of(self, pid: int, seconds: float) -> int | None:
        """The exit status of a command, once it ended."""
        if pid not in self._statuses and (numbers := self.read_numbers(seconds)):
            self._statuses[numbers[0]] = numbers[1]
        return self._statuses.get(pid)


@dataclass(slots=True)
class Generating:
    """One command: its process id, the reading ends of its output, and its workers' process ids by
    name.
    """

    hosts: Hosts
    pid: int
    stdout: int
    stderr: int
    workers: dict[str, int]

    def end(self) -> tuple[int, list[str]]:
        """(exit status, lines of stderr) once host and workers are gone; what else it writes is
        thrown away.
        """
        until = time.monotonic() + END_S
        said = b""
        while (status := self.hosts.status_of(self.pid, 0.02)) is None and time.monotonic() < until:
            for end in select.select([end for end in (self.stdout, self.stderr) if end >= 0], [], [], 0.02)[0]:
                chunk = os.read(end, 1 << 16)
                said += chunk if end == self.stderr else b""
        assert status is not None, "it did not end"
        while chunk := os.read(self.stderr, 1 << 16):
            said += chunk
        lines = said.decode().splitlines()
        assert wait_until(lambda: all(is_gone(pid) for pid in self.workers.values()), GONE_S), "a worker outlived its host"
        assert not any("Traceback" in line or "Error:" in line for line in lines), lines
        return status, lines


def _with_positions(folder: Path, count: int) -> Path:
    """Makes the shipped model with so many positions, because a sequence is admitted for all tokens
    that it may have.
    """
    folder.mkdir()
    for path in MODEL.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    config = json.loads((MODEL / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": count}))
    return folder


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Generating]]:
    """One command for each ending, all in the midst of their text."""
    folder = tmp_path_factory.mktemp("two")
    topology = folder / "two.yaml"
    topology.write_text(TOPOLOGY)
    model = _with_positions(folder / "model", 200_000)
    pipes = [(os.pipe(), os.pipe()) for _ in ENDINGS]
    theirs = [(out[1], err[1]) for out, err in pipes]
    command = [sys.executable, "-m", "tests.fault.forked_commands", ":".join(f"{out},{err}" for out, err in theirs)]
    command += ["generate", "--model", str(model), "--topology", str(topology)]
    # which this model follows by nines for ever
    command += ["--prompt", "a", "--max-tokens", "100000"]
    parent = subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=ROOT, pass_fds=[end for pair in theirs for end in pair],
        env={**os.environ, "PYTHONPATH": str(ROOT), **PASSIVE_OPENMP},
    )  # fmt: skip
    for end in (end for pair in theirs for end in pair):
        os.close(end)
    made = Hosts(parent)
    try:
        pids = made.read_numbers(READY_S)
        assert pids, "nothing was started"
        for ending, pid, (out, err) in zip(ENDINGS, pids, pipes, strict=True):
            assert select.select([out[0]], [], [], READY_S)[0]
            assert os.read(out[0], 1), "it ended before its first character"
            made.by_ending[ending] = Generating(made, pid, out[0], err[0], _workers_of(pid))
        yield made.by_ending
    finally:
        for host in made.by_ending.values():
            if not is_gone(host.pid):
                os.kill(host.pid, signal.SIGKILL)
        parent.kill()
        parent.communicate(timeout=200)
        for out, err in pipes:
            os.close(err[0])
            with contextlib.suppress(OSError):  # closed by the test of that
                os.close(out[0])


def _workers_of(pid: int) -> dict[str, int]:
    children = {child: Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0") for child in children_of(pid)}
    workers = {words[words.index(b"--name") + 1].decode(): child for child, words in children.items() if b"--name" in words}
    assert set(workers) == {"w0", "w1"}
    return workers


def test_a_worker_that_is_killed_ends_it_with_status_3_and_one_sentence(hosts: dict[str, Generating]) -> None:
    host = hosts["killed worker"]
    os.kill(host.workers["w1"], signal.SIGKILL)
    status, lines = host.end()
    assert status == 3
    assert lines[-1].startswith("worker w1 was lost"), lines
    assert "(layer model.layers." in lines[-1]
    assert f"process {host.workers['w1']} was killed by SIGKILL" in lines[-1]


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_ends_it_and_its_workers_and_leaves_no_name(
    hosts: dict[str, Generating], number: signal.Signals, expected: int
) -> None:
    host = hosts[number.name]
    before = leaks.take().names
    os.kill(host.pid, number)
    status, lines = host.end()
    assert status == expected
    assert ("interrupted" in lines) == (number is signal.SIGINT), lines
    assert leaks.take().names <= before


def test_it_ends_quietly_when_the_reader_of_its_output_leaves(hosts: dict[str, Generating]) -> None:
    host = hosts["closed stdout"]
    os.close(host.stdout)
    host.stdout = -1
    status, lines = host.end()
    assert status == 1
    assert not [line for line in lines if "pipe" in line.lower()], lines
    assert all(line.startswith(("reading model", "loading ")) for line in lines), lines
