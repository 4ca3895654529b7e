"""`bench streaming` with a server of its own: the demo's model behind `dflash-moe serve`.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dflash_moe.bench.results import read_result
from dflash_moe.bench.streaming.served_model import served_model
from dflash_moe.cli.main import run
from dflash_moe.errors import DflashError

pytestmark = pytest.mark.transformers
TOPOLOGY = (
    "version: 1\nhost: {threads: 1}\nworkers:\n  - {name: w0, backend: cpu, address: loopback}\nengine: {kv_memory: 16MiB}\n"
)


@pytest.fixture
def topology(tmp_path) -> Path:
    path = tmp_path / "one.yaml"
    path.write_text(TOPOLOGY)
    return path


def test_the_demo_is_served_measured_and_gone(topology, tmp_path, capsys):
    out = tmp_path / "s.json"
    arguments = ["--requests", "4", "--concurrency", "1,4", "--new-tokens", "8", "--prompt-tokens", "40", "--repeat", "1"]
    code = run(["bench", "streaming", "-m", "demo", "--topology", str(topology), *arguments, "--json", str(out)])
    assert code == 0, capsys.readouterr().err
    found = read_result(out, case="streaming")
    assert (found["complete"], found["params"]["model"], found["params"]["topology"]) == (True, "demo", "one.yaml")
    for row in found["rows"]:
        assert (row["completed"], row["failed"], row["tokens"], row["cached_tokens"]) == (4, 0, 32, 0)
        assert abs(row["counted_prompt_tokens"] - 40) < 15
        assert row["queue_s"]["p50"] > 0
        assert {"serve", "front"} <= row["server_cpu_us_per_token"].keys()
        assert min(row["server_cpu_us_per_token"].values()) >= 0
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert str(topology) not in listed


def test_a_server_that_does_not_start_says_why(tmp_path):
    (tmp_path / "wrong.yaml").write_text("version: 99\n")
    said = []
    with (
        pytest.raises(DflashError, match="exit code 2 before it was ready") as found,
        served_model("demo", tmp_path / "wrong.yaml", said.append),
    ):
        pass
    assert "wrong.yaml" in str(found.value)
