"""The routed experts of a model that somebody else's engine loads in this process: what the
checkpoint says of them and, at the rank that calls, the runtime whose workers compute them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.integrations.expert_route import Detours, ExpertRoute
from dflash_moe.integrations.host_weights import TORCH_DTYPES
from dflash_moe.model.ffn import EXPERT_FIELD
from dflash_moe.model.spec import model_spec
from dflash_moe.telemetry.affinity import running_on
from dflash_moe.topology import Topology

if TYPE_CHECKING:
    from dflash_moe.model.ffn import FfnSpec, TensorPattern
    from dflash_moe.model.spec import LayerSpec, ModelSpec

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# So often the log says how far workers have loaded.
REPORT_S = 10.0
# What formats put behind the name of a matrix whose scales have a tensor of their own.
_STORED_AS = re.compile(r"(\.weight|_blocks|_packed)$")


class EngineExperts:
    """The experts of one model in one process of an engine. Every rank has one, and asks it for
    each of its layers.
    """

    def __init__(self, spec: ModelSpec, topology: Path, *, device: str, is_caller: bool, cpus: Sequence[int]) -> None:
        """Starts the workers of `topology` where `is_caller`. `device` is the kind on which the
        engine's model is, cpu or cuda. `cpus` are those that workers may use: an engine keeps its
        own threads on some. Errors are those of `ExpertRuntime.start` and `Topology.load`.
        """
        self.spec = spec
        self._layers = {layer.index: layer for layer in spec.layers}
        self._detours = Detours()
        self._runtime = apart_from_engine(lambda: _started(spec, topology, device, cpus)) if is_caller else None
        self._taken: set[int] = set()

    def layer(self, name: str) -> LayerSpec | None:
        """Returns the layer that the engine calls `name`, by the one number in it, None where the
        checkpoint has no such layer.
        """
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        return self._layers.get(numbers[0]) if len(numbers) == 1 else None

    def route(self, name: str, layer: LayerSpec) -> ExpertRoute | None:
        """Returns the way to the workers of a layer, None at ranks that call nobody. Raises
        UnsupportedError for a layer that was taken before.
        """
        if layer.index in self._taken:
            raise UnsupportedError(f"{name}: layer {layer.index} is built twice; two models cannot share workers")
        self._taken.add(layer.index)
        return ExpertRoute(self._runtime, layer, self._detours) if self._runtime is not None else None

    def all_built(self) -> None:
        """Leaves the runtime to its routes, with the last of which it ends. Raises UnsupportedError
        where a layer of the checkpoint was not asked for: the engine would compute its experts.
        """
        self._runtime = None
        missing = [layer.name for layer in self.spec.layers if layer.index not in self._taken]
        if missing:
            raise UnsupportedError(
                f"of {len(self.spec.layers)} layers with routed experts {len(self._taken)} were built in a way that "
                f"workers can take over, and {missing[0]} was not: unset DFLASH_MOE_TOPOLOGY for this model"
            )

    def expert_tensors(self) -> re.Pattern[str]:
        """Returns what matches the beginning of the names, in the checkpoint, of all tensors that
        belong to routed experts, their scales included, and of no other.
        """
        patterns = {_beginning(pattern) for layer in self.spec.layers for pattern in _patterns(layer.ffn)}
        return re.compile("|".join(sorted(patterns)))


def refuse_weighed_input(name: str, is_weighed: bool) -> None:
    """Raises UnsupportedError for a layer whose experts multiply their input by the router's weight
    instead of their output.
    """
    if is_weighed:
        raise UnsupportedError(f"{name}: its experts weigh their input (apply_router_weight_on_input), which workers do not")


def apart_from_engine(work: Callable[[], Result]) -> Result:
    """Returns `work()`, which is done in a thread of its own and in torch's own default dtype: an
    engine that builds a model has set the model's dtype, and a device for all that is made.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="dflash-experts") as thread:
            return thread.submit(work).result()
    finally:
        torch.set_default_dtype(before)


def spec_for(path: Path, dtype: Any) -> ModelSpec:
    """Returns what the checkpoint at `path` says of a model that runs in a torch dtype, with the
    errors of `model_spec`, and UnsupportedError for a dtype that workers do not take.
    """
    names = {kind: name for name, kind in TORCH_DTYPES.items()}
    if dtype not in names:
        raise UnsupportedError(f"the model's dtype is {dtype}: workers take {', '.join(map(str, names))} (--dtype)")
    return apart_from_engine(lambda: model_spec(path, names[dtype]))


def _patterns(ffn: FfnSpec) -> list[TensorPattern]:
    found = [
        ffn.gate_tensor, ffn.up_tensor, ffn.down_tensor, ffn.gate_bias_tensor, ffn.up_bias_tensor, ffn.down_bias_tensor,
    ]  # fmt: skip
    return [pattern for pattern in found if pattern is not None]


def _beginning(pattern: TensorPattern) -> str:
    """Returns an expression for the tensor of a pattern and for what is stored beside it: scales of
    the same matrix, whose names begin alike.
    """
    begin, expert, rest = _STORED_AS.sub("", pattern.name).partition(EXPERT_FIELD)
    return re.escape(begin) + (r"\d+" + re.escape(rest) if expert else "") + r"(?![^._])"


def _started(spec: ModelSpec, topology: Path, device: str, cpus: Sequence[int]) -> ExpertRuntime:
    began = said = time.monotonic()
    loaded: dict[str, tuple[int, int]] = {}

    def report(holder: str, done: int, total: int) -> None:
        nonlocal said
        loaded[holder] = done, total
        if time.monotonic() - said >= REPORT_S:
            said = time.monotonic()
            so_far, of_all = (sum(one[place] for one in list(loaded.values())) for place in (0, 1))
            log.info("workers have loaded %.1f of %.1f GB of experts", so_far / 1e9, of_all / 1e9)

    wanted = Topology.load(topology)
    log.info("%s: workers load the experts of %d layers of %s", topology, len(spec.layers), spec.path)
    # The workers, and the threads that wait for them, go where this process might go before its
    # engine bound threads to cores.
    with running_on(cpus):
        runtime = ExpertRuntime.start(wanted, model=spec, on_loading=report)
    if not runtime.tensor_device.startswith(device):
        runtime.close()
        raise ConfigError(
            f"{topology}: host.device is {runtime.host_device} and the engine's model is on {device}: "
            f"write host: {{device: {'cpu' if device == 'cpu' else 'cuda:0'}}}"
        )
    names = ", ".join(worker.name for worker in wanted.workers) or "this process"
    took_s = time.monotonic() - began
    log.info(
        "%s: computes the routed experts of %d layers after %.1f s (process %d)", names, len(spec.layers), took_s, os.getpid()
    )
    return runtime
