"""What the plug-in does in a process of vLLM: it names our layer where vLLM looks for replacements
of its own, and our loader. Nothing starts here; that is up to the first layer that is built.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_moe.config import SETTINGS_BY_NAME, check_environment
from dflash_moe.integrations.vllm.refusals import LOAD_FORMATS, refuse_settings
from dflash_moe.integrations.vllm.versions import check_version
from dflash_moe.topology import Topology

if TYPE_CHECKING:
    from dflash_moe.integrations.engine_experts import EngineExperts

# The plug-in is called in every process of vLLM, and may be called more than once.
_is_registered = False


def register(topology: str) -> None:
    """Has models that are loaded from now on take their routed experts from the workers of
    `topology`, the value of DFLASH_MOE_TOPOLOGY. A second call does nothing.

    Errors: ConfigError for the variable, TopologyError for the file, UnsupportedError for this
    version of vLLM.
    """
    global _is_registered
    if _is_registered:
        return
    setting = SETTINGS_BY_NAME["engine_topology"]
    path = setting.check(topology, str(setting.environment))
    check_environment(os.environ)
    Topology.load(path)
    import vllm

    check_version(vllm.__version__)
    _speak_like_vllm()
    _replace(path, sorted(os.sched_getaffinity(0)))
    _is_registered = True


def _replace(topology: Path, cpus: list[int]) -> None:
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.custom_op import PluggableLayer
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader import register_model_loader

    from dflash_moe.integrations.engine_experts import EngineExperts, spec_for
    from dflash_moe.integrations.vllm.loader import loader_without_experts
    from dflash_moe.integrations.vllm.remote_experts import remote_layer

    # The model that this process loaded last, by vLLM's configuration of it.
    last: list[tuple[Any, EngineExperts]] = []

    def experts_of(config: Any) -> EngineExperts:
        if found := engine_of(config):
            return found
        refuse_settings(config)
        engine = EngineExperts(
            spec_for(_checkpoint(config), config.model_config.dtype), topology, device=str(config.device_config.device_type),
            is_caller=get_tensor_model_parallel_rank() == 0, cpus=cpus,
        )  # fmt: skip
        last[:] = [(config, engine)]
        return engine

    def engine_of(config: Any) -> EngineExperts | None:
        return last[0][1] if last and last[0][0] is config else None

    replaced: set[type] = set()

    def replace_all() -> None:
        # vLLM finds a replacement by the name of the class that a model names, and models have
        # classes of their own.
        for kind in (RoutedExperts, *_derived(RoutedExperts)):
            if kind not in replaced:
                replaced.add(kind)
                layer = remote_layer(kind, experts_of)
                replaced.add(layer)
                PluggableLayer.register_oot(layer, name=kind.__name__)

    replace_all()
    loader = loader_without_experts(replace_all, engine_of)
    for name in LOAD_FORMATS:
        register_model_loader(name)(loader)


def _checkpoint(config: Any) -> Path:
    """Returns the folder of the model, which is loaded from the hub where it is named there."""
    model = config.model_config
    path = Path(model.model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    found = snapshot_download(
        model.model,
        revision=model.revision,
        cache_dir=config.load_config.download_dir,
        allow_patterns=["*.safetensors", "*.json"],
    )
    return Path(found)


def _derived(kind: type[Any]) -> list[type[Any]]:
    found: list[type[Any]] = []
    for below in kind.__subclasses__():
        found += [below, *_derived(below)]
    return found


def _speak_like_vllm() -> None:
    """Has what we log appear where vLLM's own lines do."""
    ours = logging.getLogger("dflash_moe")
    theirs = logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
