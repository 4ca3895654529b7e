"""What panels on disk are worth: starts, first starts that write them, memory of two workers, and
the death of one, against packed weights.

    python -m bench.campaigns.stored_start [--layers 12] [--rounds 4] [--models DIR] \
        [--json bench/results/stored_start.json]

A file of random codes in the shape of Qwen3-30B-A3B, in the page cache; sides in turns. *start*: a
worker process from its making to all experts loaded, packed and from panels. *first*: the same with
an empty store, which is written afterwards, and calls of one token meanwhile against those of a
packed worker. *two*: what two workers with all experts take of this machine's memory together
(Pss), against the files of panels. *death*: a worker that is killed; the calls of its stand-in
against its own, and the time until it is back. *cold*: the first call of one token to each layer
where the page cache has no panels, against the same experts read past it by nobody who computes,
plus the same calls again. *chat*: from the start of a process to the first token of a prompt of 16,
once proofs are kept, against imports of torch, transformers and the model's class plus such a
prompt later, and the same where nothing is kept but panels. *host*: packing the host's own
matrices, against reading as many bytes from a file into memory and summing them up, which is what
files of them would come to. Before each start of a worker as much memory is touched and freed, as
in weight_loading. Needs 20 GB of disk and 12 GB of memory; about ten minutes.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.campaigns.faults.load import pids_of, state_of, wait_until
from bench.campaigns.harness import command_line
from bench.campaigns.weight_loading import touch_memory
from bench.lab.panels import PanelReads, forget_pages, let_panels_be_kept, panel_files, timed, write_panels
from bench.peers.model import REAL, TINY, write_random_codes
from dflash_moe import ExpertRuntime, Topology, _core
from dflash_moe.bench.harness import Recorder
from dflash_moe.model.architecture import load_architecture
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.dense_tensors import StoredMatrix, stored_matrices
from dflash_moe.model.spec import ModelSpec, model_spec
from dflash_moe.testing.tiny import routed_batch

THREADS = 2
CALLS = 40  # over all layers, for one median
# So many have used each expert: its pages are mapped, and nothing sums them up any more.
WARM_CALLS = 400
PATIENCE_S = 600


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments()
    let_panels_be_kept()
    shape = replace(TINY if given.tiny else REAL, name="stored", num_layers=given.layers)
    recorder = Recorder(given.json)
    result = recorder.begin("stored_start", {"layers": given.layers, "rounds": given.rounds, "threads": THREADS})
    with tempfile.TemporaryDirectory(dir=given.models) as folder, recorder.recording():
        path = Path(folder) / "model.gguf"
        write_random_codes(shape, path)
        _read(path)
        spec = model_spec(path)
        cache = Path(folder) / "cache"
        write_panels(spec, cache)
        result.params["panel_bytes"] = _size(cache)
        for name, part in PARTS.items():
            if given.only in ("", name):
                result.rows += part(spec, cache, given.rounds)
                recorder.save()
    for row in result.rows:
        print(json.dumps(row))
    return 0


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, "stored_start")
    parser.add_argument("--layers", type=int, default=12, help="of the model [12]")
    parser.add_argument("--rounds", type=int, default=4, help="measured rounds [4]")
    parser.add_argument("--models", type=Path, help="where the file is made [a temporary folder]")
    parser.add_argument("--only", choices=sorted(PARTS), default="", help="one part [all]")
    parser.add_argument("--tiny", action="store_true", help="layers of a tiny shape instead, to try this program")
    return parser.parse_args()


@contextmanager
def _started(
    spec: ModelSpec, cache: Path, layout: str, workers: int = 1, extra: str = ""
) -> Iterator[tuple[ExpertRuntime, float]]:
    names = ", ".join(f"{{name: w{at}, threads: {THREADS}, weights_layout: {layout}}}" for at in range(workers))
    touch_memory(sum(layer.num_experts * layer.expert_bytes for layer in spec.layers))
    topology = Topology.parse(f"version: 1\nworkers: [{names}]\ncache: {{path: {cache}}}\n{extra}")
    began = time.perf_counter()
    with ExpertRuntime.start(topology, model=spec) as runtime:
        yield runtime, time.perf_counter() - began


def _calls(runtime: ExpertRuntime, spec: ModelSpec, count: int = CALLS) -> list[float]:
    """Returns what calls of one token to a layer take, over all layers in turn."""
    first, taken = spec.layers[0], []
    for call in range(count * len(spec.layers)):
        batch = routed_batch(1, first.ffn.in_size, first.num_experts, first.top_k, seed=call)
        began = time.perf_counter()
        runtime.experts(spec.layers[call % len(spec.layers)].index, *batch)
        taken.append(time.perf_counter() - began)
    return taken


def _first(spec: ModelSpec, cache: Path, rounds: int) -> list[dict[str, Any]]:
    starts: dict[str, list[float]] = {"packed": [], "stored": []}
    calls: dict[str, list[float]] = {"packed": [], "stored": []}
    writing_s = []
    for _ in range(rounds):
        with _started(spec, cache, "packed") as (runtime, seconds):
            starts["packed"].append(seconds)
            calls["packed"] += _calls(runtime, spec)
        shutil.rmtree(cache, ignore_errors=True)
        with _started(spec, cache, "stored") as (runtime, seconds):
            starts["stored"].append(seconds)
            began = time.perf_counter()
            is_written = False
            # A few calls at least: tiny panels may be written before this looks for the first time.
            while not is_written:
                calls["stored"] += _calls(runtime, spec, 4)
                is_written = _is_written(runtime)
                if time.perf_counter() - began > PATIENCE_S:
                    raise SystemExit("a worker does not write its panels")
            writing_s.append(time.perf_counter() - began)
    start, call = _ratio(starts, "stored", "packed"), _ratio(calls, "packed", "stored")
    return [
        {
            "name": "first start, then writing", "packed_start_s": statistics.median(starts["packed"]),
            "first_start_s": statistics.median(starts["stored"]), "of_packed": start, "writing_s": statistics.median(writing_s),
            "written_bytes": _size(cache), "packed_call_s": statistics.median(calls["packed"]),
            "writing_call_s": statistics.median(calls["stored"]), "speed_of_packed": call, "samples": starts,
        }
    ]  # fmt: skip


def _start(spec: ModelSpec, cache: Path, rounds: int) -> list[dict[str, Any]]:
    starts: dict[str, list[float]] = {"packed": [], "stored": []}
    calls: dict[str, list[float]] = {"packed": [], "stored": []}
    for _ in range(rounds):
        for layout, samples in starts.items():
            with _started(spec, cache, layout) as (runtime, seconds):
                samples.append(seconds)
                _calls(runtime, spec, WARM_CALLS)
                calls[layout] += _calls(runtime, spec)
    return [
        {
            "name": "second start", "packed_start_s": statistics.median(starts["packed"]),
            "stored_start_s": statistics.median(starts["stored"]), "of_packed": _ratio(starts, "stored", "packed"),
            "packed_call_s": statistics.median(calls["packed"]), "stored_call_s": statistics.median(calls["stored"]),
            "call_of_packed": _ratio(calls, "stored", "packed"), "samples": starts,
        }
    ]  # fmt: skip


def _two(spec: ModelSpec, cache: Path, _rounds: int) -> list[dict[str, Any]]:
    taken = {}
    for layout in ("packed", "stored"):
        with _started(spec, cache, layout, 2, "placement: {replicas: 2}\n") as (runtime, _):
            _calls(runtime, spec, WARM_CALLS)
            taken[layout] = sum(map(_pss, pids_of(runtime).values()))
    size = _size(cache)
    return [
        {
            "name": "two workers with all experts", "packed_bytes": taken["packed"], "stored_bytes": taken["stored"],
            "panel_bytes": size, "of_panels": taken["stored"] / size, "packed_of_panels": taken["packed"] / size,
        }
    ]  # fmt: skip


def _death(spec: ModelSpec, cache: Path, rounds: int) -> list[dict[str, Any]]:
    worker, stand_in, back_s = [], [], []
    for _ in range(rounds):
        with _started(spec, cache, "stored", extra="failure: {restart: off}\n") as (runtime, _):
            _calls(runtime, spec, WARM_CALLS)
            worker += _calls(runtime, spec)
            os.kill(pids_of(runtime)["w0"], signal.SIGKILL)
            _calls(runtime, spec, WARM_CALLS)
            stand_in += _calls(runtime, spec)
        with _started(spec, cache, "stored") as (runtime, _):
            _calls(runtime, spec, 4)
            pid = pids_of(runtime)["w0"]
            os.kill(pid, signal.SIGKILL)
            began = time.perf_counter()
            if not wait_until(_is_back(runtime, pid), PATIENCE_S):
                raise SystemExit("a worker that was killed did not come back")
            back_s.append(time.perf_counter() - began)
    return [
        {
            "name": "a worker is killed", "worker_call_s": statistics.median(worker),
            "stand_in_call_s": statistics.median(stand_in),
            "of_worker": statistics.median(stand_in) / statistics.median(worker), "back_s": statistics.median(back_s),
            "samples": back_s,
        }
    ]  # fmt: skip


def _is_back(runtime: ExpertRuntime, pid: int) -> Callable[[], bool]:
    return lambda: pids_of(runtime).get("w0", pid) != pid and state_of(runtime, "w0").state == "ready"


def _is_written(runtime: ExpertRuntime) -> bool:
    """Says whether the worker has mapped all that it had packed."""
    return runtime.worker_stats()["w0"]["resident_weight_bytes"] == 0


def _cold(spec: ModelSpec, cache: Path, rounds: int) -> list[dict[str, Any]]:
    top_k = spec.layers[0].top_k
    # One file for each layer, whichever: pieces of all have one size.
    files = [[place for _, place in file] for file in panel_files(cache) if len(file) >= top_k][: len(spec.layers)]
    forget_pages(cache)
    disk, way = PanelReads.fastest(files, top_k)
    samples: dict[str, list[float]] = {"start": [], "cold": [], "warm": [], "reads": []}
    for _ in range(rounds):
        forget_pages(cache)
        with _started(spec, cache, "stored") as (runtime, seconds):
            samples["start"].append(seconds)
            for name in ("cold", "warm"):
                samples[name].append(sum(_calls(runtime, spec, 1)))  # the same calls each time
        forget_pages(cache)
        samples["reads"].append(timed(lambda: disk.read_all([range(top_k)] * len(files)))[0])
    medians = {f"{name}_s": statistics.median(values) for name, values in samples.items()}
    bytes_read = sum(size for file in files for _, _, size in file[:top_k])
    of_bound = medians["cold_s"] / (medians["reads_s"] + medians["warm_s"])
    return [
        {
            "name": "first token with a cold page cache", **medians, "of_bound": of_bound,
            "bytes": bytes_read, "alone": way, "samples": samples,
        }
    ]  # fmt: skip


def _chat(spec: ModelSpec, cache: Path, rounds: int) -> list[dict[str, Any]]:
    topology = f"version: 1\nworkers: [{{name: w0, threads: {THREADS}, weights_layout: stored}}]\ncache: {{path: {cache}}}\n"
    samples: dict[str, list[float]] = {"imports": [], "proving": [], "kept": [], "later": []}
    for _ in range(rounds):
        shutil.rmtree(cache / "proofs", ignore_errors=True)
        samples["imports"].append(_said_after(_IMPORTS, spec.path)[0])
        for name in ("proving", "kept"):
            first_s, later_s = _said_after(_FIRST_TOKEN, spec.path, topology)
            samples[name].append(first_s)
        samples["later"].append(later_s)
    medians = {f"{name}_s": statistics.median(values) for name, values in samples.items()}
    beyond = medians["kept_s"] - medians["imports_s"] - medians["later_s"]
    return [{"name": "a process to its first token", **medians, "beyond_s": beyond, "samples": samples}]


_IMPORTS = """
import sys, torch, transformers
from dflash_moe.model.architecture import find_model_class, load_config
from dflash_moe.model.checkpoint import Checkpoint
find_model_class(load_config(Checkpoint.open(sys.argv[1])))
print(0, flush=True)
"""
_FIRST_TOKEN = """
import sys, time
from dflash_moe import LLM, SamplingParams, Topology
with LLM(sys.argv[1], Topology.parse(sys.argv[2])) as llm:
    params = SamplingParams(max_tokens=1, temperature=0)
    llm.generate([list(range(16))], params)
    print(0, flush=True)
    began = time.perf_counter()
    llm.generate([list(range(100, 116))], params)
    print(time.perf_counter() - began, flush=True)
"""


def _said_after(program: str, *arguments: str) -> list[float]:
    """Returns after how long a program wrote its first line, and what the second one says, if there
    is one.
    """
    began = time.perf_counter()
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        said = [time.perf_counter() - began, *map(float, process.stdout)]
    if process.returncode != 0:
        raise SystemExit("a process that starts the model failed; what it wrote says why")
    return said


def _host(spec: ModelSpec, cache: Path, rounds: int) -> list[dict[str, Any]]:
    checkpoint = Checkpoint.open(Path(spec.path))
    matrices = list(stored_matrices(load_architecture(checkpoint).model, checkpoint).values())
    pool = _core.HostPool(threads=THREADS, isa=_core.best_isa())

    def pack(matrix: StoredMatrix) -> int:
        return _core.PackedLinear(pool, [(matrix.source, None, 0)], numerics="f32-canonical").resident_bytes

    def read(place: tuple[int, int]) -> None:
        memory = mmap.mmap(-1, place[1])
        os.preadv(descriptor, [memory], place[0])
        _core.checksum(memory)

    samples: dict[str, list[float]] = {"pack": [], "read": []}
    with ThreadPoolExecutor(THREADS) as threads:
        sizes = list(threads.map(pack, matrices))  # the checkpoint is in the page cache from here on
        places = list(zip(itertools.accumulate(sizes, initial=0), sizes, strict=False))
        with tempfile.TemporaryFile(dir=cache) as file:
            for size in sizes:
                file.write(os.urandom(size))
            file.flush()
            descriptor = file.fileno()
            for _ in range(rounds):
                samples["pack"].append(timed(lambda: list(threads.map(pack, matrices)))[0])
                samples["read"].append(timed(lambda: list(threads.map(read, places)))[0])
    medians = {f"{name}_s": statistics.median(values) for name, values in samples.items()}
    return [{"name": "the host's own matrices", **medians, "bytes": sum(sizes), "samples": samples}]


PARTS = {"first": _first, "start": _start, "two": _two, "death": _death, "cold": _cold, "chat": _chat, "host": _host}


def _ratio(samples: dict[str, list[float]], one: str, other: str) -> float:
    return statistics.median(samples[one]) / statistics.median(samples[other])


def _size(cache: Path) -> int:
    return sum(path.stat().st_size for path in (cache / "panels").glob("*.panels"))


def _read(path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def _pss(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return 1024 * int(fields["Pss"].split()[0])


if __name__ == "__main__":
    sys.exit(main())
