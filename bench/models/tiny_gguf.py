"""Makes a GGUF file of nothing but experts, laid out and named as llama.cpp writes Qwen3-MoE, and
its spec. It needs the gguf package.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.models.weight_blocks import random_blocks
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.ffn import FfnSpec, TensorPattern
from dflash_moe.model.spec import LayerSpec, ModelSpec
from dflash_moe.testing.tiny import layer_name


def tiny_gguf(
    path: Path,
    weight_format: str,
    *,
    hidden_size: int,
    moe_intermediate_size: int,
    num_experts: int,
    top_k: int,
    num_layers: int,
    dtype: str = "bf16",
) -> ModelSpec:
    """Writes `path` with random blocks of `weight_format`, which is gguf's name in lower case, and
    returns the spec. The experts of a layer are all alike, and `dtype` is that of the model around
    them.
    """
    import gguf

    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    writer.add_expert_used_count(top_k)
    kind = gguf.GGMLQuantizationType[weight_format.upper()]
    shapes = {
        "gate": (moe_intermediate_size, hidden_size), "up": (moe_intermediate_size, hidden_size),
        "down": (hidden_size, moe_intermediate_size),
    }  # fmt: skip
    for layer in range(num_layers):
        for name, (outputs, inputs) in shapes.items():
            one = random_blocks(weight_format, outputs, inputs, seed=layer)
            writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.weight", np.stack([one] * num_experts), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = Checkpoint.open(path)
    layers = []
    for layer in range(num_layers):
        ffn = FfnSpec(
            in_size=hidden_size, intermediate_size=moe_intermediate_size, out_size=hidden_size,
            gate_tensor=TensorPattern(f"blk.{layer}.ffn_gate_exps.weight", True),
            up_tensor=TensorPattern(f"blk.{layer}.ffn_up_exps.weight", True),
            down_tensor=TensorPattern(f"blk.{layer}.ffn_down_exps.weight", True),
        )  # fmt: skip
        layers.append(
            LayerSpec(
                index=layer,
                name=layer_name(layer),
                num_experts=num_experts,
                top_k=top_k,
                ffn=ffn,
                weight_dtype=weight_format,
                expert_bytes=ffn.stored_bytes(weight_format),
            )
        )
    return ModelSpec(tuple(layers), dtype, checkpoint.fingerprint(), "tiny_gguf", str(path))
