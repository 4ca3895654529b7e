"""The servers that the serving campaigns measure: how each is started, and when it is there.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.peers.programs import ROOT, shown
from bench.peers.sides import ACTIVATIONS, Plan, write_topology
from bench.serving.model import served_model_path
from dflash_moe.bench.streaming.endpoint import Endpoint, endpoint_of
from dflash_moe.bench.streaming.served_model import ServedModel
from dflash_moe.handover import tied_program

# vLLM compiles the model for two minutes of two cores, which others may share.
START_S = 600.0
END_S = 30.0
# Lines of what a server has said that are shown where it failed.
MOST_QUOTED = 30
LOOK_S = 0.1
KV_BYTES = 1 << 30
# Of one sequence: a prompt of 2,048 tokens has room, and so has its first token.
MOST_TOKENS = 2304
WATCHED = "bench.serving.watched_server"


class Server(ServedModel):
    """A server that is ready: the processes of a program that listens at a port of 127.0.0.1."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, command: Sequence[object]) -> None:
        super().__init__(process.pid, f"http://127.0.0.1:{port}")
        self.pid = process.pid
        self.command = shown(command)
        self.endpoint: Endpoint = endpoint_of(self.url)

    def status(self, path: str, timeout_s: float = 5.0) -> int:
        """Returns the status of a GET, 0 where nobody answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout_s) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def tree(self) -> dict[int, str]:
        """Returns the command line of the program and of each process below it, by its id."""
        found, waiting = {}, [self.pid]
        while waiting:
            pid = waiting.pop()
            with suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                for children in Path(f"/proc/{pid}/task").glob("*/children"):
                    waiting += map(int, children.read_text().split())
        return found


@contextmanager
def running(command: Sequence[object], port: int, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Runs a server for the length of the block; it ends with this process too. Raises SystemExit
    where it is not ready within START_S. Whatever is raised, its last words are shown.
    """
    tied = [sys.executable, "-I", "-S", str(Path(tied_program.__file__)), str(os.getpid()), *map(str, command)]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            tied, stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd=ROOT, env=os.environ | dict(environment or {})
        )
        try:
            server = Server(process, port, command)
            deadline = time.monotonic() + START_S
            # A server that lives may still be loading.
            while server.status("/health") != 200 or server.status("/v1/models") != 200:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{' '.join(server.command)} was not ready within {START_S:g} s")
                time.sleep(LOOK_S)
            yield server
        except BaseException:
            said.seek(0)
            lines = [line for line in said.read().splitlines() if " INFO request: " not in line]
            print(*lines[-MOST_QUOTED:], sep="\n", file=sys.stderr)
            if process.poll() is not None:
                print(f"the server has ended with status {process.returncode}", file=sys.stderr)
            raise
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()
            process.wait()


def our_command(model: object, topology: Path, port: int, watched: Sequence[object] = ()) -> list[object]:
    """Returns the command line of our server; `watched` are the arguments of watched_server.py,
    which runs it where there are any.
    """
    program: list[object] = ["-m", WATCHED, *watched] if watched else ["-m", "dflash_moe"]
    fixed = ["serve", "--model", model, "--topology", topology, "--port", port, "--drain-s", 0]
    return [sys.executable, *program, *fixed]


def command_of(
    plan: Plan, side: str, fmt: str, streams: int, port: int, watched: Sequence[object] = ()
) -> tuple[list[object], dict[str, str]]:
    """Returns the command line and the environment of a side with two threads, which is to serve so
    many streams at once and one prompt beside them.
    """
    stored = fmt if fmt != "16bit" else "f16" if side == "llama" else "bf16"
    model = served_model_path(plan.models, plan.shape(fmt), stored, lambda line: print(line, file=sys.stderr))
    if side == "ours":
        topology = plan.scratch / f"served-{fmt}.yaml"
        local = write_topology(plan, "local", ACTIVATIONS[fmt]).read_text()
        topology.write_text(f"{local}engine: {{kv_memory: {KV_BYTES}}}\n")
        return our_command(model, topology, port, watched=watched), {}
    at_once = streams + 1
    if side == "llama":
        assert plan.llama_bin is not None
        # Prompts differ, so that what it keeps of former ones would cost it time and bring nothing.
        fixed = ["-t", 2, "-ngl", 0, "-ctk", "f16", "-ctv", "f16", "-np", at_once, "-c", at_once * MOST_TOKENS]
        return [plan.llama_bin / "llama-server", "-m", model, *fixed, "--cache-ram", 0, "--no-ui", "--port", port], {}
    assert plan.vllm_python is not None
    fixed = ["--dtype", "bfloat16", "--max-model-len", MOST_TOKENS, "--max-num-seqs", at_once]
    memory = ["--kv-cache-memory-bytes", KV_BYTES, "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    program = [plan.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    bound = ",".join(map(str, plan.cores))
    settings = {"VLLM_CPU_OMP_THREADS_BIND": bound, "VLLM_NO_USAGE_STATS": "1"}
    return [*program, *fixed, *memory, "--host", "127.0.0.1", "--port", port], settings
