"""How the sides of engine_against_peers.py are started for many sequences at once, and for one
request in our engine. A sample is the time of one decode step, in which each sequence gets a token.

All sequences have prompts of the same length, which differ, and decode together from then on.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from bench.peers.programs import run_program, shown
from bench.peers.sides import Measured, Plan, run_vllm, write_topology

# The sequences of each phase. One request in the engine is measured beside the plain loop.
NUM_SEQUENCES = {"batch4": 4, "batch16": 16, "engine1": 1}
ALONE = "engine1"
# What `dflash-moe bench scheduler` says of a batch beside its speed.
KEPT = ("prefill_tokens_per_s", "ttft_s", "tpot_s", "batch_sizes")


def measure_llama_batch(plan: Plan, fmt: str, phase: str, _place: str) -> Measured:
    """Runs llama-batched-bench with two threads. A size that is named several times is measured as
    often, each time from an empty KV cache. One sequence is measured behind it and not kept: the
    program may end before its log has written the last line.
    """
    assert plan.llama_bin is not None
    count = NUM_SEQUENCES[phase]
    room = count * (plan.batch_prompt_tokens + plan.batch_new_tokens)
    fixed = ["-m", plan.model(fmt, "llama"), "-t", 2, "-ngl", 0, "-ctk", "f16", "-ctv", "f16", "-c", room]
    counts = ",".join([str(count)] * plan.repetitions + ["1"])
    sizes = ["-npp", plan.batch_prompt_tokens, "-ntg", plan.batch_new_tokens, "-npl", counts]
    command = [plan.llama_bin / "llama-batched-bench", *fixed, *sizes, "--output-format", "jsonl"]
    finished = run_program(command, plan.cores)
    found = [json.loads(line) for line in finished.output.splitlines() if line.startswith("{")]
    entries = [entry for entry in found if entry["pl"] == count]
    # It passes over sizes that its KV cache has no room for, and says nothing.
    if len(entries) != plan.repetitions:
        raise SystemExit(f"{' '.join(shown(command))}: measured {len(entries)} of {plan.repetitions} times")
    samples = [entry["t_tg"] / plan.batch_new_tokens for entry in entries]
    prefill = statistics.median(entry["speed_pp"] for entry in entries)
    return Measured(samples, [shown(command)], finished, {"prefill_tokens_per_s": prefill})


def measure_vllm_batch(plan: Plan, fmt: str, phase: str, _place: str) -> Measured:
    """Runs vLLM as for one sequence, with a limit of as many as there are."""
    sizes = [
        "--prompt-tokens",
        plan.batch_prompt_tokens,
        "--new-tokens",
        plan.batch_new_tokens,
        "--repeat",
        plan.repetitions,
    ]
    finished, found, command = run_vllm(plan, fmt, ["--sequences", NUM_SEQUENCES[phase], *sizes])
    more = {key: found[key] for key in ("versions", "first_tokens_apart_s")}
    return Measured(found["decode_s"], [shown(command)], finished, more)


def measure_our_batch(plan: Plan, fmt: str, phase: str, place: str, activations: str) -> Measured:
    """Runs `dflash-moe bench scheduler` over the topology of the place; one request takes turns
    with the plain loop in one process, so that the two differ in nothing else.
    """
    out = plan.scratch / "scheduler.json"
    out.unlink(missing_ok=True)
    topology, count = write_topology(plan, place, activations), NUM_SEQUENCES[phase]
    sizes = ["--prompt-tokens", plan.batch_prompt_tokens, "--new-tokens", plan.batch_new_tokens]
    bench: list[object] = [
        "dflash_moe", "bench", "scheduler", "--model", plan.model(fmt, "ours"), "--topology", topology, "--batch", count,
        *sizes, "--warmup", 1, "--repeat", plan.repetitions, *(["--with-loop"] if phase == ALONE else []), "--json", out,
    ]  # fmt: skip
    finished = run_program([sys.executable, "-m", *bench], plan.cores)
    found = json.loads(out.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    row = rows[f"batch-{count}"]
    kept = {key: row[key] for key in KEPT} | {"activations": activations, "topology": topology.read_text()}
    loop_s = step_seconds(rows["loop"], 1) if phase == ALONE else []
    return Measured(step_seconds(row, count), [shown(["dflash-moe", *bench[1:]])], finished, kept, loop_s)


def step_seconds(row: Mapping[str, Any], num_sequences: int) -> list[float]:
    """Returns the time of a step in each sample of a row. Samples are the seconds of a whole
    decode, and its speed says how many tokens were counted in one.
    """
    tokens = row["decode_tokens_per_s"] * statistics.median(row["samples_s"])
    return [seconds * num_sequences / tokens for seconds in row["samples_s"]]
