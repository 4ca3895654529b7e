"""What dflash_moe/integrations/sglang uses of SGLang.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from tests.contracts.contract import Contract

_LAYER = "srt/layers/moe/fused_moe_triton/layer.py"
_BASE = "srt/layers/quantization/base_config.py"
_FIELDS = "srt/arg_groups/fields"

SGLANG = Contract(
    "sglang",
    functions={
        ("srt/plugins/hook_registry.py", "HookRegistry.register"): ("target", "hook", "hook_type"),
        (_BASE, "FusedMoEMethodBase.create_weights"): ("self", "layer"),
        (_BASE, "FusedMoEMethodBase.create_moe_runner"): ("self", "layer", "moe_runner_config"),
        (_BASE, "FusedMoEMethodBase.apply"): ("self", "layer", "dispatch_output"),
        ("srt/layers/moe/topk.py", "TopKOutputChecker.format_is_bypassed"): ("topk_output",),
    },
    options={
        (_LAYER, "FusedMoE.__init__"): (
            "num_experts", "hidden_size", "layer_id", "num_fused_shared_experts", "prefix",
            "apply_router_weight_on_input", "routed_scaling_factor", "quant_method",
        ),
    },
    fields={
        (f"{_FIELDS}/model.py", "Model"): ("model_path", "load_format"),
        (f"{_FIELDS}/parallel.py", "Parallel"): ("pp_size", "dp_size"),
        (f"{_FIELDS}/exec_.py", "ExecGraph"): ("cuda_graph_backend_decode", "cuda_graph_backend_prefill", "disable_cuda_graph"),
        (f"{_FIELDS}/exec_.py", "ExecMoe"): ("moe_a2a_backend", "enable_eplb"),
        (f"{_FIELDS}/device.py", "Device"): ("device",),
        (f"{_FIELDS}/lora.py", "Lora"): ("enable_lora",),
        ("srt/layers/moe/token_dispatcher/standard.py", "StandardCombineInput"): ("hidden_states",),
        ("srt/layers/moe/token_dispatcher/standard.py", "StandardDispatchOutput"): ("hidden_states", "topk_output"),
        ("srt/layers/moe/topk.py", "StandardTopKOutput"): ("topk_weights", "topk_ids"),
    },
    statements={
        ("srt/plugins/hook_registry.py", "_wrap_fn"): (
            ("hook(original_fn, *args, **kwargs)", "a hook that stands around a function is not given it"),
        ),
        (_LAYER, "FusedMoE.__init__"): (
            ("self.quant_method = quant_method", "a method that is given is not taken"),
            ("self.moe_tp_rank", "ranks are counted otherwise"),
        ),
        (_LAYER, "FusedMoE.run_moe_core"): (("self.quant_method.apply(", "layers do not compute by their method"),),
        (_LAYER, "FusedMoE.forward_impl"): (
            ("tensor_model_parallel_all_reduce(final_hidden_states)", "the result of rank 0 may not be added up"),
        ),
        (_BASE, "FusedMoEMethodBase.get_moe_runner_backend"): (
            ("if self.runner is not None else None", "a layer without a runner is taken for something else"),
        ),
    },
)  # fmt: skip
