"""`bench remote` over a worker that somebody started: both sides are measured, and what one side is
given reaches its host alone.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_moe.cli import main
from tests.fault.conftest import StartWorker
from tests.host_models import checkpoint

pytestmark = pytest.mark.transformers


def test_what_one_side_is_given_reaches_its_host_alone(
    tmp_path: Path, start_worker: StartWorker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    model, out = checkpoint("qwen3_moe", "f32"), tmp_path / "found.json"
    worker = start_worker(model, f"unix://{tmp_path}/worker.sock")
    environ = Path(f"/proc/{worker.process.pid}/environ")
    before = environ.read_bytes()
    placed = tmp_path / "far.yaml"
    placed.write_text(f"version: 1\nworkers:\n  - {{name: far, threads: 1, address: '{worker.address}'}}\n")
    arguments = ["bench", "remote", "-m", str(model), "--topology", str(placed), "--env", "DFLASH_MOE_ENGINE_MAX_CONTEXT=64"]
    arguments += ["--patch-env", "OMP_NUM_THREADS=1", "--prompt-tokens", "8", "--new-tokens", "4", "--repeat", "1"]
    assert main.run([*arguments, "--redact", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "only 1 round; 5 are needed" in shown
    text = out.read_text()
    found = json.loads(text)
    base, patch = found["rows"]
    assert "OMP_NUM_THREADS" not in base["environment"]
    assert patch["environment"]["OMP_NUM_THREADS"] == "1"
    assert base["environment"]["DFLASH_MOE_ENGINE_MAX_CONTEXT"] == patch["environment"]["DFLASH_MOE_ENGINE_MAX_CONTEXT"] == "64"
    assert base["tokens_digests"] == patch["tokens_digests"]
    assert base["calls"] == patch["calls"] > 0
    assert len(base["samples_s"]) == len(patch["samples_s"]) == 1
    assert worker.process.poll() is None
    assert environ.read_bytes() == before
    assert str(tmp_path) not in text + shown
