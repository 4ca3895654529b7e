"""What the plug-in does in a process of SGLang: it stands before the constructor of SGLang's layer
of routed experts, and gives it a method of computing that asks workers.

SGLang logs the errors of a plug-in and goes on without it, so that everything that can fail is done
when the first layer is built: its errors end the start.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_moe.config import SETTINGS_BY_NAME, check_environment
from dflash_moe.errors import UnsupportedError

if TYPE_CHECKING:
    from dflash_moe.integrations.engine_experts import EngineExperts

# The constructor of which the plug-in is asked instead.
TARGET = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__"
# The first version that was compared, and the first that was not.
OLDEST, BEYOND = (0, 5, 23), (0, 5, 24)
_LOAD_FORMATS = ("auto", "safetensors")


def register(topology: str) -> None:
    """Has models that are loaded from now on take their routed experts from the workers of
    `topology`, the value of DFLASH_MOE_TOPOLOGY. Raises nothing on purpose: who would tell?
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    cpus = sorted(os.sched_getaffinity(0))
    engines: list[EngineExperts] = []

    def build(original: Callable[..., None], layer: Any, *arguments: Any, **options: Any) -> None:
        if not engines:
            engines.append(_experts(topology, cpus))
        bound = inspect.signature(original).bind(layer, *arguments, **options)
        bound.apply_defaults()
        given = bound.arguments
        given["quant_method"] = _method(engines[0], given)
        original(*bound.args, **bound.kwargs)

    HookRegistry.register(TARGET, build, HookType.AROUND)


def _experts(topology: str, cpus: list[int]) -> EngineExperts:
    """Starts the workers at rank 0, once SGLang and its settings were looked at."""
    import sglang
    from sglang.srt.runtime_context import get_parallel, get_server_args

    from dflash_moe.integrations.engine_experts import EngineExperts, spec_for

    setting = SETTINGS_BY_NAME["engine_topology"]
    path = setting.check(topology, str(setting.environment))
    check_environment(os.environ)
    check_version(sglang.__version__)
    args, parallel = get_server_args(), get_parallel()
    refuse_settings(args, parallel)
    import torch

    return EngineExperts(
        spec_for(Path(args.model_path), torch.get_default_dtype()), path, device="cpu" if args.device == "cpu" else "cuda",
        is_caller=parallel.moe_tp_rank == 0, cpus=cpus,
    )  # fmt: skip


def check_version(found: str) -> None:
    """Raises UnsupportedError for a version outside of the window."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", found)
    if match is None or not OLDEST <= tuple(map(int, match.groups())) < BEYOND:
        oldest, beyond = (".".join(map(str, version)) for version in (OLDEST, BEYOND))
        raise UnsupportedError(
            f"DFLASH_MOE_TOPOLOGY is set and SGLang is {found}: this dflash_moe was compared with SGLang "
            f">={oldest},<{beyond}; pip install 'sglang>={oldest},<{beyond}', or unset DFLASH_MOE_TOPOLOGY"
        )


def refuse_settings(args: Any, parallel: Any) -> None:
    """Raises UnsupportedError for the first of SGLang's settings with which experts would not be
    where the plug-in has them. `args` are its `ServerArgs`, `parallel` its `ParallelContext`.
    """
    graphs = f"--cuda-graph-backend-{{decode,prefill}}={args.cuda_graph_backend_decode or 'a graph'}"
    is_eager = args.device == "cpu" or args.disable_cuda_graph or (
        args.cuda_graph_backend_decode == args.cuda_graph_backend_prefill == "disabled"
    )  # fmt: skip
    refused = {
        f"--model-path {args.model_path}, which is no folder here": not Path(args.model_path).is_dir(),
        f"--pp-size {args.pp_size}": args.pp_size > 1,
        f"--dp-size {args.dp_size}": args.dp_size > 1,
        f"--ep-size {parallel.moe_ep_size}": parallel.moe_ep_size > 1,
        f"--moe-a2a-backend {args.moe_a2a_backend}": args.moe_a2a_backend != "none",
        "--enable-eplb": args.enable_eplb,
        "--enable-lora": bool(args.enable_lora),
        f"--load-format {args.load_format}": args.load_format not in _LOAD_FORMATS,
        f"{graphs} (a captured graph calls nobody: disabled)": not is_eager,
    }
    for setting, is_set in refused.items():
        if is_set:
            raise UnsupportedError(
                f"DFLASH_MOE_TOPOLOGY is set and so is SGLang's {setting}, with which its experts cannot be ours: "
                f"change it, or unset DFLASH_MOE_TOPOLOGY"
            )


def _method(engine: EngineExperts, given: dict[str, Any]) -> Any:
    """Returns the method of computing of a layer with these arguments."""
    name = f"layer.{given['layer_id']}"
    layer = engine.layer(name)
    if layer is None:
        raise UnsupportedError(
            f"{given['prefix'] or name}: the checkpoint has no routed experts there; a draft model with experts of "
            f"its own cannot be used with DFLASH_MOE_TOPOLOGY"
        )
    refuse_layer(given["prefix"] or name, layer, given)
    from dflash_moe.integrations.sglang.remote_method import RemoteMethod

    return RemoteMethod(engine.route(name, layer), layer.num_experts, layer.ffn.out_size)


def refuse_layer(name: str, layer: Any, given: dict[str, Any]) -> None:
    """Raises UnsupportedError where a layer with the arguments `given` is not the checkpoint's."""
    theirs, ours = (given["num_experts"], given["hidden_size"]), (layer.num_experts, layer.ffn.in_size)
    if theirs != ours or given["num_fused_shared_experts"]:
        raise UnsupportedError(
            f"{name}: SGLang's layer has (experts, hidden size) {theirs}, the checkpoint's {ours}; start SGLang with "
            f"--disable-shared-experts-fusion"
        )
    from dflash_moe.integrations.engine_experts import refuse_weighed_input

    refuse_weighed_input(name, given["apply_router_weight_on_input"])
    if given["routed_scaling_factor"] not in (None, 1.0):
        raise UnsupportedError(
            f"{name}: its kernel scales the experts' sum by routed_scaling_factor {given['routed_scaling_factor']}, "
            f"which was not tried with workers"
        )
