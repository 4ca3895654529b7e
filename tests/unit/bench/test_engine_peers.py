"""engine_against_peers.py: its rows, what a side's output becomes, and when a target is met.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.peers.agreement import MOST_MEAN_GAP, PROMPT, Agreement
from bench.peers.programs import Neighbours, _busy_s, pinned, run_program, shown
from bench.peers.rows import RowCase, all_cases, chosen_cases
from bench.peers.sides import Plan, measure_llama, write_topology
from bench.peers.targets import RATIOS, Ratio, disturbed, shown_line, summarise
from dflash_moe.topology import Topology


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(tmp_path, tmp_path, (0, 0), is_tiny=True, prompt_tokens=8, new_tokens=4, repetitions=2)


def row(name: str, median_s: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "phase": name.split("-")[0], "median_s": median_s, **more}


def test_every_row_of_a_target_exists_and_names_are_unique(plan: Plan) -> None:
    _, cases = all_cases(plan, with_real_shape=True)
    names = [case.label for case in cases]
    assert len(names) == len(set(names))
    assert {ratio.ours for ratio in RATIOS} | {peer for ratio in RATIOS for peer in ratio.peers} <= set(names)


def test_the_real_shape_has_rows_only_when_asked_for(plan: Plan) -> None:
    assert not [case for case in all_cases(plan, with_real_shape=False)[1] if case.fmt == "q4_k"]


def test_rows_of_an_absent_peer_are_left_out_with_the_reason(plan: Plan) -> None:
    cases, left_out = chosen_cases(all_cases(plan, with_real_shape=False)[1], "decode-16bit-local-*")
    assert [case.label for case in cases] == ["decode-16bit-local-ours", "decode-16bit-local-ours_f32"]
    assert left_out == {"decode-16bit-local-llama": "no --llama-bin", "decode-16bit-local-vllm": "no --vllm-python"}


def test_a_pattern_without_rows_is_refused_with_those_there_are(plan: Plan) -> None:
    with pytest.raises(SystemExit, match="--only decode-f8: no such row; there are decode-16bit-local-llama"):
        chosen_cases(all_cases(plan, with_real_shape=False)[1], "prefill-*,decode-f8")


def test_the_better_peer_counts() -> None:
    found = Ratio("decode-a", ("decode-b", "decode-c"), 0.9, 1.0).line(
        {"decode-a": row("decode-a", 2.0), "decode-b": row("decode-b", 3.0), "decode-c": row("decode-c", 1.9)}
    )
    assert found is not None
    assert found["against"] == "decode-c"
    assert found["ratio"] == pytest.approx(0.95)
    assert found["met"] is True
    assert found["goal_met"] is False


@pytest.mark.parametrize(("share", "at_least", "met"), [(0.91, 0.9, True), (0.89, 0.9, False), (0.99, 1.3, False)])
def test_decode_at_the_read_speed_counts_as_equal(share: float, at_least: float, met: bool) -> None:
    rows = {"decode-a": row("decode-a", 2.0, share_of_read=share), "decode-b": row("decode-b", 1.0)}
    found = Ratio("decode-a", ("decode-b",), at_least).line(rows)
    assert found is not None
    assert found["met"] is met


def test_a_prefill_never_counts_as_equal_by_its_reads() -> None:
    rows = {"prefill-a": row("prefill-a", 2.0, share_of_read=0.95), "prefill-b": row("prefill-b", 1.0)}
    found = Ratio("prefill-a", ("prefill-b",), 0.9).line(rows)
    assert found is not None
    assert found["met"] is False


def test_the_summary_names_peers_that_were_not_measured() -> None:
    rows = [row("decode-16bit-local-ours", 1.0), row("decode-16bit-local-llama", 1.0)]
    (line,) = summarise(rows, {})
    assert line["not_measured"] == ["decode-16bit-local-vllm"]
    assert shown_line(line).endswith("goal 1: met; not measured: decode-16bit-local-vllm")


def test_share_of_read_and_memory_have_lines_of_their_own() -> None:
    rows = [row("decode-16bit-shared-ours", 1.0, share_of_read=0.72)]
    rows.append(row("prefill-q4_k-local-ours", 1.0, format="q4_k", anonymous_bytes=9000))
    share, memory = summarise(rows, {"q4_k": 4400})
    assert (share["met"], share["goal_met"]) == (True, False)
    assert memory["met"] is False
    assert "at most 1.35: NOT MET" in shown_line(memory)


def test_seconds_of_llama_bench_are_of_a_token(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "llama-bench"
    program.write_text("#!/bin/sh\necho '[{\"samples_ns\": [8000000, 4000000]}]'\n")
    program.chmod(0o700)
    monkeypatch.setattr("bench.peers.sides.model_path", lambda *_arguments: tmp_path / "model.gguf")
    chosen = Plan(tmp_path, tmp_path, (0, 0), llama_bin=tmp_path, new_tokens=4)
    found = measure_llama(chosen, "q8_0", "decode", "local")
    assert found.samples_s == [0.002, 0.001]
    (command,) = found.commands
    assert command[:5] == ["llama-bench", "-m", "model.gguf", "-t", "2"]
    assert command[command.index("-n") : command.index("-n") + 4] == ["-n", "4", "-d", "512"]


def test_recorded_commands_name_no_folder() -> None:
    assert shown([Path("/opt/x/llama-bench"), "-m", "/srv/m.gguf", "-t", 2]) == ["llama-bench", "-m", "m.gguf", "-t", "2"]
    assert pinned(["a", 1], (0, 1)) == ["taskset", "-c", "0,1", "a", "1"]


def test_a_program_that_fails_is_told_with_its_last_words() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such expert')"]
    with pytest.raises(SystemExit, match="exit status 1\nno such expert"):
        run_program(command, (0,))


def test_work_of_others_is_told_from_that_of_our_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"cpu": 100.0, "own": 10.0, "wall": 0.0}
    monkeypatch.setattr("bench.peers.programs._busy_s", lambda _running: (now["cpu"], now["own"], now["wall"]))
    neighbours = Neighbours()
    now |= {"cpu": 109.0, "own": 16.0, "wall": 4.0}
    assert neighbours.busy_cores() == pytest.approx(0.75)


BUSY = "while True: pass"
# Grammars of a server are such: processes that end while it is measured.
BUSY_BY_CHILDREN = """
import os
while True:
    child = os.fork()
    if not child:
        sum(range(10**6))
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize("program", [BUSY, BUSY_BY_CHILDREN], ids=["itself", "children that end"])
def test_a_program_of_ours_that_still_runs_is_no_neighbour(program: str) -> None:
    with subprocess.Popen([sys.executable, "-c", program]) as running:
        try:
            before = _busy_s([running.pid])[1]
            deadline = time.monotonic() + 30.0
            while _busy_s([running.pid])[1] - before < 0.1:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            running.kill()


def test_a_disturbed_row_is_named() -> None:
    rows = [row("decode-a", 1.0, others_busy_cores=0.02), row("decode-b", 1.0, others_busy_cores=0.6)]
    assert disturbed(rows) == ["decode-b"]


def test_local_holds_all_experts_in_the_host_and_remote_none(plan: Plan) -> None:
    local = Topology.load(write_topology(plan, "local", "bf16"))
    assert (local.host.threads, local.host.experts_memory.fraction) == (2, 1.0)
    assert local.activations_of("host") == "bf16"
    tcp = Topology.load(write_topology(plan, "tcp", "int8"))
    assert (tcp.host.threads, tcp.workers[0].threads, tcp.workers[0].address) == (1, 1, "tcp")
    assert Topology.load(write_topology(plan, "shared", "int8")).workers[0].address is None


def test_a_row_says_what_reading_its_bytes_takes(plan: Plan) -> None:
    from bench.peers.programs import Finished
    from bench.peers.sides import Measured

    reads, cases = all_cases(plan, with_real_shape=False)
    case = next(case for case in cases if case.label == "decode-q8_0-shared-ours")
    assert case.row() is None
    assert case.read is reads[0]
    case.last, case.samples_s = Measured([0.5], [], Finished("", 1, 2)), [0.5]
    case.anonymous_bytes, case.resident_bytes, case.others_cores = [1], [2], [0.0]
    reads[0].bytes_per_s = [4.0 * case.bytes_read]
    found = case.row()
    assert found is not None
    assert (found["read_s"], found["share_of_read"], found["read_threads"]) == (0.25, 0.5, 1)
    json.dumps(found)


def test_prefill_reads_every_expert_once(plan: Plan) -> None:
    cases = {case.label: case for case in all_cases(plan, with_real_shape=False)[1]}
    decode, prefill = (_bytes(cases[f"{phase}-16bit-local-ours"]) for phase in ("decode", "prefill"))
    shape = plan.shape("16bit")
    expert = 3 * 2 * shape.hidden_size * shape.moe_intermediate_size
    unused = shape.num_layers * (shape.num_experts - shape.top_k) * expert
    assert prefill == decode - shape.kv_bytes(plan.prompt_tokens + plan.new_tokens // 2) + unused


def _bytes(case: RowCase) -> int:
    return case.bytes_read


def test_near_ties_agree_and_arbitrary_tokens_do_not() -> None:
    assert Agreement("16bit", "ours", (0.0, 0.0, MOST_MEAN_GAP)).agrees
    # So far apart was a side that did not normalise the weights of its routing.
    assert not Agreement("16bit", "ours", (0.0, 0.06, 0.39)).agrees


def test_the_prompt_has_a_token_for_each_byte_in_every_tokenizer() -> None:
    assert PROMPT.isascii()
    assert "th" not in PROMPT
