"""Records the timeline of one layer: when each slice was encoded, travelled, waited, was computed,
came back and was combined.

Times are nanoseconds after the first encode, on the clock of the host. Processes of one machine
share CLOCK_MONOTONIC. The clock of a worker elsewhere is aligned at the slice with the least time
on the link, which is taken to be equal out and back, as NTP does.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash_moe.bench.forward import measure_once
from dflash_moe.errors import ConfigError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.topology import Topology

if TYPE_CHECKING:
    from dflash_moe.forward.host_model import HostModel

# At most so many slices of one layer are kept. More cannot be told apart in a picture, and the file
# stays small.
MAX_SLICES = 1024
HOST_TIMES = ("encode_start_ns", "published_ns", "arrived_ns", "combined_ns")
WORKER_TIMES = ("worker_received_ns", "worker_started_ns", "worker_finished_ns")


def capture_timeline(host: HostModel, runtime: ExpertRuntime, input_ids: Any, topology: Topology) -> dict[str, Any]:
    """Prefills `input_ids` once over a runtime that was started with `profile`, and returns the
    timeline of the middle layer. Raises ConfigError where there are no traces.
    """
    # Traces that were recorded before are dropped.
    runtime.take_traces()
    sample = measure_once(host, runtime, input_ids, 0)
    traces = runtime.take_traces()
    if not traces:
        raise ConfigError("no slice was recorded; a timeline needs a runtime started with profile=1")
    layers = [layer.index for layer in runtime.layers]
    layer = layers[len(layers) // 2]
    names = list(runtime.stats()["workers"])
    foreign = {worker.name for worker in topology.workers if not worker.is_started_by_host}
    timeline = layer_timeline([trace for trace in traces if trace["layer"] == layer], names, foreign)
    return {"prompt_tokens": int(input_ids.shape[1]), "prefill_s": sample.prefill_s, "layer": layer, **timeline}


def layer_timeline(traces: Sequence[Mapping[str, int]], names: Sequence[str], foreign: Iterable[str]) -> dict[str, Any]:
    """Returns `slices` in the order of encoding, and `clock_offsets_ns`, the clock of each worker
    minus that of the host, which is 0 except for the `foreign` ones.
    """
    offsets = dict.fromkeys(names, 0)
    for name in foreign:
        own = [trace for trace in traces if names[trace["worker"]] == name]
        if own:
            offsets[name] = clock_offset(own)
    origin = min(trace["encode_start_ns"] for trace in traces)
    ordered = sorted(traces, key=lambda trace: (trace["encode_start_ns"], trace["shard"]))
    slices = [
        {
            "worker": names[trace["worker"]],
            "call": trace["call_id"],
            "shard": trace["shard"],
            "slice": trace["slice"],
            "num_rows": trace["num_rows"],
            **{key: trace[key] - origin for key in HOST_TIMES},
            **{key: trace[key] - origin - offsets[names[trace["worker"]]] for key in WORKER_TIMES},
        }
        for trace in ordered[:MAX_SLICES]
    ]
    return {
        "slices": slices,
        "slices_left_out": len(ordered) - len(slices),
        "clock_offsets_ns": {name: offsets[name] for name in names},
    }


def clock_offset(traces: Iterable[Mapping[str, int]]) -> int:
    """Returns the worker's clock minus the host's, from the round trip that spent least time on the
    link. It is off by `clock_uncertainty` at most.
    """
    best = min(traces, key=_link_ns)
    out = best["worker_received_ns"] - best["published_ns"]
    back = best["arrived_ns"] - best["worker_finished_ns"]
    return (out - back) // 2


def clock_uncertainty(traces: Iterable[Mapping[str, int]]) -> int:
    """Returns by how many nanoseconds `clock_offset` may be off: half of the least time that a
    round trip spent on the link, all of which may have been on one way.
    """
    return (max(0, min(map(_link_ns, traces))) + 1) // 2


def _link_ns(trace: Mapping[str, int]) -> int:
    return (trace["arrived_ns"] - trace["published_ns"]) - (trace["worker_finished_ns"] - trace["worker_received_ns"])
