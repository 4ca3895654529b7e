"""`dflash-moe serve` as a user has it, with the demo's model: the tokens are those of `dm.LLM`,
turns find their prefix, and the process ends as it was asked to.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("openai")

import openai

import dflash_moe as dm
from tests.server.scripted_engine import MODEL
from tests.server.served import wait_for

pytestmark = pytest.mark.transformers
TOPOLOGY = (
    "version: 1\nhost: {threads: 1}\nworkers:\n  - {name: w0, backend: cpu, address: loopback}\nengine: {kv_memory: 16MiB}\n"
)
HELLO = [{"role": "user", "content": "Return a list of"}]
KEYS = ("the-key-of-the-first-user", "the-key-of-the-second-user")


@contextmanager
def serving(tmp_path: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and its URL once it is ready."""
    topology = tmp_path / "one.yaml"
    topology.write_text(TOPOLOGY)
    command = [sys.executable, "-m", "dflash_moe", "serve", "--model", "demo", "--topology", str(topology), "--port", "0"]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        found = re.fullmatch(r"ready on (http://\S+)\n", line)
        assert found, line + process.stderr.read()
        yield process, found[1]
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=60)
        process.kill()


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    keys = folder / "keys"
    keys.write_text("\n".join(KEYS))
    keys.chmod(0o600)
    with serving(folder, "--api-key-file", str(keys), "--alias", "gpt-4o", "--max-context", "600") as (_, found):
        # The process that renders templates lives as long as all tests.
        with client(found) as asked:
            asked.chat.completions.create(model="demo", messages=HELLO, max_tokens=1)
        yield found


def client(url: str, key: str = KEYS[0]) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=120)


def test_tokens_are_those_of_the_engine_alone(url):
    with dm.LLM(MODEL, dm.Topology.parse(TOPOLOGY)) as llm:
        (chat,) = llm.chat(HELLO, dm.SamplingParams(temperature=0, max_tokens=12))
        (text,) = llm.generate("def main", dm.SamplingParams(temperature=1.0, seed=7, max_tokens=12))
        (stopped,) = llm.generate("def main", dm.SamplingParams(temperature=0, max_tokens=12, stop=chat.text[3:5]))
    with client(url) as asked:
        found = asked.chat.completions.create(model="gpt-4o", messages=HELLO, max_tokens=12)
        assert (found.choices[0].message.content, found.choices[0].finish_reason) == (chat.text, chat.finish_reason)
        found = asked.completions.create(model="demo", prompt="def main", temperature=1.0, seed=7, max_tokens=12)
        assert found.choices[0].text == text.text
        chunks = asked.completions.create(model="demo", prompt="def main", max_tokens=12, stop=[chat.text[3:5]], stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == stopped.text


def test_the_next_turn_finds_its_prefix_and_another_key_does_not(url):
    with client(url) as asked, client(url, KEYS[1]) as other:
        long = [{"role": "user", "content": "Return a list of the names in the current scope. " * 4}]
        first = asked.chat.completions.create(model="demo", messages=long, max_tokens=40)
        answer = {"role": "assistant", "content": first.choices[0].message.content}
        turn = [*long, answer, {"role": "user", "content": "and then"}]
        second = asked.chat.completions.create(model="demo", messages=turn, max_tokens=4)
        cached = second.usage.prompt_tokens_details.cached_tokens
        assert cached >= (first.usage.prompt_tokens + 40) // 16 * 16 - 16
        assert (
            other.chat.completions.create(model="demo", messages=turn, max_tokens=4).usage.prompt_tokens_details.cached_tokens
            == 0
        )


def test_one_fingerprint_names_what_decides_tokens(url):
    with client(url) as asked:
        first, second = (asked.completions.create(model="demo", prompt="x", max_tokens=1) for _ in range(2))
        assert first.system_fingerprint == second.system_fingerprint
        assert re.fullmatch("fp_[0-9a-f]{16}", first.system_fingerprint)
        assert asked.models.list().data[0].model_dump()["max_model_len"] == 600


def test_a_wrong_key_is_refused(url):
    with client(url, "another-key-altogether") as asked, pytest.raises(openai.AuthenticationError):
        asked.models.list()
    with urllib.request.urlopen(url + "/ready", timeout=30) as answer:
        assert json.loads(answer.read()) == {"status": "ready"}


def test_sigterm_lets_open_requests_finish_and_ends_with_0(tmp_path):
    with serving(tmp_path) as (process, url), client(url) as asked:
        chunks = iter(
            asked.completions.create(model="demo", prompt="def", max_tokens=200, stream=True, extra_body={"ignore_eos": True})
        )
        next(chunks)
        process.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
        assert process.wait(60) == 0


def test_a_second_signal_waits_for_nobody_and_ctrl_c_ends_with_130(tmp_path):
    with serving(tmp_path, "--max-context", "4000") as (process, url), client(url) as asked:
        chunks = iter(asked.completions.create(model="demo", prompt="def", stream=True, extra_body={"ignore_eos": True}))
        next(chunks)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: _status(url + "/ready") == 503)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        with contextlib.suppress(openai.APIError):
            list(chunks)
        assert process.stderr.read().rstrip().endswith("interrupted")


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_killed_front_costs_its_requests_and_no_weights(tmp_path):
    with serving(tmp_path) as (process, url):
        children = Path(f"/proc/{process.pid}/task").glob("*/children")
        fronts = [
            pid
            for found in children
            for pid in found.read_text().split()
            if b"front" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        (front,) = fronts
        os.kill(int(front), signal.SIGKILL)
        with client(url) as asked:
            wait_for(lambda: _status(url + "/ready") == 200)
            assert asked.completions.create(model="demo", prompt="def", max_tokens=2).choices[0].text


def test_the_plan_of_a_server_leaves_memory_to_its_front(monkeypatch, capsys):
    from dflash_moe.cli import options
    from dflash_moe.cli.main import run
    from dflash_moe.errors import ConfigError
    from dflash_moe.server.front_memory import front_bytes

    left = []

    def topology_for(_path, _model, _overrides, *, front_bytes):
        left.append(front_bytes)
        raise ConfigError("far enough")

    monkeypatch.setattr(options, "topology_for", topology_for)
    assert run(["serve", "--model", "demo", "--port", "0"]) == 2
    assert "far enough" in capsys.readouterr().err
    # The demo's vocabulary has 2,048 words.
    assert left == [front_bytes(2048)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--host", "0.0.0.0"), "--api-key-file"),
        (("--tls-cert", "x.pem"), "--tls-key"),
        (("--api-key-file", "no_such_file"), "No such file"),
        (("--max-body", "5"), "1KiB..1GiB"),
        (("--max-queue", "0"), "--max-queue"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_loaded(capsys, arguments, said):
    from dflash_moe.cli.main import run

    assert run(["serve", "--model", "demo", "--port", "0", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[-1]
    assert "loading" not in err


def test_a_taken_port_ends_the_start(capsys):
    from dflash_moe.cli.main import run

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["serve", "--model", "demo", "--port", str(port)]) == 2
    assert f"--port {port}: Address already in use" in capsys.readouterr().err
