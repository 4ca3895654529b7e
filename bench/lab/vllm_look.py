"""What is seen of a model within vLLM's process that has it. vLLM sends functions there by name.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any


def look(model: Any) -> dict[str, Any]:
    """Returns what is seen of a rank's model in the process that has it: the layers of routed
    experts with their calls, their bytes there, the runtime's counters (None at ranks that call
    nobody), the process of each worker, the most memory that this process had, and what
    `count_sums` counted.
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
        "sums": dict(getattr(model, "sums", {})),
    }


def count_sums(model: Any) -> None:
    """Counts from now on, where there are several ranks, the `steps` of the model, the sums over
    the ranks that this one takes part in (`all`), and those of them within each block of experts,
    shared ones included (`experts 0` and on).
    """
    from vllm.distributed import get_tp_group

    ranks = get_tp_group().device_communicator
    add_up = ranks.all_reduce
    sums: Counter[str] = Counter()
    model.sums = sums

    def counted(*arguments: Any, **options: Any) -> Any:
        sums["all"] += 1
        return add_up(*arguments, **options)

    def count_within(block: Any, name: str) -> None:
        block.register_forward_pre_hook(lambda *_: sums.subtract({name: sums["all"]}))
        block.register_forward_hook(lambda *_: sums.update({name: sums["all"]}))

    ranks.all_reduce = counted
    model.register_forward_pre_hook(lambda *_: sums.update(["steps"]))
    # Who has routed experts right below it calls them, and has the shared ones too.
    blocks = [one for one in model.modules() if any("RoutedExperts" in type(below).__name__ for below in one.children())]
    for index, block in enumerate(blocks):
        count_within(block, f"experts {index}")


def _processes(runtime: Any) -> dict[str, int]:
    """Returns the process of each worker, of none while one is lost. What stands in for a lost one
    in this process is no worker.
    """
    from dflash_moe import WorkerLost

    try:
        return {one.name: one.pid for one in runtime.worker_processes() if one.pid != os.getpid()}
    except WorkerLost:
        return {}
