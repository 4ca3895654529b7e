"""`bench limits` says where a decoded token and a prefill chunk go: for each product and operator
its time, bytes and multiply-adds, and the larger of two bounds; what jobs of the pool lose, what
Python takes, and what waiting for workers takes beside their computing.

All experts in the host process are measured first, and then the topology's workers, one after the
other, so that one model at a time is in memory. Read speeds and peaks are measured in turns with
the cases. A row is the round whose time is the median, so that its parts add up.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_moe import _core
from dflash_moe.bench.forward import random_prompt
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.limit_parts import Limits, Part, parts_of, split_call, step_fields, worker_part
from dflash_moe.bench.model_host import LOCAL, MeasuredHost, all_local, describe_topology, open_hosts
from dflash_moe.bench.results import BenchResult, described, timing_fields
from dflash_moe.bench.token_reads import ExpertWork, Sides
from dflash_moe.errors import ConfigError
from dflash_moe.holders.memory_check import SHORTFALL
from dflash_moe.model.first_layers import first_layers
from dflash_moe.telemetry.memory import huge_page_bytes, process_memory
from dflash_moe.topology import HOST, Topology

if TYPE_CHECKING:
    from dflash_moe.forward.forward import Forward, StepRows

WORKERS = "workers"
# Rows of the pass that finds the numerics classes of a model's products.
_PROBE_ROWS = 2


@dataclass(frozen=True, slots=True)
class LimitsParams:
    """What is measured in each of `repeat` rounds: `new_tokens` steps of decode behind
    `prompt_tokens` for each number of `sequences`, and a chunk of each number of rows in `prefill`.
    Of the model the first `layers`, None for all.
    """

    model: Path
    sequences: tuple[int, ...] = (1, 4, 16)
    prompt_tokens: int = 128
    new_tokens: int = 16
    prefill: tuple[int, ...] = (128, 512, 2048, 8192)
    layers: int | None = None
    repeat: int = 5
    with_local: bool = True
    seed: int = 0


@dataclass(slots=True)
class Workload:
    """Steps that are measured: `steps` of `rows` tokens of each of `sequences` sequences, which
    begin with a prompt that is not measured.
    """

    name: str
    sequences: int
    rows: int
    steps: int
    prompt_tokens: int

    def run(self, forward: Forward, token_ids: Sequence[int], watch: Watch) -> None:
        """Computes them greedily; `watch` is around the steps. Errors are those of the forward
        pass.
        """
        from dflash_moe.forward.forward import StepRows

        length = self.prompt_tokens + self.steps * self.rows
        sequences = [forward.admit(length) for _ in range(self.sequences)]
        try:
            tokens = [list(token_ids[at : at + self.rows]) for at in range(self.sequences)]
            if self.prompt_tokens:
                prompts = [token_ids[at : at + self.prompt_tokens] for at in range(self.sequences)]
                begun = zip(sequences, prompts, strict=True)
                tokens = [_step(forward, [StepRows(*one)])[0] for one in begun]
            with watch.steps(self.steps):
                for _ in range(self.steps):
                    tokens = _step(forward, [StepRows(*one) for one in zip(sequences, tokens, strict=True)])
        finally:
            for one in sequences:
                one.release()


def _step(forward: Forward, rows: Sequence[StepRows]) -> list[list[int]]:
    """Computes one step, and returns the next token of each sequence."""
    with forward.begin(rows) as step:
        return [[token] for token in step.most_likely(len(rows))]


@dataclass(slots=True)
class Watch:
    """Times the steps of one run over a host: `whole_s` for one of them, and its `parts`. The
    experts that are used are counted apart, in a run with `counts`, because that takes time.
    """

    host: MeasuredHost
    names: Mapping[int, str]
    work: ExpertWork
    counts: bool = False
    whole_s: float = 0.0
    parts: list[Part] = field(default_factory=list)

    @contextmanager
    def steps(self, count: int) -> Iterator[None]:
        """Opens a block of `count` steps."""
        from dflash_moe.integrations.transformers import experts_watched

        runtime, sides = self.host.runtime, self.host.sides
        with experts_watched(self.host.model.model, self.work.receive) if self.counts else nullcontext():
            runtime.take_traces()
            started = time.perf_counter()
            _core.start_operator_clock()
            try:
                yield
            finally:
                times = _core.stop_operator_clock()
                self.whole_s = (time.perf_counter() - started) / count
        self.parts = parts_of(times, self.names, sides.threads[HOST], count)
        of_workers = [sides.of_holder[name] for name in runtime.stats()["workers"]]
        at_workers = worker_part(runtime.take_traces(), of_workers, self.work, sides, HOST, count)
        if at_workers is not None:
            self.parts = split_call(self.parts, at_workers)


@dataclass(slots=True)
class LimitsCase:
    """A workload over one host: a `harness.Case`."""

    host: MeasuredHost
    where: str
    forward: Forward
    workload: Workload
    token_ids: Sequence[int]
    names: Mapping[int, str]
    limits: Limits
    rounds: int | None = None
    work: ExpertWork | None = None
    first_s: float = 0.0
    samples: list[Watch] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name of the case in reports of progress."""
        return f"{self.where}, {self.workload.name}"

    def measure(self, *, keep: bool) -> None:
        """Runs the workload once. The warm-up counts the experts in a second run; all runs have the
        same tokens.
        """
        if self.work is None:
            self.work = ExpertWork(self.host.runtime, self.host.sides)
            first = Watch(self.host, self.names, self.work)
            self.workload.run(self.forward, self.token_ids, first)
            self.first_s = first.whole_s
            if self.where == WORKERS:
                self.workload.run(self.forward, self.token_ids, Watch(self.host, self.names, self.work, counts=True))
            return
        watch = Watch(self.host, self.names, self.work)
        self.workload.run(self.forward, self.token_ids, watch)
        if keep:
            self.samples.append(watch)

    def row(self) -> dict[str, Any] | None:
        """Returns the result row, with the parts of the round whose time is the median."""
        if not self.samples:
            return None
        median = sorted(self.samples, key=lambda one: one.whole_s)[(len(self.samples) - 1) // 2]
        load = self.workload
        return {
            "name": self.label,
            "where": self.where,
            "sequences": load.sequences,
            "rows": load.rows,
            "prompt_tokens": load.prompt_tokens,
            **timing_fields([one.whole_s for one in self.samples]),
            "first_s": self.first_s,
            "tokens_per_s": load.sequences * load.rows / median.whole_s,
            "step_s": median.whole_s,
            **step_fields(median.parts, median.whole_s, self.limits),
        }


def run_limits(
    params: LimitsParams,
    topology: Topology,
    *,
    recorder: Recorder,
    overrides: Mapping[str, Any],
) -> BenchResult:
    """Measures all experts local, and then over the workers where the topology has some beside the
    host. Errors are those of `ExpertRuntime.start`, of `first_layers` and of the calls; where the
    memory is missing, ConfigError names --layers.
    """
    result = recorder.begin("limits", described(params, "with_local"), interleaved=False)
    result.params |= describe_topology(topology, overrides, recorder)
    result.params["huge_pages"] = {}
    has_workers = set(Sides.of(topology, overrides).threads) != {HOST}
    # Slices are traced, so that a worker's computing is told from its way.
    hosts = [(LOCAL, *all_local(topology, overrides))] if params.with_local or not has_workers else []
    hosts += [(WORKERS, topology, {**overrides, "profile": 1})] if has_workers else []
    whole = nullcontext(params.model) if params.layers is None else first_layers(params.model, params.layers)
    with recorder.recording(), _naming_layers(), whole as path:
        for where, placed, settings in hosts:
            _measure_host(params, path, where, placed, settings, recorder)
    return result


@contextmanager
def _naming_layers() -> Iterator[None]:
    """Has the error of a model that memory does not hold say what can be measured of it."""
    try:
        yield
    except ConfigError as error:
        if not str(error).startswith(SHORTFALL):
            raise
        raise error.reworded(f"{error}; --layers N measures the first N layers of the model alone") from None


def _measure_host(
    params: LimitsParams, path: Path, where: str, topology: Topology, settings: Mapping[str, Any], recorder: Recorder
) -> None:
    """Opens a host, measures its cases and closes it; nothing of its model is kept."""
    assert recorder.result is not None
    with open_hosts(path, topology, settings, recorder, with_local=False) as (host, _):
        _measure(params, where, host, recorder)
        found = {f"{where}: {name}": pages for name, pages in _huge_pages(host, topology).items()}
        recorder.result.params["huge_pages"] |= found
    # Models lie in cycles of references, and the next one needs the memory.
    del host
    gc.collect()


def _measure(params: LimitsParams, where: str, host: MeasuredHost, recorder: Recorder) -> None:
    from dflash_moe.operators.layers.reads import linear_names

    forward = host.model.engine_forward(host.runtime.settings.kv_memory)
    names, limits = linear_names(host.model.model), Limits()
    workloads = [
        *(Workload(f"decode {count}", count, 1, params.new_tokens, params.prompt_tokens) for count in params.sequences),
        *(Workload(f"prefill {rows:,}", 1, rows, 1, 0) for rows in params.prefill),
    ]
    fitting = [one for one in workloads if _fits(one, forward, where, recorder)]
    longest = max((one.prompt_tokens + one.rows + one.sequences for one in fitting), default=_PROBE_ROWS)
    token_ids = random_prompt(host.model, longest, params.seed)[0].tolist()
    for side, threads in host.sides.threads.items():
        limits.need(threads, _classes(host, side, forward, names, token_ids))
    cases = [LimitsCase(host, where, forward, one, token_ids, names, limits) for one in fitting]
    run_rounds(recorder, [*limits.speeds.values(), *limits.peaks.values(), *cases], rounds=params.repeat)


def _fits(load: Workload, forward: Forward, where: str, recorder: Recorder) -> bool:
    """Says whether the model and its pages have room for a workload, and says why not."""
    try:
        length = load.prompt_tokens + load.steps * load.rows
        forward.check_length(length)
        if load.sequences > forward.max_sequences or load.sequences * -(-length // forward.blocks.block_tokens) > (
            forward.blocks.num_blocks
        ):
            raise ConfigError(
                f"the KV cache has no room for {load.sequences} sequences of {length} tokens; raise engine.kv_memory"
            )
    except ConfigError as error:
        recorder.reporter.say(f"{where}, {load.name} is left out: {error}")
        return False
    return True


def _classes(
    host: MeasuredHost,
    side: str,
    forward: Forward,
    names: Mapping[int, str],
    token_ids: Sequence[int],
) -> set[str]:
    """Returns the numerics classes of a side's products."""
    if side != HOST:
        shards = itertools.chain(*host.runtime.placement.layers)
        return {one.numerics for one in shards if host.sides.of_holder[one.holder] == side}
    watch = Watch(host, names, ExpertWork(host.runtime, host.sides))
    Workload("probe", 1, _PROBE_ROWS, 1, 0).run(forward, token_ids, watch)
    return {numerics for part in watch.parts for work in part.works for numerics in work.multiply_adds}


def _huge_pages(host: MeasuredHost, topology: Topology) -> dict[str, dict[str, int | None]]:
    """Returns how many of the anonymous bytes of each process of this machine lie on huge pages,
    None where the system does not say.
    """
    local = {worker.name for worker in topology.local_workers()}
    pids = {process.name: process.pid for process in host.runtime.worker_processes() if process.name in local}
    own = {HOST: None} | {name: pid for name, pid in pids.items() if host.sides.of_holder[name] != HOST}
    return {
        name: {"anonymous_bytes": process_memory(pid).anonymous_bytes, "huge_bytes": huge_page_bytes(pid)}
        for name, pid in own.items()
    }
