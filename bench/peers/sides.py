"""The sides of engine_against_peers.py: how each is started for one row, and what it measured.

A measurement is a fresh process (for RPC two) that loads the model, warms itself up, and gives
seconds: of a whole prompt for prefill, of one token for decode. Nothing else of the campaign runs
meanwhile.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.model import PEERS, REAL, TINY, Shape, model_path
from bench.peers.programs import Finished, free_port, is_listening, run_program, serving, shown

VLLM_PROGRAM = Path(__file__).with_name("vllm_program.py")
# The classes of 16-bit and of quantised weights, and the row that has none of either.
ACTIVATIONS = {"16bit": "bf16", "q8_0": "int8", "q4_k": "int8"}
# Experts in the host process or in a worker of one thread, over each transport.
PLACES = ("local", "shared", "unix", "tcp")


@dataclass(frozen=True, slots=True)
class Plan:
    """What all rows share: sizes of a measurement, where things are, and the cores."""

    models: Path
    scratch: Path
    cores: tuple[int, int]
    llama_bin: Path | None = None
    vllm_python: Path | None = None
    is_tiny: bool = False
    prompt_tokens: int = 512
    new_tokens: int = 64
    repetitions: int = 3
    # Of each sequence, where many are computed at once.
    batch_prompt_tokens: int = 64
    batch_new_tokens: int = 64

    def shape(self, fmt: str) -> Shape:
        """Returns the shape whose rows have this format."""
        return TINY if self.is_tiny else REAL if fmt == "q4_k" else PEERS

    def model(self, fmt: str, side: str) -> Path:
        """Returns the model that a side reads for this format, of which rows say `16bit` for F16
        and bf16.
        """
        stored = fmt if fmt != "16bit" else "f16" if side == "llama" else "bf16"
        return model_path(self.models, self.shape(fmt), stored, lambda line: print(line, file=sys.stderr))


@dataclass(frozen=True, slots=True)
class Measured:
    """What one measurement gave. `commands` have no folders of this machine. `loop_s` has a sample
    of the plain loop beside each one of the engine, where both were measured.
    """

    samples_s: list[float]
    commands: list[list[str]]
    finished: Finished
    more: dict[str, Any] = field(default_factory=dict)
    loop_s: list[float] = field(default_factory=list)


def measure_llama(plan: Plan, fmt: str, phase: str, place: str) -> Measured:
    """Runs llama-bench, with two threads or, at place `rpc`, with one beside an RPC server of one
    thread that has the experts and nothing else.
    """
    assert plan.llama_bin is not None
    sizes = ["-p", plan.prompt_tokens, "-n", 0]
    if phase == "decode":
        sizes = ["-p", 0, "-n", plan.new_tokens, "-d", plan.prompt_tokens]
    is_local = place == "local"
    fixed = ["-m", plan.model(fmt, "llama"), "-t", 2 if is_local else 1, "-ngl", 0, "-ctk", "f16", "-ctv", "f16"]
    command = [plan.llama_bin / "llama-bench", *fixed, *sizes, "-r", plan.repetitions, "-o", "json"]
    if is_local:
        finished, commands = run_program(command, plan.cores), [shown(command)]
    else:
        port = free_port()
        address = f"127.0.0.1:{port}"
        server = [plan.llama_bin / "ggml-rpc-server", "-H", "127.0.0.1", "-p", port, "-t", 1]
        # Without the first flag llama.cpp gives the server the whole model.
        command += ["--rpc", address, "-ot", f"exps=RPC0[{address}]"]
        with serving(server, plan.cores[1:], port, lambda: is_listening(port)):
            finished = run_program(command, plan.cores[:1])
        commands = [shown(server), shown(command)]
    (entry,) = json.loads(finished.output)
    tokens = plan.new_tokens if phase == "decode" else 1
    return Measured([nanoseconds * 1e-9 / tokens for nanoseconds in entry["samples_ns"]], commands, finished)


def measure_vllm(plan: Plan, fmt: str, phase: str, _place: str) -> Measured:
    """Runs vLLM, compiled as by its default, with two threads bound to the cores."""
    sizes = ["--prompt-tokens", plan.prompt_tokens, "--new-tokens", plan.new_tokens, "--repeat", plan.repetitions]
    finished, found, command = run_vllm(plan, fmt, sizes)
    return Measured(found[f"{phase}_s"], [shown(command)], finished, {"versions": found["versions"]})


def run_vllm(plan: Plan, fmt: str, arguments: Sequence[object]) -> tuple[Finished, dict[str, Any], list[object]]:
    """Runs vllm_program.py and returns what it wrote. The engine core stays in the program's own
    process: a process of its own needs a third thread, and decodes 20 % slower on two cores.
    """
    out = plan.scratch / "vllm.json"
    out.unlink(missing_ok=True)
    command: list[object] = [plan.vllm_python, VLLM_PROGRAM, plan.model(fmt, "vllm"), out, *arguments]
    bound = ",".join(map(str, plan.cores))
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": bound, "VLLM_NO_USAGE_STATS": "1"}
    finished = run_program(command, plan.cores, settings)
    return finished, json.loads(out.read_text()), ["env", *(f"{key}={value}" for key, value in settings.items()), *command]


def measure_ours(plan: Plan, fmt: str, phase: str, place: str, activations: str) -> Measured:
    """Runs `dflash-moe bench` over the topology of the place. Wires carry bf16."""
    out = plan.scratch / "ours.json"
    out.unlink(missing_ok=True)
    topology = write_topology(plan, place, activations)
    fixed: list[object] = [
        "--model", plan.model(fmt, "ours"), "--topology", topology,
        "--modes", "batched", "--dtypes", "bf16", "--no-local",
    ]  # fmt: skip
    sizes = ["--prompt-tokens", plan.prompt_tokens, "--new-tokens", plan.new_tokens if phase == "decode" else 0]
    bench: list[object] = ["dflash_moe", "bench", phase, *fixed, *sizes, "--repeat", plan.repetitions, "--json", out]
    finished = run_program([sys.executable, "-m", *bench], plan.cores)
    found = json.loads(out.read_text())
    (row,) = found["rows"]
    samples = row["samples_s"]
    if phase == "decode":
        # One sample for each repetition, as from the others: the mean over its tokens.
        samples = [sum(samples[at : at + plan.new_tokens]) / plan.new_tokens for at in range(0, len(samples), plan.new_tokens)]
    kept = {key: row[key] for key in ("calls", "request_bytes", "reply_bytes", "floor_bytes")}
    kept |= {key: found["params"].get(key) for key in ("processes", "oversubscribed")}
    return Measured(
        samples,
        [shown(["dflash-moe", *bench[1:]])],
        finished,
        {**kept, "activations": activations, "topology": topology.read_text()},
    )


def write_topology(plan: Plan, place: str, activations: str) -> Path:
    """Writes the topology of a place and returns its path: two threads of the host with all
    experts, or one thread of the host and one of a worker. Wires carry bf16.
    """
    path = plan.scratch / f"{place}-{activations}.yaml"
    if place == "local":
        host = f"{{threads: 2, activations: {activations}, experts: {{memory: 100%}}}}"
    else:
        host = f"{{threads: 1, activations: {activations}}}"
    # Where the host holds all experts, the worker that a topology must have is not started.
    address = f", address: {place}" if place in ("unix", "tcp") else ""
    worker = f"{{name: w0, backend: cpu, threads: 1, activations: {activations}{address}}}"
    path.write_text(f"version: 1\nhost: {host}\nipc: {{dtype: bf16}}\nworkers:\n  - {worker}\n")
    return path


def llama_version(plan: Plan) -> str:
    """Returns what llama-bench says of itself."""
    assert plan.llama_bin is not None
    finished = run_program(["sh", "-c", '"$0" --version 2>&1', plan.llama_bin / "llama-bench"], plan.cores)
    return finished.output.strip().replace("\n", ", ")
