"""How fast a worker loads experts, packing included, against what reading the same file costs.
Interleaved rounds.

    python -m bench.campaigns.weight_loading [--rounds 7] [--threads 2] \
        [--json bench/results/weight_loading.json]

Rows per format: `load` (define, read, check, pack or quantise), `into memory` (the file copied from
the page cache into fresh memory of the process by as many threads, nothing computed: the floor of
any loader that keeps what it reads) and `page cache` (read through one small buffer, nothing kept).
`summary` has each load's share of the two. Bytes are those of the file. Before each sample as much
memory is touched and freed: a virtual machine's host takes free memory back within seconds, and
giving it again costs more than anything measured here. Needs the gguf package and 3 GB of disk and
memory; about two minutes.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.campaigns.harness import command_line
from bench.models.tiny_gguf import tiny_gguf
from dflash_moe import _core
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.results import timing_fields
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.ffn import FfnSpec
from dflash_moe.store.expert_loading import load_experts
from dflash_moe.telemetry.memory import process_memory
from dflash_moe.testing.tiny import tiny_checkpoint, tiny_ffn

# These sizes give 1.2 GB in bf16.
LAYERS, EXPERTS, HIDDEN, WIDTH = 2, 64, 2048, 768
BUFFER_BYTES = 1 << 20
# This is MADV_HUGEPAGE, by which the worker asks for its own memory too.
HUGE_PAGES = 14
# This is MADV_POPULATE_WRITE.
POPULATE_WRITE = 23
# Memory is looked at after so many experts, because a look takes a tenth of the time that loading a
# small one does.
WATCH_EVERY = 16
# A loader may have so many bytes of anonymous memory beyond the packed experts.
MAX_BEYOND_BYTES = 256 << 20
FORMATS = (("bf16", "bf16"), ("bf16", "int8_g32"), ("bf16", "int4_g32"), ("q8_0", "q8_0"), ("q4_k", "q4_k"))


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    parser = command_line(__doc__, "weight_loading")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds [7]")
    parser.add_argument("--threads", type=int, default=2, help="of the worker, and of the reading [2]")
    parser.add_argument("--experts", type=int, default=EXPERTS, help="of a layer; fewer for a trial [64]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(arguments.json)
        result = recorder.begin(
            "weight_loading", {"threads": arguments.threads, "experts": arguments.experts, "layers": LAYERS}
        )
        with recorder.recording():
            cases = _cases(Path(folder), arguments.experts, arguments.threads)
            run_rounds(recorder, cases, rounds=arguments.rounds)
            result.summary = _shares(cases)
    for line in result.summary:
        speed, beyond = line["bytes_per_s"] / 1e9, line["anonymous_beyond_packed_bytes"] >> 20
        shares = f"{line['of_copy']:.2f} of a copy, {line['of_page_cache']:.2f} of reading"
        print(
            f"{line['format']:>6} as {line['resident']:>8}: {speed:6.2f} GB/s, {shares}, {beyond} MiB beyond the packed experts"
        )
    return 0


@dataclass(slots=True)
class _Case:
    """One way to go through one file. `run` returns the bytes of anonymous memory that it took
    beyond what it keeps.
    """

    label: str
    fields: dict[str, Any]
    num_bytes: int
    run: Callable[[], int]
    rounds: int | None = None
    samples_s: list[float] = field(default_factory=list)
    beyond: int = 0

    def measure(self, *, keep: bool) -> None:
        touch_memory(self.num_bytes)
        started = time.perf_counter()
        beyond = self.run()
        if keep:
            self.samples_s.append(time.perf_counter() - started)
            self.beyond = max(self.beyond, beyond)
            if self.beyond > MAX_BEYOND_BYTES:
                raise SystemExit(f"{self.label}: {self.beyond} bytes beyond the packed experts, allowed {MAX_BEYOND_BYTES}")

    def row(self) -> dict[str, Any] | None:
        if not self.samples_s:
            return None
        speed = self.num_bytes / statistics.median(self.samples_s)
        own = {"name": self.label, **self.fields, "file_bytes": self.num_bytes, "bytes_per_s": speed}
        return own | {"anonymous_beyond_packed_bytes": self.beyond} | timing_fields(self.samples_s)


def _cases(folder: Path, num_experts: int, threads: int) -> list[_Case]:
    cases: list[_Case] = []
    files: dict[str, tuple[Checkpoint, Callable[[int], FfnSpec]]] = {}
    for stored, resident in FORMATS:
        if stored not in files:
            files[stored] = _write(folder / stored, stored, num_experts)
            path = files[stored][0].files[0]
            size = path.stat().st_size
            for name, keeps in (("into memory", True), ("page cache", False)):
                fields = {"kind": name, "format": stored}
                cases.append(_Case(f"{stored} {name}", fields, size, _reading(path, threads, keeps)))
        checkpoint, ffn = files[stored]
        size = checkpoint.files[0].stat().st_size
        fields = {"kind": "load", "format": stored, "resident": resident}
        run = _loading(checkpoint, ffn, num_experts, resident, threads)
        cases.append(_Case(f"{stored} load as {resident}", fields, size, run))
    return cases


def _write(folder: Path, stored: str, num_experts: int) -> tuple[Checkpoint, Callable[[int], FfnSpec]]:
    if stored == "bf16":
        sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_experts": num_experts, "num_layers": LAYERS}
        tiny_checkpoint(folder, dtype="bf16", **sizes)
        return Checkpoint.open(folder), lambda layer: tiny_ffn(layer, HIDDEN, WIDTH)
    folder.mkdir()
    spec = tiny_gguf(
        folder / "model.gguf", stored, hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_experts=num_experts, top_k=1,
        num_layers=LAYERS,
    )  # fmt: skip
    return Checkpoint.open(spec.path), lambda layer: spec.layers[layer].ffn


def _loading(
    checkpoint: Checkpoint, ffn: Callable[[int], FfnSpec], experts: int, resident: str, threads: int
) -> Callable[[], int]:
    def run() -> int:
        before = process_memory().anonymous_bytes
        store = _core.ShardStore(isa=_core.best_isa(), num_threads=threads)
        loans = []
        peak = 0

        def watch(count: int) -> None:
            nonlocal peak
            if count % WATCH_EVERY == 0:
                peak = max(peak, process_memory().anonymous_bytes - before)

        for layer in range(LAYERS):
            loans.append(store.borrow(ffn(layer).kernel_spec(), experts, resident, layer))
            load_experts(loans[-1], checkpoint, ffn(layer), range(experts), threads=threads, report=watch)
            checkpoint.drop_pages()
        return peak - store.resident_bytes()

    return run


def _reading(path: Path, threads: int, keeps: bool) -> Callable[[], int]:
    size = path.stat().st_size

    def run() -> int:
        descriptor = os.open(path, os.O_RDONLY)
        own = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        with mmap.mmap(-1, size if keeps else threads * BUFFER_BYTES, own) as memory:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(_address(memory)), ctypes.c_size_t(len(memory)), HUGE_PAGES)
            view = memoryview(memory)

            def read(part: int) -> None:
                at, end = size * part // threads, size * (part + 1) // threads
                while at < end:
                    start = at if keeps else part * BUFFER_BYTES
                    at += os.preadv(descriptor, [view[start : start + min(BUFFER_BYTES, end - at)]], at)

            readers = [threading.Thread(target=read, args=(part,)) for part in range(threads)]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
            view.release()
        os.close(descriptor)
        return 0

    return run


def _address(memory: mmap.mmap) -> int:
    held = (ctypes.c_char * len(memory)).from_buffer(memory)
    return ctypes.addressof(held)


def touch_memory(num_bytes: int) -> None:
    """Touches and frees `num_bytes`, so that the next fresh memory of this size is memory that this
    machine has in hand.
    """
    with mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for advice in (HUGE_PAGES, POPULATE_WRITE):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(_address(memory)), ctypes.c_size_t(len(memory)), advice)


def _shares(cases: list[_Case]) -> list[dict[str, Any]]:
    """Compares each load with the copy and the reading of the same file, by medians of interleaved
    samples.
    """
    speeds = {case.label: case.num_bytes / statistics.median(case.samples_s) for case in cases}
    return [
        {
            "format": case.fields["format"],
            "resident": case.fields["resident"],
            "bytes_per_s": speeds[case.label],
            "of_copy": speeds[case.label] / speeds[f"{case.fields['format']} into memory"],
            "of_page_cache": speeds[case.label] / speeds[f"{case.fields['format']} page cache"],
            "anonymous_beyond_packed_bytes": case.beyond,
        }
        for case in cases
        if case.fields["kind"] == "load"
    ]


if __name__ == "__main__":
    sys.exit(main())
