"""What dflash_moe/integrations/vllm uses of vLLM.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from tests.contracts.contract import Contract

_LAYERS = "model_executor/layers/fused_moe"
_LOADER = "model_executor/model_loader"
_NOT_ADDED = "the result of rank 0 may not be added up over the ranks"

VLLM = Contract(
    "vllm",
    functions={
        ("model_executor/custom_op.py", "PluggableLayer.register_oot"): ("_decorated_layer_cls", "name"),
        (f"{_LAYERS}/routed_experts.py", "RoutedExperts.__init__"): (
            "self", "layer_name", "params_dtype", "moe_config", "quant_config",
        ),
        (f"{_LAYERS}/routed_experts.py", "RoutedExperts._get_quant_method"): ("self", "prefix", "quant_config", "moe_config"),
        (f"{_LAYERS}/routed_experts.py", "RoutedExperts.load_weights"): ("self", "weights"),
        (f"{_LAYERS}/fused_moe_method_base.py", "FusedMoEMethodBase.__init__"): ("self", "moe"),
        (f"{_LAYERS}/fused_moe_method_base.py", "FusedMoEMethodBase.create_weights"): ("self", "layer"),
        (f"{_LAYERS}/fused_moe_method_base.py", "FusedMoEMethodBase.get_fused_moe_quant_config"): ("self", "layer"),
        (f"{_LAYERS}/fused_moe_method_base.py", "FusedMoEMethodBase.apply"): (
            "self", "layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input",
        ),
        (f"{_LOADER}/__init__.py", "register_model_loader"): ("load_format",),
        (f"{_LOADER}/base_loader.py", "BaseModelLoader.load_model"): ("self", "vllm_config", "model_config", "prefix"),
        (f"{_LOADER}/default_loader.py", "DefaultModelLoader.load_weights"): ("self", "model", "model_config"),
        (f"{_LOADER}/default_loader.py", "DefaultModelLoader.get_all_weights"): ("self", "model_config", "model"),
        (f"{_LOADER}/utils.py", "get_model_architecture"): ("model_config",),
    },
    options={
        (f"{_LAYERS}/routed_experts.py", "RoutedExperts.__init__"): ("apply_router_weight_on_input",),
    },
    fields={
        ("config/parallel.py", "ParallelConfig"): (
            "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size",
            "enable_expert_parallel", "enable_eplb", "enable_elastic_ep", "enable_dbo", "use_sequence_parallel_moe",
        ),
        ("config/load.py", "LoadConfig"): ("load_format", "download_dir"),
        ("config/device.py", "DeviceConfig"): ("device_type",),
        ("config/vllm.py", "VllmConfig"): (
            "parallel_config", "load_config", "lora_config", "device_config", "model_config",
        ),
        ("config/model.py", "ModelConfig"): ("model", "revision", "dtype", "enforce_eager"),
        (f"{_LAYERS}/config.py", "FusedMoEConfig"): ("num_experts", "hidden_dim"),
        (f"{_LOADER}/default_loader.py", "DefaultModelLoader"): ("local_expert_ids",),
    },
    statements={
        ("model_executor/custom_op.py", "PluggableLayer.__new__"): (
            ("op_registry_oot[layer_class_name]", "layers are not replaced by the name of their class"),
        ),
        (f"{_LAYERS}/layer.py", "FusedMoEFactory"): (("routed_experts_cls = RoutedExperts", "layers are of another class"),),
        (f"{_LAYERS}/runner/moe_runner.py", "MoERunner._fused_output_is_reduced"): (("moe_kernel is not None", _NOT_ADDED),),
        (f"{_LAYERS}/runner/moe_runner.py", "MoERunner._maybe_reduce_final_output"): (
            ("tensor_model_parallel_all_reduce(states)", _NOT_ADDED),
        ),
        (f"{_LAYERS}/runner/moe_runner.py", "MoERunner._apply_quant_method"): (
            ("self.routed_experts.forward_modular(", "layers are not called with what the router chose"),
        ),
        (f"{_LAYERS}/routed_experts.py", "RoutedExperts.forward_modular"): (
            ("self.quant_method.apply(", "layers do not compute by their method"),
        ),
        (f"{_LOADER}/weight_utils.py", "safetensors_weights_iterator"): (
            ("should_skip_weight(name, local_expert_ids)", "tensors of single experts are read"),
        ),
        ("plugins/__init__.py", "load_general_plugins"): (("func()", "the plug-in is not called"),),
    },
    passing=(("plugins/__init__.py", "load_general_plugins"),),
)  # fmt: skip
