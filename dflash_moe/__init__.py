"""Distributed mixture-of-experts offload: attention on the host, routed experts in other processes,
bit-exact.

The public names load on first use, so that a worker process imports neither torch nor transformers.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_moe.errors import (
    CheckpointError,
    ConfigError,
    DflashError,
    ProtocolError,
    QueueFull,
    RequestCancelled,
    TopologyError,
    UnsupportedError,
    WorkerError,
    WorkerLost,
    WorkerTimeout,
)
from dflash_moe.version import __version__

if TYPE_CHECKING:
    from dflash_moe.engine.llm import LLM
    from dflash_moe.engine.sampling.sampling_params import SamplingParams
    from dflash_moe.engine.text import Chunk, Completion
    from dflash_moe.experts.expert_call import ExpertCall
    from dflash_moe.experts.expert_runtime import ExpertRuntime
    from dflash_moe.integrations.transformers import load_model, offload
    from dflash_moe.topology import Topology

_LAZY = {
    "ExpertCall": "dflash_moe.experts.expert_call",
    "Chunk": "dflash_moe.engine.text",
    "Completion": "dflash_moe.engine.text",
    "LLM": "dflash_moe.engine.llm",
    "SamplingParams": "dflash_moe.engine.sampling.sampling_params",
    "ExpertRuntime": "dflash_moe.experts.expert_runtime",
    "Topology": "dflash_moe.topology",
    "load_model": "dflash_moe.integrations.transformers",
    "offload": "dflash_moe.integrations.transformers",
}

# Extensions that nothing needs which runs a model: wheels have them, a build for the demo has not.
_APART = {"_measure": "what measures kernels and links", "_simulation": "the simulator of failures"}

__all__ = [
    "CheckpointError",
    "Chunk",
    "Completion",
    "ConfigError",
    "DflashError",
    "ExpertCall",
    "ExpertRuntime",
    "LLM",
    "ProtocolError",
    "QueueFull",
    "RequestCancelled",
    "SamplingParams",
    "Topology",
    "TopologyError",
    "UnsupportedError",
    "WorkerError",
    "WorkerLost",
    "WorkerTimeout",
    "__version__",
    "load_model",
    "offload",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _APART:
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError:
            text = f"{_APART[name]} (dflash_moe.{name}) is not built yet; `make` builds it, beside the core that is there"
            raise UnsupportedError(text) from None
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
