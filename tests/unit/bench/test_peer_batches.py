"""Many sequences in engine_against_peers.py: what each side's output becomes, the bytes that a step
reads, and when a target is met.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench.documents.peer_tables import RESULTS, speeds, targets
from bench.documents.recorded import Recorded
from bench.peers.batches import measure_llama_batch, measure_our_batch, measure_vllm_batch
from bench.peers.model import PEERS
from bench.peers.programs import Finished
from bench.peers.rows import RowCase, all_cases
from bench.peers.sides import VLLM_PROGRAM, Measured, Plan
from bench.peers.targets import Ratio, shown_line, summarise
from dflash_moe.config import resolve_settings
from dflash_moe.topology import Topology


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr("bench.peers.sides.model_path", lambda *_arguments: tmp_path / "model")
    return Plan(tmp_path, tmp_path, (0, 0), tmp_path, tmp_path / "python", batch_new_tokens=4, repetitions=2)


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o700)
    return path


def row_case(plan: Plan, name: str) -> RowCase:
    return next(case for case in all_cases(plan, with_real_shape=False)[1] if case.label == name)


def llama_prints(plan: Plan, *decode_s: float, count: int = 16) -> None:
    entries = [json.dumps({"pl": count, "speed_pp": 100.0 * place, "t_tg": took}) for place, took in enumerate(decode_s, 1)]
    assert plan.llama_bin is not None
    program(plan.llama_bin / "llama-batched-bench", "#!/bin/sh\ncat <<'END'\n\n" + "\n".join(entries) + "\nEND\n")


def test_seconds_of_llama_batched_bench_are_of_a_step(plan: Plan) -> None:
    llama_prints(plan, 0.8, 0.4)
    found = measure_llama_batch(plan, "q8_0", "batch16", "local")
    assert found.samples_s == [0.2, 0.1]
    assert found.more == {"prefill_tokens_per_s": 150.0}
    (command,) = found.commands
    assert command[:5] == ["llama-batched-bench", "-m", "model", "-t", "2"]
    # Room for 16 sequences of 64 + 4 tokens, and a size for each repetition.
    sizes = ["-c", "1088", "-npp", "64", "-ntg", "4", "-npl", "16,16,1"]
    assert command[command.index("-c") : command.index("-npl") + 2] == sizes


def test_sizes_that_llama_passes_over_are_told(plan: Plan) -> None:
    llama_prints(plan, 0.8, count=4)
    with pytest.raises(SystemExit, match="llama-batched-bench .*: measured 1 of 2 times"):
        measure_llama_batch(plan, "q8_0", "batch4", "local")


def test_the_last_line_of_llama_batched_bench_is_of_no_row_and_may_be_missing(plan: Plan) -> None:
    assert plan.llama_bin is not None
    lines = [json.dumps({"pl": count, "speed_pp": 100.0, "t_tg": took}) for count, took in ((4, 0.8), (4, 0.4), (1, 0.1))]
    for printed in (lines, lines[:2]):
        program(plan.llama_bin / "llama-batched-bench", "#!/bin/sh\ncat <<'END'\n" + "\n".join(printed) + "\nEND\n")
        assert measure_llama_batch(plan, "q8_0", "batch4", "local").samples_s == [0.2, 0.1]


def test_vllm_is_asked_for_as_many_sequences_as_the_row_has(plan: Plan) -> None:
    found = {"versions": {"vllm": "1"}, "decode_s": [0.2, 0.1], "first_tokens_apart_s": [0.0, 0.0]}
    assert plan.vllm_python is not None
    program(plan.vllm_python, f"#!/bin/sh\necho '{json.dumps(found)}' > \"$3\"\n")
    measured = measure_vllm_batch(plan, "16bit", "batch16", "local")
    assert measured.samples_s == [0.2, 0.1]
    (command,) = measured.commands
    assert command[-8:] == ["--sequences", "16", "--prompt-tokens", "64", "--new-tokens", "4", "--repeat", "2"]


def scheduler_says(plan: Plan, monkeypatch: pytest.MonkeyPatch, *rows: dict[str, Any]) -> None:
    """Has `dflash-moe bench scheduler` write these rows."""
    more = {"prefill_tokens_per_s": 900.0, "ttft_s": 0.1, "tpot_s": 0.02, "batch_sizes": {"4": 3}}
    said = json.dumps({"rows": [row | more for row in rows]})
    path = program(plan.scratch / "fake", f"#!/bin/sh\nfor out; do :; done\ncat > \"$out\" <<'END'\n{said}\nEND\n")
    monkeypatch.setattr(sys, "executable", str(path))


def test_our_step_takes_its_share_of_a_decode_by_the_tokens_that_the_bench_counts(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 48 tokens in the median sample: three steps of 16.
    scheduler_says(plan, monkeypatch, {"name": "batch-16", "samples_s": [0.6, 0.3, 0.9], "decode_tokens_per_s": 80.0})
    found = measure_our_batch(plan, "16bit", "batch16", "shared", "bf16")
    assert found.samples_s == pytest.approx([0.2, 0.1, 0.3])
    assert found.loop_s == []
    assert found.more["batch_sizes"] == {"4": 3}
    (command,) = found.commands
    assert command[:3] == ["dflash-moe", "bench", "scheduler"]
    assert command[command.index("--batch") + 1] == "16"
    assert "--with-loop" not in command
    topology = Topology.load(plan.scratch / "shared-bf16.yaml")
    assert resolve_settings(topology.stated_settings).dtype == "bf16"


def test_one_request_is_measured_in_turns_with_the_plain_loop(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"name": "batch-1", "samples_s": [0.36, 0.72], "decode_tokens_per_s": 3 / 0.54}
    loop = {"name": "loop", "samples_s": [0.3, 0.6], "decode_tokens_per_s": 3 / 0.45}
    scheduler_says(plan, monkeypatch, engine, loop)
    case = row_case(plan, "engine1-16bit-local-ours")
    case.measure(keep=True)
    found = case.row()
    assert found is not None
    assert "--with-loop" in found["commands"][0]
    assert found["samples_s"] == pytest.approx([0.12, 0.24])
    assert found["time_by_loop"] == pytest.approx(1.2)


def test_pairs_of_all_rounds_count_and_not_their_medians(plan: Plan) -> None:
    case = row_case(plan, "engine1-q8_0-local-ours")
    # Something slowed the last pair threefold. Medians alone would say 2.02 / 2.
    case.samples_s, case.loop_s = [1.01, 2.02, 6.06], [1.0, 2.0, 6.0]
    case.last = Measured([1.0], [], Finished("", 1, 2))
    case.anonymous_bytes, case.resident_bytes, case.others_cores = [1], [2], [0.0]
    found = case.row()
    assert found is not None
    assert found["time_by_loop"] == pytest.approx(1.01)


@pytest.mark.parametrize(("by_loop", "met"), [(1.03, True), (1.031, False)])
def test_the_engine_may_cost_one_request_three_hundredths(by_loop: float, met: bool) -> None:
    row = {"name": "engine1-16bit-local-ours", "phase": "engine1", "median_s": 1.0, "time_by_loop": by_loop}
    (line,) = summarise([row], {})
    assert line["met"] is met
    assert shown_line(line).startswith(
        f"time of engine1-16bit-local-ours by that of the plain loop: {by_loop:.3f}; at most 1.03"
    )


def test_many_sequences_never_count_as_equal_by_their_reads() -> None:
    rows = {
        "batch4-a": {"name": "batch4-a", "phase": "batch4", "median_s": 2.0, "share_of_read": 0.95},
        "batch4-b": {"name": "batch4-b", "phase": "batch4", "median_s": 1.9},
    }
    line = Ratio("batch4-a", ("batch4-b",), 1.0).line(rows)
    assert line is not None
    assert line["met"] is False


def test_a_row_of_many_sequences_has_the_tokens_of_all(plan: Plan) -> None:
    llama_prints(plan, 0.8, 0.8)
    case = row_case(plan, "batch16-q8_0-local-llama")
    case.measure(keep=True)
    found = case.row()
    assert found is not None
    assert found["median_s"] == 0.2
    assert (found["tokens"], found["tokens_per_s"]) == (16, 80.0)
    assert found["read_threads"] == 2


def test_sequences_read_the_experts_that_one_of_them_chose() -> None:
    assert PEERS.step_bytes("q8_0", 96, 1) == PEERS.token_bytes("q8_0", 96)
    # By chance 16 of 16 x 8 choices leave out a hundredth of 32 experts, 4 a third.
    for count, experts in ((4, 32 * (1 - 0.75**4)), (16, 32 * (1 - 0.75**16))):
        weights = PEERS.step_bytes("f16", 96, count) - count * PEERS.kv_bytes(96)
        assert weights == PEERS.weight_bytes("f16", experts=experts)
        assert PEERS.weight_bytes("f16", experts=8) < weights < PEERS.weight_bytes("f16", experts=32)


def test_the_step_of_a_row_lies_in_the_middle_of_its_decode(plan: Plan) -> None:
    case = row_case(replace(plan, batch_prompt_tokens=64, batch_new_tokens=64), "batch4-16bit-local-ours")
    assert case.bytes_read == PEERS.step_bytes("f16", 96, 4)


@pytest.fixture
def vllm_program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    spec = importlib.util.spec_from_file_location("vllm_program", VLLM_PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeLlm:
    """Has first tokens one second apart, and a token of every sequence each half second."""

    def __init__(self) -> None:
        config = SimpleNamespace(get_vocab_size=lambda: 1000)
        self.llm_engine = SimpleNamespace(model_config=config)
        self.calls: list[list[list[int]]] = []

    def generate(self, asked: list[dict[str, Any]], wanted: dict[str, Any], *, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        self.calls.append([one["prompt_token_ids"] for one in asked])
        steps = wanted["max_tokens"] - 1
        first = [100.0 + place for place in range(len(asked))]
        return [SimpleNamespace(metrics=SimpleNamespace(first_token_ts=at, last_token_ts=at + 0.5 * steps)) for at in first]


def test_vllm_times_a_batch_from_the_first_token_that_came_last(vllm_program: ModuleType) -> None:
    llm = FakeLlm()
    given = SimpleNamespace(sequences=3, prompt_tokens=5, new_tokens=8, repeat=2)
    found = vllm_program._measure_batch(llm, given)
    assert found == {"decode_s": [0.5, 0.5], "first_tokens_apart_s": [2.0, 2.0]}
    prompts = [tuple(prompt) for call in llm.calls for prompt in call]
    assert len(set(prompts)) == len(prompts) == 3 * (vllm_program.WARM_UPS + 2)
    assert {len(prompt) for prompt in prompts} == {5}


def test_the_documents_show_every_row_of_many_sequences(plan: Plan, tmp_path: Path) -> None:
    llama_prints(plan, 0.8, 0.8)
    case = row_case(plan, "batch16-q8_0-local-llama")
    case.read.bytes_per_s = [1e9]
    case.measure(keep=True)
    found = case.row()
    assert found is not None
    ours = found | {"name": "batch16-q8_0-local-ours", "side": "ours", "median_s": 0.16, "tokens_per_s": 100.0}
    alone = ours | {"name": "engine1-q8_0-local-ours", "phase": "engine1", "time_by_loop": 1.04}
    rows = [found, ours, alone]
    for name in RESULTS:
        result = {"rows": rows, "summary": summarise(rows, {})} if name == "engine_batches" else {"rows": [], "summary": []}
        (tmp_path / f"{name}.json").write_text(json.dumps({"schema": 2, "case": name} | result))
    recorded = Recorded(tmp_path)
    lines = speeds(recorded).splitlines()[2:]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == ["decode of 16 sequences"] * 2 + [
        "one request in the engine"
    ]
    assert "| 80.0 |" in lines[0]
    assert not [line for line in recorded.unshown() if "batch16" in line or "engine1" in line]
    text = targets(recorded)
    assert "| batch16-q8_0-local-ours | batch16-q8_0-local-llama | 1.25 | >= 1.3 | no |" in text
    assert "| time of engine1-q8_0-local-ours by that of the plain loop | - | 1.04 | <= 1.03 | no |" in text
