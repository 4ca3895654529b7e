"""The commands of docs/howto/vllm.md do what the page says: on one machine, and with a worker that
was started by hand, here at an address of this machine.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.lab.vllm_process import ENVIRONMENT, LIMIT_S
from tests.vllm.prompts import TWO_WORKERS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "vllm.md").read_text(encoding="utf-8")
ONE_MACHINE, TWO_MACHINES = (
    textwrap.dedent(block) for block in re.findall(r"^ *```yaml\n(.*?)^ *```", PAGE, re.DOTALL | re.MULTILINE)
)
# As on the page, but for what is different here.
SERVE = "DFLASH_MOE_TOPOLOGY=workers.yaml vllm serve path/to/checkpoint"
KEY = "dflash-moe key make workers.key"
WORKER = """dflash-moe worker --topology workers.yaml --name far --model path/to/checkpoint \\
      --key-file workers.key --listen tcp://0.0.0.0:7171"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture
def port() -> int:
    return free_port()


@contextmanager
def running(command: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Runs a command of the page in a folder, and ends it with the block."""
    # `vllm` itself looks for a distribution of this name, which the build for processors is not.
    server = f"{sys.executable} -m vllm.entrypoints.openai.api_server --model "
    command = re.sub(r"(?<!\S)vllm serve ", server, command)
    command = re.sub(r"(?<!\S)dflash-moe ", f"{sys.executable} -m dflash_moe ", command)
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with (folder / "said.txt").open("a", encoding="utf-8") as said:
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {command}"], cwd=folder, env=env, stdout=said, stderr=said, text=True
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


def answer_of(server: subprocess.Popen[str], port: int, path: str, body: dict | None = None) -> dict:
    """Returns what the server answers, once it does."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode() if body else None,
        headers={"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read() or b"{}")
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline or server.poll() is not None:
                raise
            time.sleep(0.5)


def workers_of(folder: Path) -> str:
    """Returns what `workers list` says of the host whose log is in this folder; others may run."""
    (pid,) = re.findall(r"layers after .* \(process (\d+)\)", (folder / "said.txt").read_text())
    done = subprocess.run(
        [sys.executable, "-m", "dflash_moe", "workers", "--pid", pid, "list"], cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout


def complete(server: subprocess.Popen[str], port: int) -> str:
    """Returns what the model says to a prompt, of which all eight tokens must come."""
    answer_of(server, port, "/health")
    model = answer_of(server, port, "/v1/models")["data"][0]["id"]
    asked = {"model": model, "prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    answer = answer_of(server, port, "/v1/completions", asked)
    assert answer["usage"]["completion_tokens"] == 8
    return answer["choices"][0]["text"]


def test_the_page_has_these_commands():
    for command in (SERVE, KEY, WORKER):
        assert command in PAGE
    assert "name: w1" in ONE_MACHINE
    assert "name: far" in TWO_MACHINES


def test_on_one_machine_workers_have_the_experts(made, tmp_path, port):
    assert TWO_WORKERS.count("w1") == ONE_MACHINE.count("w1")
    (tmp_path / "workers.yaml").write_text(ONE_MACHINE)
    command = SERVE.replace("path/to/checkpoint", str(made("qwen3_moe", "bf16")))
    with running(f"{command} --port {port} --enforce-eager --max-model-len 512", tmp_path) as server:
        complete(server, port)
        said = workers_of(tmp_path)
    assert "w0" in said
    assert "w1" in said
    assert "computes the routed experts of 2 layers" in (tmp_path / "said.txt").read_text()


def test_with_a_worker_elsewhere_it_has_the_experts(made, tmp_path, port):
    far, other_port = free_port(), free_port()
    (tmp_path / "workers.yaml").write_text(TWO_MACHINES.replace("10.0.0.2:7171", f"127.0.0.1:{far}"))
    model = str(made("qwen3_moe", "bf16"))
    with running(KEY, tmp_path) as made_key:
        assert made_key.wait(timeout=60) == 0
    worker = WORKER.replace("0.0.0.0:7171", f"127.0.0.1:{far}").replace("path/to/checkpoint", model)
    command = f"DFLASH_MOE_KEY_FILE=workers.key {SERVE}".replace("path/to/checkpoint", model)
    serve = f"{command} --port {port} --enforce-eager --max-model-len 512"
    with running(worker, tmp_path), running(serve, tmp_path) as server:
        text = complete(server, port)
        assert "far" in workers_of(tmp_path)
        # A second engine has the same worker, and the first goes on, meanwhile and afterwards.
        with running(serve.replace(f"--port {port}", f"--port {other_port}"), tmp_path) as second:
            assert complete(second, other_port) == text
            assert complete(server, port) == text
        assert complete(server, port) == text
