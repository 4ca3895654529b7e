"""Opens what `bench prefill` and `bench decode` measure: the model over its workers, and the model
with all experts in this process.

It also records what a reader must know of the topology: threads against cores, emulated links, and
resident memory.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_moe.bench.harness import Recorder
from dflash_moe.bench.token_reads import Sides
from dflash_moe.config import resolve_settings
from dflash_moe.errors import ConfigError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.holders.threads import thread_plan
from dflash_moe.telemetry.machine import usable_cores
from dflash_moe.telemetry.memory import process_memory
from dflash_moe.topology import HOST, Topology

if TYPE_CHECKING:
    from dflash_moe.forward.host_model import HostModel

LOCAL = "local"
# These settings say how workers are reached or how calls are sliced. A process that holds all
# experts needs none of them.
NOT_LOCAL = ("mode", "transport", "threads", "key_file")


@dataclass(frozen=True, slots=True)
class MeasuredHost:
    """A model, and the runtime that computes its experts."""

    runtime: ExpertRuntime
    model: HostModel
    sides: Sides


@contextmanager
def open_hosts(
    directory: Path,
    topology: Topology,
    overrides: Mapping[str, Any],
    recorder: Recorder,
    *,
    with_local: bool,
    micro_batches: str | None = "1",
) -> Iterator[tuple[MeasuredHost, MeasuredHost | None]]:
    """Gives the block the model over the workers, and with all experts local or None. Both are
    alive at once, so that their rounds can alternate. Steps are computed in one batch, so that
    calls depend on modes alone; `micro_batches` None leaves it to the setting.

    Where this machine has no memory for the second, it says so and leaves that out. Errors are
    those of `ExpertRuntime.start`.
    """
    recorder.reporter.say(f"starting {len(topology.workers)} workers and loading {directory.name}")
    with ExitStack() as stack:
        remote = _open(stack, directory, topology, overrides, recorder, micro_batches)
        if recorder.result is not None:
            recorder.result.params["processes"] = resident_memory(remote.runtime)
        local = None
        if with_local:
            try:
                local = _open(stack, directory, *all_local(topology, overrides), recorder, micro_batches)
            except ConfigError as error:
                recorder.reporter.say(f"row {LOCAL} is left out: {error}")
                if recorder.result is not None:
                    recorder.result.params["local_left_out"] = str(error)
        yield remote, local


def _open(
    stack: ExitStack, directory: Path, topology: Topology, overrides: Mapping[str, Any], recorder: Recorder,
    micro_batches: str | None,
) -> MeasuredHost:  # fmt: skip
    from dflash_moe.forward.host_model import open_host

    runtime = stack.enter_context(
        # A measurement of workers ends when one is lost; the host would give other figures.
        ExpertRuntime.start(
            topology, model=directory, on_loading=recorder.reporter.loading, **{"host_fallback": "none", **overrides}
        )
    )
    model, sides = open_host(directory, runtime, micro_batches=micro_batches), Sides.of(topology, overrides)
    keeps_torch = model.packed is None or bool(model.report.not_taken)
    if keeps_torch and runtime.tensor_device == "cpu":
        import torch

        # The model's own operators compute with torch's threads.
        sides = dataclasses.replace(sides, threads={**sides.threads, HOST: torch.get_num_threads()})
    elif keeps_torch:
        sides = dataclasses.replace(sides, threads={**sides.threads, HOST: None})
    return MeasuredHost(runtime, model, sides)


def all_local(topology: Topology, overrides: Mapping[str, Any]) -> tuple[Topology, dict[str, Any]]:
    """Returns a topology with all experts in the host process, and the settings for it. Its threads
    are those that host and workers have together.
    """
    threads = thread_plan(topology, resolve_settings(topology.stated_settings, **overrides))
    own = {key: value for key, value in overrides.items() if key not in NOT_LOCAL}
    return local_topology(topology, threads.host + sum(threads.workers.values())), {**own, "mode": "batched"}


def local_topology(topology: Topology, total_threads: int) -> Topology:
    """Returns a topology with all experts in the host process, behind the loopback transport.
    `total_threads` is what host and workers have together, now in one pool.
    """
    template = topology.workers[0]
    only = dataclasses.replace(
        template, name=LOCAL, address="loopback", threads=total_threads, memory=None, experts=None, emulate=None
    )
    placement = dataclasses.replace(topology.placement, policy="even")
    return dataclasses.replace(topology, workers=(only,), placement=placement)


def describe_topology(topology: Topology, overrides: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Returns the parameters that every result over workers carries. It warns where the topology
    asks for more threads than there are cores.
    """
    settings = resolve_settings(topology.stated_settings, **overrides)
    threads = thread_plan(topology, settings)
    of_workers, cores = sum(threads.workers.values()), usable_cores()
    planned = threads.host + of_workers
    if planned > cores:
        recorder.reporter.say(
            f"warning: {planned} threads (host {threads.host}, workers {of_workers}) share {cores} cores: "
            "processes wait for each other, nobody spins, and times are longer than on a machine with a core per thread"
        )
    return {
        "workers": [
            {
                "name": worker.name,
                "backend": worker.backend,
                "threads": threads.workers.get(worker.name, worker.threads),
                "address": worker.address or "shared",
                "emulate": dataclasses.asdict(worker.emulate) if worker.emulate else None,
            }
            for worker in topology.workers
        ],
        "host_threads": threads.host,
        "placement": topology.placement.policy,
        "batch_capacity": settings.batch_capacity,
        "stream_tokens": settings.stream_tokens,
        "overrides": {key: str(value) for key, value in overrides.items() if value is not None},
        "cores_usable": cores,
        "oversubscribed": planned > cores,
    }


def resident_memory(runtime: ExpertRuntime) -> list[dict[str, Any]]:
    """Returns the anonymous and file-backed resident bytes of this process ("host") and of every
    worker, and the experts that they hold.
    """
    own = process_memory()
    rows: list[dict[str, Any]] = [
        {
            "name": "host",
            "experts_per_layer": 0,
            "anonymous_bytes": own.anonymous_bytes,
            "file_bytes": own.file_bytes,
            "weight_bytes": 0,
        }
    ]
    for process in runtime.worker_processes():
        keys = ("name", "experts_per_layer", "anonymous_bytes", "file_bytes", "weight_bytes")
        rows.append({key: getattr(process, key) for key in keys})
    return rows
