"""Experts that do not fit into memory: slots filled past the page cache, against the bounds of the
same tokens, the mapped checkpoint and llama.cpp.

    python -m bench.campaigns.larger_than_memory [--layers 24] [--tokens 60] [--rounds 2] \
        [--llama-bin DIR] [--models DIR] [--json bench/results/larger_than_memory.json]

A file of random codes in the shape of Qwen3-30B-A3B. Experts of each token are drawn from a
popularity that is lognormal with sigma 1.1, alike for all sides. Two parts, for room for a third
and a half of the experts:

*bounds*, in one process: a token's time with slots, against the time of its arithmetic (all experts
in the page cache) plus that of the same missing reads alone, layer by layer, in the number of
threads and parts that is fastest here; the bytes read against the misses of a replay of the least
recently used order; and prefill of 1,024 rows against the longer of the two.

*groups*: whole models in a memory control group of their own, which decode random tokens: slots,
the mapped checkpoint, and llama.cpp with its mapped file and no repacking, one after the other,
with the disk's read-ahead as it is and at 128 KiB. As much memory is touched and freed before each,
as in weight_loading: a virtual machine gets pages that it has not used yet much more slowly, and
slots that are many are still filled for the first time while they are measured. With few layers
what a process takes beside experts is much of the group, and page cache for sides that take less.

Needs root for the groups, 20 GB of disk, 20 GB of memory; about fifteen minutes.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.campaigns.harness import ROOT, command_line
from bench.campaigns.weight_loading import touch_memory
from bench.lab.panels import PanelReads, Place, let_panels_be_kept, panel_files, timed, write_panels
from bench.peers.model import REAL, TINY, write_random_codes
from dflash_moe import _core
from dflash_moe.bench.harness import Recorder
from dflash_moe.config.cache import CacheSettings
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.spec import ModelSpec, model_spec
from dflash_moe.store.expert_store import ExpertStore

FRACTIONS = (1 / 3, 1 / 2)
SIGMA = 1.1
PREFILL_ROWS = 1024
READ_AHEADS = (None, 128)
# What a process takes beside experts: interpreter, torch, the dense weights, and their scratch.
BESIDE_BYTES = int(2.2 * (1 << 30))
PATIENCE_S = 1800
RANDOM_TEMPERATURE = 100.0
GROUPS = Path("/sys/fs/cgroup/memory")
THREADS = 2


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments()
    let_panels_be_kept()
    if given.child:
        print(json.dumps(_child(given)))
        return 0
    shape = replace(TINY if given.tiny else REAL, name="larger", num_layers=given.layers)
    recorder = Recorder(given.json)
    result = recorder.begin("larger_than_memory", {"layers": given.layers, "tokens": given.tokens, "sigma": SIGMA})
    with tempfile.TemporaryDirectory(dir=given.models) as folder, recorder.recording():
        path = Path(folder) / "model.gguf"
        write_random_codes(shape, path)
        side = _Side.open(path, Path(folder) / "cache")
        result.params |= {"expert_bytes": side.all_bytes, "read_ahead_kb": _read_ahead(path)}
        for fraction in FRACTIONS if given.only in ("", "bounds") else ():
            result.rows += _bounds(side, fraction, given)
            recorder.save()
        side.close()
        if os.access(GROUPS, os.W_OK) and given.only in ("", "groups"):
            for fraction in FRACTIONS:
                result.rows += _in_groups(path, fraction, side.all_bytes, given)
                recorder.save()
    for row in result.rows:
        print(json.dumps({key: value for key, value in row.items() if key != "samples_s"}))
    return 0


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, "larger_than_memory")
    parser.add_argument("--layers", type=int, default=24, help="of the model [24]")
    parser.add_argument("--tokens", type=int, default=60, help="measured in each round, after as many to warm up [60]")
    parser.add_argument("--rounds", type=int, default=2, help="measured rounds [2]")
    parser.add_argument("--models", type=Path, help="where the file is made [a temporary folder]")
    parser.add_argument("--llama-bin", type=Path, help="folder of llama.cpp's programs [without it]")
    parser.add_argument("--only", choices=("bounds", "groups"), default="", help="one part [both]")
    parser.add_argument("--tiny", action="store_true", help="layers of a tiny shape instead, to try this program")
    parser.add_argument("--child", choices=("slots", "mapped"), help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# -- bounds ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Side:
    """The model's experts, with all of their panels on disk and in the page cache."""

    path: Path
    cache: CacheSettings
    spec: ModelSpec
    checkpoint: Checkpoint
    places: list[list[Place]]  # by layer and expert
    whole: ExpertStore
    loans: list[_core.ResidentShard]

    @classmethod
    def open(cls, path: Path, cache: Path) -> _Side:
        settings = CacheSettings(path=cache, panels="on")
        spec, checkpoint = model_spec(path), Checkpoint.open(path)
        write_panels(spec, cache)
        whole, loans = _loaded(spec, checkpoint, settings, "stored", 0)
        return cls(path, settings, spec, checkpoint, _places(cache, loans), whole, loans)

    @property
    def all_bytes(self) -> int:
        return sum(size for layer in self.places for _, _, size in layer)

    def close(self) -> None:
        for loan in self.loans:
            loan.give_back()
        self.whole.close()


def _loaded(
    spec: ModelSpec, checkpoint: Checkpoint, cache: CacheSettings, layout: str, slots_bytes: int
) -> tuple[ExpertStore, list[_core.ResidentShard]]:
    store = ExpertStore(
        isa=_core.best_isa(), threads=THREADS, weights_layout=layout, cache=cache, slots_bytes=slots_bytes,
    )  # fmt: skip
    loans = [
        store.load(
            checkpoint, layer.ffn, range(layer.num_experts), name=layer.name, weight_dtype=layer.weight_dtype,
            weights_fingerprint=layer.index + 1, numerics="f32-canonical",
        )
        for layer in spec.layers
    ]  # fmt: skip
    return store, loans


def _places(cache: Path, loans: Sequence[_core.ResidentShard]) -> list[list[Place]]:
    """Returns where experts lie, found by the contents that shards and headers name alike."""
    found = dict(one for file in panel_files(cache) for one in file)
    return [[found[loan.packed_expert(place)[1]] for place in range(_experts_of(loan))] for loan in loans]


def _experts_of(loan: _core.ResidentShard) -> int:
    return loan.content()[1]


class _Tokens:
    """The experts that tokens use, drawn anew with each seed and alike for all sides."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        shape = (len(spec.layers), spec.layers[0].num_experts)
        self._logits = np.random.default_rng(1).normal(0.0, SIGMA, shape)
        self._top_k = spec.layers[0].top_k

    def draw(self, rows: int) -> list[np.ndarray[Any, Any]]:
        """Returns for each layer [rows, top_k] ascending ids."""
        drawn = []
        for logits in self._logits:
            noisy = logits + self._random.gumbel(size=(rows, logits.size))
            drawn.append(np.sort(np.argpartition(-noisy, self._top_k, axis=1)[:, : self._top_k], axis=1))
        return drawn


def _compute(loans: Sequence[_core.ResidentShard], ids: Sequence[np.ndarray[Any, Any]], hidden_size: int) -> list[bytes]:
    rows, top_k = ids[0].shape
    data = (np.arange(rows * hidden_size, dtype=np.float32).reshape(rows, hidden_size) % 89 / 890).tobytes()
    return [
        loan.compute_rows(
            data, "f32", row_counts=[top_k] * rows, local_expert_ids=one.ravel().tolist(), weights=[1 / top_k] * one.size,
            reply_dtype="f32",
        )
        for loan, one in zip(loans, ids, strict=True)
    ]  # fmt: skip


class _Replay:
    """The order of use of slots: what a cache of that many experts would have to read."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._used: OrderedDict[tuple[int, int], None] = OrderedDict()

    def missing(self, layer: int, ids: np.ndarray[Any, Any]) -> list[int]:
        wanted = np.unique(ids).tolist()
        missing = [one for one in wanted if (layer, one) not in self._used]
        for one in wanted:
            if (layer, one) in self._used:
                self._used.move_to_end((layer, one))
        for one in missing:
            if len(self._used) == self._num_slots:
                self._used.popitem(last=False)
            self._used[(layer, one)] = None
        return missing


def _bounds(side: _Side, fraction: float, given: argparse.Namespace) -> list[dict[str, Any]]:
    store, loans = _loaded(side.spec, side.checkpoint, side.cache, "stored", int(fraction * side.all_bytes))
    found, hidden_size = [], side.spec.layers[0].ffn.in_size
    replay: _Replay | None = None
    disk, way = PanelReads.fastest(side.places)
    for rows, count in ((1, given.tokens), (PREFILL_ROWS, 2)):
        tokens = _Tokens(side.spec, 7 + rows)
        samples: dict[str, list[float]] = {"slots": [], "compute": [], "reads": []}
        read_bytes = replayed = 0
        # The first round fills the slots and is not kept. A disk may give more for a while than it
        # can for long, so that the sides take turns token by token.
        for number in range((given.rounds + 1) * count):
            ids = tokens.draw(rows)
            before = store.slot_counters()["slot_read_bytes"]
            slots_s, outputs = timed(lambda ids=ids: _compute(loans, ids, hidden_size))
            counters = store.slot_counters()
            replay = replay or _Replay(counters["slot_slots"])
            missing = [replay.missing(layer, one) for layer, one in enumerate(ids)]
            compute_s, expected = timed(lambda ids=ids: _compute(side.loans, ids, hidden_size))
            if outputs != expected:
                raise SystemExit("slots give other bits than all experts in memory: nothing is timed")
            reads_s, _ = timed(lambda disk=disk, missing=missing: disk.read_all(missing))
            if number < count:
                continue
            read_bytes += counters["slot_read_bytes"] - before
            replayed += sum(side.places[layer][one][2] for layer, experts in enumerate(missing) for one in experts)
            for name, value in (("slots", slots_s), ("compute", compute_s), ("reads", reads_s)):
                samples[name].append(value)
        totals = {name: sum(values) for name, values in samples.items()}
        alone = totals["compute"] + totals["reads"] if rows == 1 else max(totals["compute"], totals["reads"])
        medians = {f"{name}_s": statistics.median(values) for name, values in samples.items()}
        found.append(
            {
                "name": f"{fraction:.2f} of the experts, {rows} rows", "fraction": fraction, "rows": rows,
                "readers": counters["slot_readers"], "alone": way, **medians, "of_bound": totals["slots"] / alone,
                "read_bytes": read_bytes, "replayed_bytes": replayed,
                "of_replay": read_bytes / replayed if replayed else 1.0, "samples_s": samples["slots"],
            }
        )  # fmt: skip
    for loan in loans:
        loan.give_back()
    store.close()
    return found


# -- whole models in control groups ----------------------------------------------------------------


def _in_groups(path: Path, fraction: float, all_bytes: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    memory = int(fraction * all_bytes)
    rows = []
    for read_ahead in READ_AHEADS:
        with _read_ahead_of(path, read_ahead) as kilobytes:
            sides = ["slots", "mapped", *(["llama.cpp"] if given.llama_bin else [])]
            speeds: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(given.rounds):
                for side in sides:
                    speeds[side].append(_speed(side, path, memory, given))
            for side, values in speeds.items():
                rows.append(
                    {
                        "name": f"{side}, a group of {fraction:.2f} of the experts, read-ahead {kilobytes} KiB", "side": side,
                        "fraction": fraction, "read_ahead_kb": kilobytes, "tokens_per_s": statistics.median(values),
                        "slots_are": statistics.median(speeds["slots"]) / statistics.median(values), "samples": values,
                    }
                )  # fmt: skip
    return rows


def _speed(side: str, path: Path, memory: int, given: argparse.Namespace) -> float:
    """Returns the tokens per second that a process of its own decodes, in a group of its own."""
    if side == "llama.cpp":
        command: list[Any] = [given.llama_bin / "llama-bench", "-m", path, "-t", THREADS, "-p", 0, "-n", given.tokens // 2,
                              "-r", 2, "-o", "json", "--load-mode", "mmap", "--repack", 0, "--no-warmup"]  # fmt: skip
    else:
        command = [sys.executable, "-m", "bench.campaigns.larger_than_memory", "--child", side, "--memory", memory,
                   "--file", path, "--tokens", given.tokens // 2, "--models", path.parent]  # fmt: skip
    _drop_page_cache()
    touch_memory(memory + BESIDE_BYTES)
    with _group(memory + BESIDE_BYTES) as procs:
        text = subprocess.run(
            [*map(str, command)], check=True, timeout=PATIENCE_S, cwd=ROOT, stdout=subprocess.PIPE, text=True,
            preexec_fn=lambda: procs.write_text(str(os.getpid())),
        ).stdout  # fmt: skip
    found = json.loads(text)
    # Of each side the second run counts, which finds in memory what the first has left there.
    return float(found[0]["samples_ts"][-1] if side == "llama.cpp" else found["tokens_per_s"])


def _child(given: argparse.Namespace) -> dict[str, float]:
    """Decodes with all experts in this process, in slots or mapped."""
    import dflash_moe as dm

    layout = f"weights_layout: {'mapped' if given.child == 'mapped' else 'stored'}"
    memory = "" if given.child == "mapped" else f", memory: {given.memory}"
    topology = dm.Topology.parse(
        f"version: 1\nhost: {{threads: {THREADS}}}\ncache: {{path: {given.models / 'cache'}}}\n"
        f"engine: {{kv_memory: 64MiB}}\nworkers: [{{name: local, address: loopback, {layout}{memory}}}]\n"
    )
    llm = dm.LLM(given.file, topology=topology)
    try:
        # Tokens at random, as llama-bench has them: the likeliest ones of random codes repeat, and
        # with them their experts.
        params = dm.SamplingParams(max_tokens=given.tokens, temperature=RANDOM_TEMPERATURE, seed=1, ignore_eos=True)
        llm.generate([[1, 2, 3, 4]], params)
        began = time.perf_counter()
        llm.generate([[4, 3, 2, 1]], params)
        return {"tokens_per_s": given.tokens / (time.perf_counter() - began)}
    finally:
        llm.close()


@contextlib.contextmanager
def _group(limit_bytes: int) -> Iterator[Path]:
    """Makes a control group for so much memory, page cache included, for the time of a block."""
    group = GROUPS / f"dflash-larger-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def _drop_page_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


def _read_ahead(path: Path) -> int:
    return int(_queue_of(path).read_text())


def _queue_of(path: Path) -> Path:
    device = os.stat(path).st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    found = block / "queue" / "read_ahead_kb"
    return found if found.exists() else block.parent / "queue" / "read_ahead_kb"


@contextlib.contextmanager
def _read_ahead_of(path: Path, kilobytes: int | None) -> Iterator[int]:
    """Sets the read-ahead of a file's disk for a block, or leaves it as it is."""
    queue = _queue_of(path)
    before = queue.read_text()
    try:
        if kilobytes is not None:
            queue.write_text(str(kilobytes))
        yield int(queue.read_text())
    finally:
        queue.write_text(before)


if __name__ == "__main__":
    sys.exit(main())
