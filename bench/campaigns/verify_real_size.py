"""What `verify` takes of a model of real size, and when the first token of such a file comes.

    python -m bench.campaigns.verify_real_size [--layers 32] [--rounds 3] [--models DIR]
        [--json bench/results/verify_real_size.json]

The model has the sizes of Qwen3-30B-A3B cut to so many layers, with random blocks in Q4_K: 12 GB.
One worker of this machine computes its experts from the mapped file. `verify` runs in a process of
its own, whose anonymous memory is sampled. The bound is 1 GB, the eager experts and the dense
weights of one layer in bf16, embedding and head. Then, in turns, the file is read once with plain
reads, and a program generates one token of it, from its start to its end; by then the file is in
the page cache. Needs the gguf package, and disk and page cache for the file, which is made in DIR,
by default a temporary folder, and deleted. Eight minutes on two cores that nobody else uses.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.campaigns.harness import ROOT, command_line
from bench.peers.model import REAL, TINY, Shape, write_random_codes
from dflash_moe.bench.harness import Recorder
from dflash_moe.bench.results import timing_fields
from dflash_moe.telemetry.memory import process_memory

TOPOLOGY = "version: 1\nhost: {threads: 1}\nworkers: [{name: w0, threads: 1, weights_layout: mapped}]\n"
ALLOWANCE_BYTES = 1_000_000_000
SAMPLE_S, READ_BYTES, ITEM_BYTES = 0.01, 8 << 20, 2
MOST_READS, MOST_TIMES_READING = 3, 1.5
FIRST_TOKEN = "time to the first token, by that of reading the file once"
# Nothing that is measured here takes longer.
PATIENCE_S = 4 * 3600
# Ends of the lines with which `verify` says what it does, by what a row calls it.
STAGES = {
    "deriving": "deriving layers",
    "asking workers": "asking workers and cards",
    "running the eager": "eager pass",
    "starting workers": "starting workers",
    "comparing logits": "host's model",
    "comparing": "comparing layers",
    "asking the eager": "eager pass over tokens",
}
# Runs the command line with every byte counted that the checkpoint hands out to be dequantised.
COUNTING = """
import sys
from dflash_moe.model.formats import tensor_values
plain, read = tensor_values.read_bytes, [0]
def counted(files, info):
    read[0] += info.num_bytes
    return plain(files, info)
tensor_values.read_bytes = counted
from dflash_moe.cli.main import run
code = run(sys.argv[1:])
print(f"bytes handed out: {read[0]}", file=sys.stderr)
sys.exit(code)
"""


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments()
    shape = TINY if given.tiny else replace(REAL, name="verify", num_layers=given.layers)
    recorder = Recorder(given.json)
    sizes = {"layers": shape.num_layers, "hidden_size": shape.hidden_size, "num_experts": shape.num_experts,
             "top_k": shape.top_k, "moe_intermediate_size": shape.moe_intermediate_size}  # fmt: skip
    result = recorder.begin("verify_real_size", {**sizes, "format": "q4_k", "vocab_size": shape.vocab_size})
    with tempfile.TemporaryDirectory(dir=given.models) as folder, recorder.recording():
        path, topology = Path(folder) / "model.gguf", Path(folder) / "topology.yaml"
        topology.write_text(TOPOLOGY)
        write_random_codes(shape, path)
        result.params["file_bytes"] = path.stat().st_size
        result.rows.append(_verify(shape, path, topology, Path(folder) / "report.json"))
        recorder.save()
        result.rows += _first_token(path, topology, given.rounds)
        result.summary = _summary(result.rows, path.stat().st_size, judges_times=not given.tiny)
    for line in result.summary:
        print(f"{line['what']}: {line['value']:.4g}, at most {line['at_most']:.4g}")
    # A time is held against its bound and decides nothing, since it is the machine's.
    return 0 if all(line["met"] or line["what"] == FIRST_TOKEN for line in result.summary) else 1


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, "verify_real_size")
    parser.add_argument("--layers", type=int, default=32, help="[32]")
    parser.add_argument("--rounds", type=int, default=3, help="of reading and generating [3]")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape instead, to try this program")
    parser.add_argument("--models", type=Path, help="where the file is made [a temporary folder]")
    return parser.parse_args()


def bound_bytes(shape: Shape) -> int:
    """Returns the anonymous bytes that the verifying process may take."""
    experts = shape.num_experts * sum(outputs * inputs for outputs, inputs in shape.expert().values())
    dense = sum(outputs * inputs for outputs, inputs in shape.attention().values()) + shape.num_experts * shape.hidden_size
    tables = 2 * shape.vocab_size * shape.hidden_size
    return ALLOWANCE_BYTES + ITEM_BYTES * (experts + dense + tables)


def _verify(shape: Shape, path: Path, topology: Path, report: Path) -> dict[str, Any]:
    """Runs `verify` and samples its memory by what it says that it does."""
    command = [sys.executable, "-c", COUNTING, "verify", "--model", path, "--topology", topology, "--json", report]
    began = time.monotonic()
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=ROOT)
    stages: list[tuple[str, float]] = [("start", began)]
    lines: list[str] = []
    reader = threading.Thread(target=_follow, args=(process, stages, lines), daemon=True)
    reader.start()
    peaks: dict[str, int] = {}
    while process.poll() is None and time.monotonic() - began < PATIENCE_S:
        stage = stages[-1][0]
        peaks[stage] = max(peaks.get(stage, 0), process_memory(process.pid).anonymous_bytes)
        time.sleep(SAMPLE_S)
    process.kill()
    reader.join(timeout=60)
    wall_s = time.monotonic() - began
    if not report.is_file():
        raise SystemExit("verify wrote no report: " + " / ".join(lines[-5:]))
    found = json.loads(report.read_text())
    ends = [at for _, at in stages[1:]] + [began + wall_s]
    return {
        "name": "verify", "wall_s": wall_s, "peak_anonymous_bytes": max(peaks.values()), "bound_bytes": bound_bytes(shape),
        "peaks_by_stage": peaks, "stages_s": [[stage, end - at] for (stage, at), end in zip(stages, ends, strict=True)],
        "bytes_handed_out": next(int(line.rpartition(" ")[2]) for line in lines if line.startswith("bytes handed out")),
        "excesses": found["excesses"], "dtype": found["dtype"], "layers": len(found["layers"]),
        "remote_error": max(layer["remote_error"] for layer in found["layers"]),
        "eager_error": max(layer["eager_error"] for layer in found["layers"]),
        "difference_rms": max(layer["difference_rms"] for layer in found["layers"]),
        "widened_rms": max(layer["widened_rms"] for layer in found["layers"]),
        "logits_rms": found["logits_rms"], "greedy_equal": found["greedy_equal"], "greedy_tokens": found["greedy_tokens"],
    }  # fmt: skip


def _follow(process: subprocess.Popen[str], stages: list[tuple[str, float]], lines: list[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line.strip())
        for beginning, stage in STAGES.items():
            if line.startswith(beginning):
                stages.append((stage, time.monotonic()))
                break


def _first_token(path: Path, topology: Path, rounds: int) -> list[dict[str, Any]]:
    """Measures reading the file and generating one token, in turns. The first round only brings the
    file into the page cache.
    """
    command = [sys.executable, "-m", "dflash_moe", "generate", "--model", path, "--topology", topology, "--prompt", "a",
               "--max-tokens", "1"]  # fmt: skip
    reading, generating = [], []
    for number in range(rounds + 1):
        began = time.monotonic()
        with path.open("rb", buffering=0) as stream:
            buffer = bytearray(READ_BYTES)
            while stream.readinto(buffer):
                pass
        middle = time.monotonic()
        subprocess.run([*map(str, command)], check=True, capture_output=True, timeout=PATIENCE_S, cwd=ROOT)
        if number:
            reading.append(middle - began)
            generating.append(time.monotonic() - middle)
    return [{"name": "read", **timing_fields(reading)}, {"name": "first token", **timing_fields(generating)}]


def _summary(rows: list[dict[str, Any]], file_bytes: int, *, judges_times: bool) -> list[dict[str, Any]]:
    """Holds the rows against their bounds. Reading a tiny file takes a millisecond and starting a
    program a second, so the first token is compared with reading only where `judges_times`.
    """
    verified, read, first = rows
    ratios = [token / one for token, one in zip(first["samples_s"], read["samples_s"], strict=True)]
    found = [
        ("anonymous bytes of the verifying process", verified["peak_anonymous_bytes"], verified["bound_bytes"]),
        ("times that it reads the file", verified["bytes_handed_out"] / file_bytes, float(MOST_READS)),
        ("bounds exceeded", len(verified["excesses"]), 0),
    ]
    if judges_times:
        found.append((FIRST_TOKEN, statistics.median(ratios), MOST_TIMES_READING))
    return [{"what": what, "value": value, "at_most": most, "met": value <= most} for what, value, most in found]


if __name__ == "__main__":
    sys.exit(main())
