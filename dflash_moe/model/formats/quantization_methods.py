"""Reads what a config.json says of its quantised weights, and refuses by its key what is not read.

Which tensors are quantised, their shapes tell; the configuration is asked only what they do not
tell: how many bits a code has, and what GPTQ's zero points mean.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_moe.errors import UnsupportedError, shown
from dflash_moe.model.formats.weight_formats import FP8_BLOCK

# Inputs that share a scale and a zero point; -1 stands for one of each per output.
GROUP_SIZES = (32, 64, 128, -1)
# The zero points of GPTQ's first version are stored less one.
_GPTQ_VERSIONS = {"gptq": 1, "gptq_v2": 0}
_COMPRESSED_FORMATS = ("pack-quantized", "float-quantized", "naive-quantized")


def quantization_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the `quantization_config` of a config.json, or of its text model; empty where there
    is none.
    """
    for owner in (config, config.get("text_config")):
        found = owner.get("quantization_config") if isinstance(owner, Mapping) else None
        if isinstance(found, Mapping):
            return found
    return {}


def method_of(fields: Mapping[str, Any]) -> str:
    """Returns `quant_method` as text, whether it is one or an enumerator of transformers."""
    return str(getattr(fields.get("quant_method"), "value", fields.get("quant_method")))


def check_quantization(fields: Mapping[str, Any], owner: str) -> None:
    """Raises UnsupportedError naming `owner`, key and value where weights of this method are not
    read.
    """
    method, where = method_of(fields), f"{owner}.quantization_config"
    if method == "mxfp4":
        return
    if method == "fp8":
        _check_fp8(fields, where)
    elif method == "awq":
        _expect(f"{where}.version", fields.get("version", "gemm"), ("gemm", "GEMM"))
        _check_integers(fields, where)
    elif method == "gptq":
        _expect(f"{where}.checkpoint_format", fields.get("checkpoint_format", "gptq"), tuple(_GPTQ_VERSIONS))
        _check_integers(fields, where)
    elif method == "compressed-tensors":
        _check_compressed(fields, where)
    else:
        raise UnsupportedError(
            f"{where}: method {method[:80]} is not supported; "
            "use the checkpoint in bf16, f16, f32, FP8, MXFP4, AWQ, GPTQ, compressed-tensors or GGUF"
        )


def gptq_zero_bias(fields: Mapping[str, Any]) -> int:
    """Returns what is added to the stored zero points of a GPTQ checkpoint."""
    return _GPTQ_VERSIONS.get(str(fields.get("checkpoint_format", "gptq")), 1)


def _expect(key: str, found: object, allowed: tuple[object, ...]) -> None:
    if found not in allowed or isinstance(found, bool):
        raise UnsupportedError(f"{key}: found {shown(found)}; read are {', '.join(str(value) for value in allowed)}")


def _check_fp8(fields: Mapping[str, Any], where: str) -> None:
    block = fields.get("weight_block_size")
    if block is not None and (not isinstance(block, list | tuple) or list(block) != [FP8_BLOCK, FP8_BLOCK]):
        raise UnsupportedError(
            f"{where}.weight_block_size: found {shown(block)}; FP8 is read with one scale per {FP8_BLOCK} x {FP8_BLOCK} "
            "weights, per output or per tensor"
        )


def _check_integers(fields: Mapping[str, Any], where: str) -> None:
    _expect(f"{where}.bits", fields.get("bits", 4), (4,))
    _expect(f"{where}.group_size", fields.get("group_size", 128), GROUP_SIZES)


def _check_compressed(fields: Mapping[str, Any], where: str) -> None:
    """Checks each group of layers. A group may have a format of its own."""
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UnsupportedError(f"{where}.config_groups: found {shown(groups)}, expected a map of schemes")
    for name, group in groups.items():
        at = f"{where}.config_groups.{str(name)[:80]}"
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise UnsupportedError(f"{at}.weights: found {shown(weights)}, expected a map")
        own = group.get("format")
        form = own if own is not None else fields.get("format")
        _expect(f"{at}.format" if own is not None else f"{where}.format", form, _COMPRESSED_FORMATS)
        if form != "pack-quantized":
            _expect(f"{at}.weights.num_bits", weights.get("num_bits"), (8,))
            _expect(f"{at}.weights.type", weights.get("type"), ("float",))
            continue
        _expect(f"{at}.weights.num_bits", weights.get("num_bits"), (4,))
        _expect(f"{at}.weights.type", weights.get("type", "int"), ("int",))
        _expect(f"{at}.weights.strategy", weights.get("strategy"), ("group", "channel"))
        if weights.get("strategy") == "group":
            _expect(f"{at}.weights.group_size", weights.get("group_size"), GROUP_SIZES)
