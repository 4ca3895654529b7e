"""The transforms of tensors that llama.cpp lays out otherwise than transformers, as operations of
transformers' own loader.

Their inputs are lists of one tensor per pattern, and the outputs are the parameters by name.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

_GATE_AND_UP = (r"\.ffn_gate_exps\.", r"\.ffn_up_exps\.")


def gate_above_up(_config: Any, experts: str = "mlp.experts") -> list[Any]:
    """Returns the converter that puts gate above up, as most architectures have them."""
    from transformers.core_model_loading import Concatenate, WeightConverter

    patterns = [f"{pattern}weight" for pattern in _GATE_AND_UP]
    return [WeightConverter(patterns, f".{experts}.gate_up_proj", [Concatenate(dim=1)])]


def stacked(first: str, second: str, target: str) -> Any:
    """Returns the converter that puts the rows of one matrix above those of another."""
    from transformers.core_model_loading import Concatenate, WeightConverter

    return WeightConverter([rf"\.{first}\.weight", rf"\.{second}\.weight"], f".{target}.weight", [Concatenate(dim=0)])


def rotated_by_halves(config: Any) -> list[Any]:
    """Returns the converters of queries and keys that llama.cpp turns in pairs of neighbours.

    transformers turns output i of a head with output i + d / 2, and llama.cpp's converter of these
    architectures puts the two beside each other.
    """
    from transformers.core_model_loading import WeightConverter

    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    found = []
    for part, count in heads.items():
        for leaf in ("weight", "bias"):
            target = f".self_attn.{part}_proj.{leaf}"
            found.append(WeightConverter([rf"\.self_attn\.{part}_proj\.{leaf}"], target, [_operation(_halves, count)]))
    return found


def _halves(inputs: list[Any], num_heads: int) -> Any:
    (value,) = inputs
    return value.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(value.shape)


def joined_latents() -> list[Any]:
    """Returns the converter that makes the matrix which expands the latents of MLA of two.

    llama.cpp keeps keys as [heads, latents, keys], as absorbed attention multiplies with them, and
    values as [heads, values, latents].
    """
    from transformers.core_model_loading import WeightConverter

    patterns = [r"\.attn_k_b\.weight", r"\.attn_v_b\.weight"]
    return [WeightConverter(patterns, ".self_attn.kv_b_proj.weight", [_operation(_keys_above_values)])]


def _keys_above_values(inputs: list[Any]) -> Any:
    import torch

    keys, values = inputs
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


def in_turns(_config: Any) -> list[Any]:
    """Returns the converters of gpt-oss, in which gate and up take turns along the outputs, and
    weights have the inputs first.
    """
    from transformers.core_model_loading import WeightConverter

    weights, biases = ([f"{pattern}{leaf}" for pattern in _GATE_AND_UP] for leaf in ("weight", "bias"))
    return [
        WeightConverter(weights, ".mlp.experts.gate_up_proj", [_operation(_interleaved_inputs_first)]),
        WeightConverter(biases, ".mlp.experts.gate_up_proj_bias", [_operation(_interleaved)]),
        WeightConverter([r"\.ffn_down_exps\.weight"], ".mlp.experts.down_proj", [_operation(_inputs_first)]),
    ]


def _interleaved(inputs: list[Any]) -> Any:
    import torch

    return torch.stack(inputs, dim=2).flatten(1, 2)


def _inputs_first(inputs: list[Any]) -> Any:
    (value,) = inputs
    return value.transpose(1, 2).contiguous()


def _interleaved_inputs_first(inputs: list[Any]) -> Any:
    return _inputs_first([_interleaved(inputs)])


def _operation(compute: Any, *arguments: Any) -> Any:
    """Returns an operation of the loader that makes one parameter of its sources."""
    from transformers.core_model_loading import ConversionOps

    class Operation(ConversionOps):  # type: ignore[misc]
        def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **_more: Any) -> dict[str, Any]:
            found = (input_dict[pattern] for pattern in source_patterns)
            values = [value[0] if isinstance(value, list) else value for value in found]
            return {target_patterns[0]: compute(values, *arguments)}

    # The name is what refusals of other layouts quote.
    Operation.__name__ = compute.__name__.strip("_")
    return Operation()
