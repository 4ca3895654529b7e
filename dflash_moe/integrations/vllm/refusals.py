"""What of vLLM's settings the plug-in cannot work with. Each is refused by the name of vLLM's flag
when the first layer is built, which is before a weight is read.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_moe.errors import UnsupportedError
from dflash_moe.integrations.engine_experts import refuse_weighed_input

if TYPE_CHECKING:
    from dflash_moe.model.spec import LayerSpec

# Formats whose loader hands out one tensor after the other under its name in the checkpoint, so
# that those of experts can be left out.
LOAD_FORMATS = ("auto", "hf", "safetensors")


def refuse_settings(config: Any) -> None:
    """Raises UnsupportedError for the first setting of a `vllm.config.VllmConfig` with which
    experts would not be where the plug-in has them.
    """
    parallel, load = config.parallel_config, config.load_config
    refused = {
        f"--pipeline-parallel-size {parallel.pipeline_parallel_size}": parallel.pipeline_parallel_size > 1,
        f"--data-parallel-size {parallel.data_parallel_size}": parallel.data_parallel_size > 1,
        f"--prefill-context-parallel-size {parallel.prefill_context_parallel_size}": (
            parallel.prefill_context_parallel_size > 1
        ),
        f"--decode-context-parallel-size {parallel.decode_context_parallel_size}": parallel.decode_context_parallel_size > 1,
        "--enable-expert-parallel": parallel.enable_expert_parallel,
        "--enable-eplb": parallel.enable_eplb,
        "--enable-elastic-ep": parallel.enable_elastic_ep,
        "--enable-dbo": parallel.enable_dbo,
        "sequence parallel experts": parallel.use_sequence_parallel_moe,
        "--enable-lora": config.lora_config is not None,
        f"--load-format {load.load_format}": str(load.load_format) not in LOAD_FORMATS,
    }
    for setting, is_set in refused.items():
        if is_set:
            raise UnsupportedError(
                f"DFLASH_MOE_TOPOLOGY is set and so is vLLM's {setting}, with which its experts cannot be ours; "
                f"what works is --tensor-parallel-size with --load-format {', '.join(LOAD_FORMATS)}: leave {setting} "
                f"out, or unset DFLASH_MOE_TOPOLOGY"
            )
    device = str(config.device_config.device_type)
    if device != "cpu" and not config.model_config.enforce_eager:
        raise UnsupportedError(
            f"DFLASH_MOE_TOPOLOGY is set and vLLM would capture graphs of its {device} device, in which nobody can be "
            f"called: give it --enforce-eager"
        )


def refuse_layer(name: str, layer: LayerSpec | None, moe: Any, options: dict[str, Any]) -> None:
    """Raises UnsupportedError where a layer of vLLM is not the layer of the checkpoint: `moe` is
    its `FusedMoEConfig`, and `options` are what the model gave to the layer beside it.
    """
    if layer is None:
        raise UnsupportedError(
            f"{name}: vLLM builds routed experts here which the checkpoint's model does not have; "
            f"a draft model with experts of its own (--speculative-config) cannot be used with DFLASH_MOE_TOPOLOGY"
        )
    refuse_weighed_input(name, bool(options.get("apply_router_weight_on_input")))
    theirs, ours = (moe.num_experts, moe.hidden_dim), (layer.num_experts, layer.ffn.in_size)
    if theirs != ours:
        raise UnsupportedError(
            f"{name}: vLLM's layer has (experts, hidden size) {theirs}, the checkpoint's {ours}; "
            f"experts that vLLM adds (shared ones that it fuses, redundant ones) cannot be computed by workers"
        )
