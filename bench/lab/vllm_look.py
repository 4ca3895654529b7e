"""What is seen of a model within vLLM's process that has it. vLLM sends the function there by name.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from typing import Any


def look(model: Any) -> dict[str, Any]:
    """Returns what is seen of a rank's model in the process that has it: the layers of routed
    experts with their calls, their bytes there, the runtime's counters (None at ranks that call
    nobody), the process of each worker, and the most memory that this process had.
    """
    layers = [one for one in model.modules() if "RoutedExperts" in type(one).__name__]
    routes = [getattr(layer.quant_method, "route", None) for layer in layers]
    runtime = next((route.runtime for route in routes if route is not None), None)
    # A router's bias may be kept with the layer; what belongs to experts has a dimension more.
    weights = [one for layer in layers for one in layer.parameters() if one.ndim > 1]
    with open("/proc/self/status", encoding="ascii") as file:
        peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    return {
        "pid": os.getpid(),
        "classes": sorted({type(layer).__name__ for layer in layers}),
        "expert_bytes": sum(one.numel() * one.element_size() for one in weights),
        "calls": [0 if route is None else route.count.value for route in routes],
        "totals": None if runtime is None else runtime.stats()["totals"],
        "workers": {} if runtime is None else _processes(runtime),
        "peak_bytes": peak,
    }


def _processes(runtime: Any) -> dict[str, int]:
    """Returns the process of each worker, of none while one is lost. What stands in for a lost one
    in this process is no worker.
    """
    from dflash_moe import WorkerLost

    try:
        return {one.name: one.pid for one in runtime.worker_processes() if one.pid != os.getpid()}
    except WorkerLost:
        return {}
