"""llama-server with our workers: the same tokens whatever the flags, and typed ends.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.llama.programs import Llama, Server, nmse, read_logits, run, serving

PROMPTS = ("The import statement ", "A class definition is ", "def main(", "Return the number of ")
FINALLY_S = 10.0


@pytest.fixture(scope="module")
def alone(llama: Llama, demo_gguf: Path) -> list[list[int]]:
    """What llama.cpp answers by itself, one request at a time."""
    with serving(llama, demo_gguf) as server:
        return [server.complete(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("flags", "ipc"),
    [
        ((), "dtype: f32"),
        ((), "dtype: bf16"),
        (("--cpu-moe",), "dtype: f32"),
        (("--n-cpu-moe", "1"), "dtype: f32"),
        (("--load-mode", "none"), "dtype: f32"),
        ((), "dtype: f32, transport: stream"),
    ],
)
def test_greedy_tokens_are_llama_cpps(
    llama: Llama, demo_gguf: Path, alone: list[list[int]], tmp_path: Path, flags: tuple[str, ...], ipc: str
) -> None:
    report = tmp_path / "report.json"
    with serving(llama, demo_gguf, *flags, launcher=llama.launcher(demo_gguf, "--json", report, ipc=ipc)) as server:
        found = [server.complete(prompt) for prompt in PROMPTS]
    server.process.wait(FINALLY_S)
    counted = json.loads(report.read_text())
    assert counted["calls"] > 0
    assert counted["failed_calls"] == 0
    assert found == alone


def test_four_slots_at_once_answer_as_one_does(llama: Llama, demo_gguf: Path, alone: list[list[int]]) -> None:
    """llama.cpp's own kernels do not promise equal bits for other batches, so that its own slots
    are what the tokens are held against where they part from one request at a time.
    """
    with serving(llama, demo_gguf, "-np", 4) as server:
        own = _at_once(server)
    with serving(llama, demo_gguf, "-np", 4, launcher=llama.launcher(demo_gguf)) as server:
        found = _at_once(server)
    assert all(tokens in (one, four) for tokens, one, four in zip(found, alone, own, strict=True))


def _at_once(server: Server) -> list[list[int]]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(server.complete, PROMPTS))


def test_a_lost_worker_fails_requests_and_the_server_lives(llama: Llama, demo_gguf: Path) -> None:
    with serving(llama, demo_gguf, launcher=llama.launcher(demo_gguf)) as server, ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(server.complete, PROMPTS[0], 1500)
        time.sleep(0.5)
        os.kill(_worker_pids(server.process.pid)[0], signal.SIGKILL)
        with pytest.raises(urllib.error.HTTPError) as first:
            under_way.result(timeout=30)
        began = time.monotonic()
        with pytest.raises(urllib.error.HTTPError) as second:
            server.complete(PROMPTS[1])
        assert time.monotonic() - began < 5
        assert first.value.code == second.value.code == 500
        assert server.process.poll() is None
        assert server.is_healthy()
    told = [line for line in server.text().splitlines() if re.search(r"worker w[01] .*(lost|gone|ended|killed)", line)]
    assert told, server.text()[-3000:]


def _resident_of(launcher: int, file: Path) -> int:
    """Bytes of `file` that are resident in the program of a launcher, through its mappings."""
    done = run(["ps", "-ww", "--ppid", launcher, "-o", "pid=,args="])
    (pid,) = [line.split()[0] for line in done.stdout.splitlines() if "llama-server" in line]
    kibibytes, is_of_file, num_mappings = 0, False, 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_of_file = line.endswith(str(file))
            num_mappings += is_of_file
        elif is_of_file and line.startswith("Rss:"):
            kibibytes += int(line.split()[1])
    assert num_mappings > 0
    return 1024 * kibibytes


def _worker_pids(launcher: int) -> list[int]:
    done = run(["ps", "-ww", "--ppid", launcher, "-o", "pid=,args="])
    found = [int(line.split()[0]) for line in done.stdout.splitlines() if " worker " in line]
    assert len(found) == 2, done.stdout
    return found


def test_a_stub_serves_the_same_tokens_and_holds_nothing(
    llama: Llama, demo_gguf: Path, alone: list[list[int]], tmp_path: Path
) -> None:
    stub = tmp_path / "stub.gguf"
    assert run([sys.executable, "-m", "dflash_moe", "model", "stub", demo_gguf, stub]).returncode == 0
    with serving(llama, stub, launcher=llama.launcher(demo_gguf)) as server:
        assert [server.complete(prompt) for prompt in PROMPTS] == alone
        assert _resident_of(server.process.pid, stub) <= 512 * stub.stat().st_blocks
    plain, ours = tmp_path / "plain.bin", tmp_path / "ours.bin"
    assert run([llama.logits, "-m", demo_gguf, plain, 17]).returncode == 0
    assert run([llama.logits, "-m", stub, ours, 17]).returncode == 0
    assert not nmse(read_logits(ours), read_logits(plain)) < float("inf"), "a stub without the plug-in gave plausible logits"


def test_another_model_than_the_workers_is_not_taken(
    llama: Llama, architectures: Path, demo_gguf: Path, tmp_path: Path
) -> None:
    other = architectures / "qwen3moe-moe.gguf"
    done = run([*llama.launcher(demo_gguf), llama.logits, "-m", other, tmp_path / "out.bin", 9])
    assert done.returncode == 1, done.stderr[-3000:]
    assert "blk." in done.stderr


def test_a_program_that_only_tells_its_version_is_left_alone(llama: Llama, demo_gguf: Path) -> None:
    for flag in ("--version", "--list-devices", "--help"):
        done = run([*llama.launcher(demo_gguf), llama.program("llama-server"), flag], stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr[-2000:]
