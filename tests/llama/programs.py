"""Runs llama.cpp's programs, plainly and under `dflash-moe llama`.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# A tiny model is loaded and computed within seconds; the rest is for a busy machine.
PROGRAM_S = 120.0
START_S = 60.0
TWO_WORKERS = """\
version: 1
ipc: {{{ipc}}}
workers:
  - {{name: w0, backend: cpu, threads: 1}}
  - {{name: w1, backend: cpu, threads: 1}}
"""


@dataclass(frozen=True, slots=True)
class Llama:
    """One build of llama.cpp."""

    build: Path
    logits: Path
    folder: Path

    @classmethod
    def prepare(cls, sources: Path, build: Path, folder: Path, root: Path) -> Llama:
        """Compiles logits.c."""
        program, libraries = folder / "logits", build / "bin"
        headers = [f"-I{sources / 'include'}", f"-I{sources / 'ggml' / 'include'}"]
        linked = [f"-L{libraries}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"]
        source = root / "tests" / "llama" / "logits.c"
        subprocess.run(["cc", "-std=c11", "-O1", *headers, source, "-o", program, *linked], check=True, timeout=PROGRAM_S)
        return cls(build, program, folder)

    def program(self, name: str) -> Path:
        return self.build / "bin" / name

    def topology(self, ipc: str = "dtype: f32") -> Path:
        path = self.folder / f"{abs(hash(ipc))}.yaml"
        path.write_text(TWO_WORKERS.format(ipc=ipc))
        return path

    def launcher(self, model: Path, *options: object, ipc: str = "dtype: f32") -> list[str]:
        """The beginning of a command line; the program follows."""
        chosen = ["--model", model, "--topology", self.topology(ipc), *options]
        return [*map(str, [sys.executable, "-m", "dflash_moe", "llama", *chosen]), "--"]


def run(command: Sequence[object], **more: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, whatever its exit status."""
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
        errors="replace",
        **more,
    )


def read_logits(path: Path) -> np.ndarray[Any, Any]:
    """What logits.c has written."""
    return np.fromfile(path, np.float32)


def nmse(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
    """The mean squared error over the mean square, as llama.cpp's own tests judge logits."""
    difference = found.astype(np.float64) - wanted
    return float(np.sum(difference**2) / np.sum(wanted.astype(np.float64) ** 2))


@dataclass(slots=True)
class Server:
    """A llama-server that answers, maybe under a launcher."""

    process: subprocess.Popen[str]
    port: int
    log: Path

    def complete(self, prompt: str, tokens: int = 24, **more: Any) -> list[int]:
        """The ids of greedy tokens. Raises urllib's HTTPError with the server's own words."""
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "return_tokens": True, "ignore_eos": True}
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/completion",
            json.dumps(body | {"cache_prompt": False} | more).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=PROGRAM_S) as answer:
            return list(json.loads(answer.read())["tokens"])

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def text(self) -> str:
        return self.log.read_text(errors="replace")


@contextmanager
def serving(llama: Llama, model: Path, *flags: object, launcher: Sequence[object] = ()) -> Iterator[Server]:
    """A llama-server of one thread, ended by SIGTERM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    log = llama.folder / f"server-{port}.log"
    program = [llama.program("llama-server"), "-m", model, "-c", 2048, "--port", port, "--no-ui", "-t", 1, *flags]
    command = list(map(str, [*launcher, *program]))
    with (
        log.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=out, text=True, env=dict(os.environ)) as process,
    ):
        server = Server(process, port, log)
        try:
            deadline = time.monotonic() + START_S
            while not server.is_healthy():
                is_late = time.monotonic() > deadline
                assert process.poll() is None, server.text()[-3000:]
                assert not is_late, server.text()[-3000:]
                time.sleep(0.1)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
