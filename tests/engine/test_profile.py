"""`profile`: a recording has the request, its steps and all its slices over every kind of link, it
agrees with the counters, and bad options are refused before a model is loaded.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("perfetto", reason="the perfetto package is the extra `trace`")

import dflash_moe as dm
from dflash_moe.bench.pftrace import trace_bytes
from dflash_moe.bench.recording import Recording, record
from dflash_moe.cli import main
from dflash_moe.topology import Topology
from tests.fault.conftest import StartWorker, far_topology, key_file, start_worker
from tests.host_models import checkpoint, prompt, topology
from tests.trace_reading import ReadTrack, read_trace

# The fixtures of hand-started workers, which this file uses by name.
__all__ = ["key_file", "start_worker"]

ROOT = Path(__file__).parents[2]
NEW_TOKENS = 6
PROMPT = 90
LINK_TIMES = ("published_ns", "worker_received_ns", "worker_started_ns", "worker_finished_ns", "arrived_ns", "combined_ns")


def recorded(placed: Topology, monkeypatch: pytest.MonkeyPatch, **overrides: object) -> tuple[Recording, dict[str, float]]:
    """Returns a recording, and what the counters say each worker has computed meanwhile."""
    settings = {"kv_memory": "16MiB", "suspect_ms": 60_000.0, "max_batch_tokens": 64, "profile": True, **overrides}
    with dm.LLM(checkpoint("qwen3_moe", "f32"), placed, **settings) as llm:
        counted = []
        plain = llm.engine.record_steps

        def counting(steps: object) -> None:
            counted.append({name: one["worker_compute_ns"] for name, one in llm.runtime.stats()["workers"].items()})
            plain(steps)

        monkeypatch.setattr(llm.engine, "record_steps", counting)
        found = record(llm, placed, prompt(PROMPT), NEW_TOKENS)
    before, after = counted
    return found, {name: after[name] - before[name] for name in after}


def check(found: Recording, computed: dict[str, float]) -> list[ReadTrack]:
    """Times are in the order of what happened, on one clock, within what is unsure of it; sums are
    the counters'; the trace has all of it.
    """
    request = found.request
    assert len(request.token_ns) == NEW_TOKENS
    assert request.submitted_ns <= request.scheduled_ns <= request.token_ns[0]
    # Two chunks of the prompt, the latter with the first token, and a step for each later one.
    assert [step.num_rows for step in found.steps] == [64, PROMPT - 64] + [1] * (NEW_TOKENS - 1)
    assert found.slices
    assert not found.is_cut
    for one in found.slices:
        unsure = found.workers[one["worker"]].uncertainty_ns
        times = [one["begun_ns"], one["encode_start_ns"], *(one[key] for key in LINK_TIMES)]
        for place, (earlier, later) in enumerate(zip(times, times[1:], strict=False)):
            # The ways there and back are between two clocks.
            assert earlier <= later + (unsure if place in (2, 5) else 0), (place, one)
        assert any(
            step.began * 1e9 <= one["begun_ns"] and one["combined_ns"] <= step.ended * 1e9 + 1000 for step in found.steps
        )
    for place, worker in enumerate(found.workers):
        own = [one for one in found.slices if one["worker"] == place]
        assert sum(one["worker_finished_ns"] - one["worker_started_ns"] for one in own) == computed[worker.name]
    tracks = read_trace(trace_bytes(found))
    assert sum(len(one.spans) for one in tracks if one.name == "compute") == len(found.slices)
    spans = [span for one in tracks if one.name == "steps" for span in one.spans]
    assert [span.arguments["rows"] for span in spans] == [step.num_rows for step in found.steps]
    return tracks


@pytest.mark.parametrize("address", ["loopback", "shared", "tcp"])
@pytest.mark.parametrize("mode", ["batched", "stream"])
def test_a_recording_agrees_with_the_counters(address: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, computed = recorded(topology(address), monkeypatch, mode=mode)
    check(found, computed)
    assert [(one.offset_ns, one.uncertainty_ns) for one in found.workers] == [(0, 0), (0, 0)]
    timeline = found.prefill_timeline()
    assert timeline["prompt_tokens"] == PROMPT
    assert timeline["slices"]


def test_the_clock_of_a_dialled_worker_is_aligned_and_says_how_well(
    monkeypatch: pytest.MonkeyPatch, start_worker: StartWorker, key_file: Path
) -> None:
    far = start_worker(checkpoint("qwen3_moe", "f32"), "tcp://127.0.0.1:0", "--key-file", str(key_file))
    found, computed = recorded(far_topology(far.address), monkeypatch, key_file=str(key_file))
    tracks = check(found, computed)
    clocks = {one.name: one for one in found.workers}
    assert clocks["near"].uncertainty_ns == 0
    # Both run on one machine, whose clock they share: what is found is off by no more than it says.
    assert clocks["far"].uncertainty_ns > 0
    assert abs(clocks["far"].offset_ns) <= clocks["far"].uncertainty_ns
    spans = [span for one in tracks if one.parent and one.parent.startswith("far (") for span in one.spans]
    assert {span.arguments["clock_uncertainty_ns"] for span in spans} == {clocks["far"].uncertainty_ns}


def test_the_command_writes_trace_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    placed = tmp_path / "two.yaml"
    placed.write_text("version: 1\nworkers:\n  - {name: w0, threads: 1}\n  - {name: w1, threads: 1}\n")
    out, plot = tmp_path / "new" / "run.pftrace", tmp_path / "run.png"
    arguments = ["profile", "-m", "demo", "--topology", str(placed), "--out", str(out), "--plot", str(plot), "-n", "3"]
    assert main.run([*arguments, "--prompt", "Once upon a time"]) == 0
    shown = capsys.readouterr().out
    assert f"wrote {out}" in shown
    assert {"request", "steps", "compute"} <= {track.name for track in read_trace(out.read_bytes())}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [one.name for one in out.parent.iterdir()] == ["run.pftrace"]


def test_the_command_at_the_end_of_the_document_does_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (script,) = re.findall(r"<!-- tested -->\n```bash\n(.*?)```", (ROOT / "docs/howto/tune.md").read_text(), re.DOTALL)
    script = script.replace(".venv/bin/dflash-moe", f"{sys.executable} -m dflash_moe").replace("configs/", f"{ROOT}/configs/")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        ["bash", "-e", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert found.returncode == 0, found.stderr
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run.pftrace", "run.png"]
    assert any(track.name == "compute" and track.spans for track in read_trace((tmp_path / "run.pftrace").read_bytes()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--out", "-"), "give the path of a file"),
        (("--out", "/proc/nowhere/run.pftrace"), "/proc/nowhere"),
        (("--out", "x.pftrace", "--plot", "x.txt"), "pictures are written as"),
    ],
)
def test_what_cannot_be_written_is_refused_before_a_model_is_read(
    options: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main.run(["profile", "-m", "no-such-model", *options]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
