"""llama.cpp's own programs with our workers, beside its RPC and beside itself alone. Interleaved
rounds.

    LLAMA_BUILD=DIR python -m bench.campaigns.llama_hosts [--rounds 5] [--formats f16] [--json FILE]

DIR is the build folder of the llama.cpp for which `make ggml` was run, with GGML_RPC=ON. The model
has the peers' shape (12 layers, hidden 1024, 32 experts of width 384, top-8). `llama-bench` has one
core and one thread everywhere. What computes experts has another core and one thread: a worker, or
`ggml-rpc-server`, which gets the experts alone. `local` computes all with the one thread. Row
`fast` has a bf16 wire and, where the format has groups of integers, int8 activations. Prefill and
decode are runs of their own without warm-up, so that calls and bytes are theirs alone. Then
llama-server answers four requests at once, and a C program takes the time that a call adds to the
worker's own.
Needs two cores, 4 GB of memory and about ten minutes.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.campaigns.harness import ROOT, command_line
from bench.lab.reference_model import HIDDEN_SIZE, LAYERS, NUM_EXPERTS, TOP_K, default_cache, reference_model
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.results import timing_fields

PROMPT_TOKENS, NEW_TOKENS, REPETITIONS = 512, 64, 3
SLOTS, SLOT_TOKENS = 4, 48
# What one program may take, loading included, before the campaign gives up.
PROGRAM_S = 300.0
START_S = 60.0
CALLS_ADDED = 4000
# Of the formats here, those that class int8-groups takes.
GROUPED = ("q8_0", "q4_0", "q4_k", "q6_k")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the programs of llama.cpp are, and the two cores of a comparison."""

    build: Path
    host_core: int
    expert_core: int

    def pinned(self, core: int, program: str, *arguments: object) -> list[str]:
        """Returns the command line of one of llama.cpp's programs on one core."""
        return ["taskset", "-c", str(core), str(self.build / "bin" / program), *map(str, arguments)]


@dataclass(slots=True)
class BenchCase:
    """One row: `llama-bench` for one kind of host, format and phase, as `run` starts it. `run`
    takes llama-bench's command line and returns its standard output and the counters, if any.
    """

    name: str
    fmt: str
    phase: str
    machine: Machine
    model: Path
    extra: tuple[str, ...]
    run: Callable[[list[str]], tuple[str, dict[str, Any]]]
    repetitions: int
    rounds: int | None = None
    samples_s: list[float] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.phase} {self.fmt} {self.name}"

    @property
    def num_tokens(self) -> int:
        return PROMPT_TOKENS if self.phase == "prefill" else NEW_TOKENS

    def measure(self, *, keep: bool) -> None:
        sizes = ["-p", PROMPT_TOKENS, "-n", 0] if self.phase == "prefill" else ["-p", 0, "-n", NEW_TOKENS]
        fixed = ["-m", self.model, "-t", 1, "-r", self.repetitions, "--no-warmup", "-o", "json"]
        command = self.machine.pinned(self.machine.host_core, "llama-bench", *fixed, *sizes, *self.extra)
        output, counters = self.run(command)
        (entry,) = json.loads(output)
        if keep:
            # The first repetition pays for what a warm-up would: it touches the host's weights.
            self.samples_s.extend(nanoseconds * 1e-9 for nanoseconds in entry["samples_ns"][1:])
            self.counters = counters

    def row(self) -> dict[str, Any] | None:
        if not self.samples_s:
            return None
        timing = timing_fields(self.samples_s, per_round=self.repetitions - 1)
        found: dict[str, Any] = {"name": self.name, "format": self.fmt, "phase": self.phase, "tokens": self.num_tokens}
        found |= timing | {"tokens_per_s": self.num_tokens / timing["median_s"]}
        if self.counters:
            forwards = self.repetitions * (1 if self.phase == "prefill" else NEW_TOKENS)
            found |= _exchange_fields(self.counters, forwards)
        return found


def _exchange_fields(counters: dict[str, Any], forwards: int) -> dict[str, Any]:
    """Returns calls and bytes of all repetitions, and what they exceed the floor by."""
    moved = counters["request_bytes"] + counters["reply_bytes"]
    return {
        "calls": counters["calls"],
        "messages": counters["messages"],
        "request_bytes": counters["request_bytes"],
        "reply_bytes": counters["reply_bytes"],
        "floor_bytes": counters["floor_bytes"],
        "bytes_over_floor": moved / counters["floor_bytes"],
        "excess_bytes_per_layer": (moved - counters["floor_bytes"]) / (forwards * LAYERS),
        "call_s": counters["call_ns"] * 1e-9,
        "compute_s": counters["compute_ns"] * 1e-9,
    }


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    parser = command_line(__doc__, "llama_hosts")
    parser.add_argument("--llama-build", type=Path, default=os.environ.get("LLAMA_BUILD"), help="[$LLAMA_BUILD]")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds [5]")
    parser.add_argument("--formats", default="f16,q8_0", help="comma-separated [%(default)s]")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="in a run, the first not counted [%(default)s]")
    parser.add_argument("--no-slots", action="store_true", help="leave the server with four slots out")
    given = parser.parse_args()
    if given.llama_build is None or not (given.llama_build / "bin" / "llama-bench").is_file():
        parser.error("--llama-build: pass the build folder of llama.cpp, the one with bin/llama-bench")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("two cores are needed: one for the host, one for what computes experts")
    machine = Machine(given.llama_build, cores[0], cores[1])
    formats = given.formats.split(",")
    models = {fmt: _model(fmt) for fmt in formats}
    recorder = Recorder(given.json)
    params = {
        "layers": LAYERS, "hidden_size": HIDDEN_SIZE, "num_experts": NUM_EXPERTS, "top_k": TOP_K,
        "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "rounds": given.rounds, "llama_cpp": _version(machine),
        "threads": "1 of the host, 1 of what computes experts, each on a core of its own",
    }  # fmt: skip
    result = recorder.begin("llama_hosts", params)
    with recorder.recording(), tempfile.TemporaryDirectory() as scratch, _rpc_server(machine) as rpc:
        folder = Path(scratch)
        cases = [
            case
            for fmt in formats
            for phase in ("decode", "prefill")
            for case in _cases(machine, folder, rpc, models[fmt], fmt, phase, given.repetitions)
        ]
        run_rounds(recorder, cases, rounds=given.rounds)
        if not given.no_slots:
            result.rows += _slots(machine, folder, rpc, models[formats[0]], given.rounds)
        result.rows.append(_added_time(folder, models[formats[0]]))
        result.summary = _summary(result.rows)
    _show(result.summary)
    return 0


def _cases(machine: Machine, folder: Path, rpc: str, model: Path, fmt: str, phase: str, repetitions: int) -> list[BenchCase]:
    def case(name: str, extra: tuple[str, ...], run: Callable[[list[str]], tuple[str, dict[str, Any]]]) -> BenchCase:
        return BenchCase(name, fmt, phase, machine, model, extra, run, repetitions)

    return [
        case("local", (), _plain),
        case("rpc", _experts_by_rpc(rpc), _plain),
        case("ours", (), lambda command: _ours(folder, model, command, "exact")),
        case("fast", (), lambda command: _ours(folder, model, command, "int8" if fmt in GROUPED else "bf16")),
    ]


def _experts_by_rpc(rpc: str) -> tuple[str, ...]:
    """Returns the flags with which the server computes experts and nothing else. Without the first
    one llama.cpp gives it the whole model.
    """
    return ("-ngl", "0", "--rpc", rpc, "-ot", f"exps=RPC0[{rpc}]")


def _model(fmt: str) -> Path:
    """Returns the model of the peers' shape as a GGUF file, which is made once."""
    source = reference_model(say=lambda line: print(line, file=sys.stderr))
    path = default_cache() / f"{source.name}-{fmt}.gguf"
    if not path.is_file():
        from bench.models.gguf_files import write_gguf

        print(f"making {path} (once)", file=sys.stderr)
        write_gguf(source, path.with_suffix(".partial"), fmt, host=fmt).rename(path)
    return path


def _topology(folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.yaml"
    dtype = "f32" if kind == "exact" else "bf16"
    activations = ", activations: int8" if kind == "int8" else ""
    worker = f"{{name: w0, backend: cpu, threads: 1{activations}}}"
    path.write_text(f"version: 1\nhost: {{threads: 1}}\nipc: {{dtype: {dtype}}}\nworkers:\n  - {worker}\n")
    return path


def _plain(command: list[str]) -> tuple[str, dict[str, Any]]:
    return _checked(command), {}


def _ours(folder: Path, model: Path, command: list[str], kind: str) -> tuple[str, dict[str, Any]]:
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    output = _checked(_launcher(folder, model, kind, report) + command)
    return output, json.loads(report.read_text())


def _launcher(folder: Path, model: Path, kind: str, report: Path) -> list[str]:
    chosen = ["--model", str(model), "--topology", str(_topology(folder, kind)), "--json", str(report)]
    return [sys.executable, "-m", "dflash_moe", "llama", *chosen, "--"]


def _checked(command: list[str]) -> str:
    """Runs a program and returns its standard output. Raises SystemExit with its last words."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, check=False)
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-8:])
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}\n{last}")
    return done.stdout


def _version(machine: Machine) -> str:
    done = subprocess.run([machine.build / "bin" / "llama-bench", "--version"], capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip().replace("\n", ", ")


@contextlib.contextmanager
def _rpc_server(machine: Machine) -> Iterator[str]:
    """Runs llama.cpp's RPC server on the experts' core, and yields its address."""
    port = _free_port()
    command = machine.pinned(machine.expert_core, "ggml-rpc-server", "-H", "127.0.0.1", "-p", port, "-t", 1)
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await(lambda: _is_listening(port), server, "ggml-rpc-server")
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _await(is_ready: Callable[[], bool], process: subprocess.Popen[Any], what: str) -> None:
    deadline = time.monotonic() + START_S
    while not is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{what} did not start within {START_S:g} s (exit status {process.poll()})")
        time.sleep(0.05)


def _slots(machine: Machine, folder: Path, rpc: str, model: Path, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each kind of host: four requests at once, time until the last is done."""
    samples: dict[str, list[float]] = {"local": [], "rpc": [], "ours": []}
    for round_ in range(rounds):
        for name in (*list(samples)[round_ % 3 :], *list(samples)[: round_ % 3]):
            samples[name].append(_serve_slots(machine, folder, rpc, model, name))
    tokens = SLOTS * SLOT_TOKENS
    return [
        {"name": name, "phase": "slots", "slots": SLOTS, "tokens": tokens, **timing_fields(found)}
        | {"tokens_per_s": tokens / statistics.median(found)}
        for name, found in samples.items()
    ]


def _serve_slots(machine: Machine, folder: Path, rpc: str, model: Path, name: str) -> float:
    port = _free_port()
    extra = _experts_by_rpc(rpc) if name == "rpc" else ()
    fixed = ["-m", model, "-t", 1, "-np", SLOTS, "-c", 2048, "--port", port, "--no-ui", *extra]
    command = machine.pinned(machine.host_core, "llama-server", *fixed)
    if name == "ours":
        command = _launcher(folder, model, "exact", folder / "report.json") + command
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _await(lambda: _is_healthy(port), server, f"llama-server ({name})")
            _complete(port, 0)
            threads = [threading.Thread(target=_complete, args=(port, number)) for number in range(SLOTS)]
            began = time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return time.monotonic() - began
        finally:
            server.terminate()


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _complete(port: int, number: int) -> None:
    prompt = f"request {number}: the quick brown fox jumps over the lazy dog and "
    body = {"prompt": prompt, "n_predict": SLOT_TOKENS, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=PROGRAM_S) as answer:
        found = json.loads(answer.read())
    if found["tokens_predicted"] != SLOT_TOKENS:
        raise SystemExit(f"llama-server made {found['tokens_predicted']} tokens of {SLOT_TOKENS}")


def _added_time(folder: Path, model: Path) -> dict[str, Any]:
    """Returns the row of added_time.c: what a call of one token takes beside the worker's own
    time, both ends on cores of their own.
    """
    program = folder / "added_time"
    package = ROOT / "dflash_moe"
    source = ROOT / "bench" / "campaigns" / "added_time.c"
    header = ROOT / "csrc" / "c_interface"
    subprocess.run(
        [
            "cc",
            "-std=c11",
            "-O2",
            f"-I{header}",
            source,
            f"-L{package}",
            "-ldflash_moe",
            f"-Wl,-rpath,{package}",
            "-o",
            program,
        ],
        check=True,
    )
    cores = sorted(os.sched_getaffinity(0))
    command = _launcher(folder, model, "exact", folder / "report.json")
    output = _checked([*command, "taskset", "-c", str(cores[0]), str(program), str(CALLS_ADDED)])
    added = [float(line) * 1e-9 for line in output.split()]
    return {
        "name": "added",
        "phase": "call",
        "tokens": 1,
        **timing_fields(added),
        "p50_us": statistics.median(added) * 1e6,
    }


def _summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the ratios of what was measured in the same rounds."""
    found = []
    for row in rows:
        if row["phase"] == "call" or row["name"] in ("local", "rpc"):
            continue
        beside = {
            other["name"]: other["median_s"] / row["median_s"]
            for other in rows
            if other["phase"] == row["phase"] and other.get("format") == row.get("format") and other["name"] in ("local", "rpc")
        }
        found.append(
            {
                "phase": row["phase"],
                "format": row.get("format", ""),
                "name": row["name"],
                "tokens_per_s": row["tokens_per_s"],
            }
            | {f"against_{name}": ratio for name, ratio in beside.items()}
        )
    return found


def _show(summary: list[dict[str, Any]]) -> None:
    for line in summary:
        print(" ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{value}" for key, value in line.items()))


if __name__ == "__main__":
    raise SystemExit(main())
