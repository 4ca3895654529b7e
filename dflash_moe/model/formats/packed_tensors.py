"""Joins the tensors of one matrix of four-bit integers into one: AWQ and GPTQ (`X.qweight`,
`X.qzeros`, `X.scales`, `X.g_idx`) and the `pack-quantized` of compressed-tensors
(`X.weight_packed`, `X.weight_scale`, `X.weight_zero_point`, `X.weight_shape`) become `X.weight`
[outputs, inputs].

A word of 32 bits has eight codes. With N outputs, K inputs and g inputs to a scale:

    AWQ            qweight [K, N / 8]         qzeros [K / g, N / 8]      scales [K / g, N]
    GPTQ           qweight [K / 8, N]         qzeros [K / g, N / 8]      scales [K / g, N]
    compressed-t.  weight_packed [N, K / 8]   zero_point [N / 8, K / g]  weight_scale [N, K / g]

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dflash_moe.errors import CheckpointError, UnsupportedError
from dflash_moe.model.formats.quantization_methods import GROUP_SIZES, check_quantization, gptq_zero_bias, quantization_fields
from dflash_moe.model.formats.stored_tensor import PackedInfo, ScaleInfo, TensorInfo

if TYPE_CHECKING:
    import numpy as np

WORDS, COMPRESSED_WORDS = ".qweight", ".weight_packed"
_CODES = 8
_SCALE_DTYPES = ("F16", "BF16")


def join_packed(stored: Mapping[str, TensorInfo], config: Callable[[], Mapping[str, Any]]) -> dict[str, TensorInfo]:
    """Returns the tensors with packed integers joined; others stay as they are. `config` reads
    config.json, and is called where there are such integers.

    Raises CheckpointError naming a tensor that contradicts another, and UnsupportedError naming a
    key of config.json, or a tensor of a kind that is not read.
    """
    joined = dict(stored)
    names = [name for name in stored if name.endswith((WORDS, COMPRESSED_WORDS))]
    if not names:
        return joined
    fields = quantization_fields(config())
    check_quantization(fields, "config.json")
    for name in names:
        base = name.removesuffix(COMPRESSED_WORDS) if name.endswith(COMPRESSED_WORDS) else name.removesuffix(WORDS)
        if f"{base}.weight" in stored:
            raise CheckpointError(f"tensor '{base}.weight' is there twice: as such, and as packed {name!r}")
        made, used = _compressed(stored, base) if name.endswith(COMPRESSED_WORDS) else _rows_of_inputs(stored, base, fields)
        for one in used:
            joined.pop(one, None)
        joined[f"{base}.weight"] = made
    return joined


def _compressed(stored: Mapping[str, TensorInfo], base: str) -> tuple[TensorInfo, list[str]]:
    parts = {part: f"{base}.weight_{part}" for part in ("packed", "scale", "zero_point", "shape", "g_idx")}
    words, scales = _words(stored, parts["packed"]), _scales(stored, parts["scale"], parts["packed"])
    outputs, inputs = words.shape[0], words.shape[1] * _CODES
    if scales.shape[0] != outputs:
        raise _differs(parts["scale"], scales.shape, (outputs, "groups"), parts["packed"], words.shape)
    group = _group(parts["scale"], inputs, scales.shape[1])
    zeros = _optional(stored, parts["zero_point"], "I32", (-(-outputs // _CODES), scales.shape[1]))
    packed = PackedInfo(
        "pack_quantized", group, zeros, 0, _optional(stored, parts["shape"], _shape_dtype(stored, parts["shape"]), (2,)),
        _optional(stored, parts["g_idx"], "I32", (inputs,)),
    )  # fmt: skip
    return _joined(words, (outputs, inputs), scales, packed), list(parts.values())


def _rows_of_inputs(stored: Mapping[str, TensorInfo], base: str, fields: Mapping[str, Any]) -> tuple[TensorInfo, list[str]]:
    """AWQ and GPTQ. Which of them it is, the shapes tell: scales have a column for each output."""
    parts = [f"{base}{part}" for part in (WORDS, ".scales", ".qzeros", ".g_idx")]
    words, scales = _words(stored, parts[0]), _scales(stored, parts[1], parts[0])
    outputs = scales.shape[1]
    is_awq = words.shape[1] * _CODES == outputs
    if not is_awq and words.shape[1] != outputs:
        raise _differs(parts[0], words.shape, ("rows", f"{outputs} or {outputs / _CODES:g}"), parts[1], scales.shape)
    if outputs % _CODES:
        raise UnsupportedError(f"tensor {parts[1]!r} has {outputs} outputs; they are packed by {_CODES}")
    inputs = words.shape[0] * (1 if is_awq else _CODES)
    group = _group(parts[1], inputs, scales.shape[0])
    zeros = _optional(stored, parts[2], "I32", (scales.shape[0], outputs // _CODES))
    g_idx = _optional(stored, parts[3], "I32", (inputs,))
    packed = PackedInfo(
        "awq" if is_awq else "gptq", group, zeros, 0 if is_awq or zeros is None else gptq_zero_bias(fields), None, g_idx
    )
    return _joined(words, (outputs, inputs), scales, packed), parts


def check_packed(name: str, info: TensorInfo, read: Callable[[ScaleInfo], np.ndarray[Any, Any]]) -> None:
    """Holds the contents of `weight_shape` and `g_idx` against the shapes. `read` returns the bytes
    of a tensor. Raises CheckpointError and UnsupportedError naming the tensor.
    """
    packed = info.packed
    if packed is None:
        return
    import numpy as np

    base = name.removesuffix(".weight")
    if packed.shape is not None:
        told = tuple(read(packed.shape).view(np.int32 if packed.shape.dtype == "I32" else np.int64).tolist())
        if told != info.shape:
            raise CheckpointError(
                f"tensor '{base}.weight_shape' says {list(told)}, but the packed weights are {list(info.shape)}"
            )
    if packed.g_idx is None:
        return
    groups = read(packed.g_idx).view(np.int32)
    if not np.array_equal(groups, np.arange(info.shape[1], dtype=np.int32) // packed.group):
        own = f"{base}.weight_g_idx" if packed.packing == "pack_quantized" else f"{base}.g_idx"
        raise UnsupportedError(
            f"tensor {own!r}: its groups do not ascend by {packed.group} inputs (desc_act or actorder); "
            "quantise without reordering, or with the order applied to the weights"
        )


def _words(stored: Mapping[str, TensorInfo], name: str) -> TensorInfo:
    info = stored[name]
    if info.dtype != "I32" or len(info.shape) != 2:
        raise UnsupportedError(
            f"tensor {name!r} is {info.dtype} {list(info.shape)}; packed integers are read as I32 in two dimensions"
        )
    return info


def _scales(stored: Mapping[str, TensorInfo], name: str, words: str) -> TensorInfo:
    info = stored.get(name)
    if info is None:
        raise CheckpointError(f"tensor {words!r} lacks its scales {name!r}")
    if info.dtype not in _SCALE_DTYPES or len(info.shape) != 2:
        raise UnsupportedError(
            f"tensor {name!r} is {info.dtype} {list(info.shape)}; scales of integers are read in "
            f"{' and '.join(_SCALE_DTYPES)} with two dimensions"
        )
    return info


def _optional(stored: Mapping[str, TensorInfo], name: str, dtype: str, shape: tuple[int, ...]) -> ScaleInfo | None:
    info = stored.get(name)
    if info is None:
        return None
    if info.dtype != dtype or info.shape != shape:
        raise CheckpointError(f"tensor {name!r} is {info.dtype} {list(info.shape)}, expected {dtype} {list(shape)}")
    return _apart(info)


def _shape_dtype(stored: Mapping[str, TensorInfo], name: str) -> str:
    """`weight_shape` is written in I64, and declared as I32."""
    return "I32" if name in stored and stored[name].dtype == "I32" else "I64"


def _group(name: str, inputs: int, groups: int) -> int:
    """Returns how many inputs share a scale."""
    group = inputs // groups if groups and inputs % groups == 0 else 0
    if group == 0 or (group not in GROUP_SIZES and groups != 1):
        read = ", ".join(str(size) for size in GROUP_SIZES if size > 0)
        raise UnsupportedError(
            f"tensor {name!r} has {groups} groups for {inputs} inputs; read are groups of {read} or one per output"
        )
    return group


def _differs(
    name: str, found: tuple[int, ...], expected: tuple[object, ...], other: str, shape: tuple[int, ...]
) -> CheckpointError:
    wanted = ", ".join(map(str, expected))
    return CheckpointError(f"tensor {name!r} has shape {list(found)}, expected [{wanted}] beside {other!r} of {list(shape)}")


def _apart(info: TensorInfo) -> ScaleInfo:
    return ScaleInfo(info.file, info.offset, info.dtype, info.shape, info.num_bytes)


def _joined(words: TensorInfo, shape: tuple[int, int], scales: TensorInfo, packed: PackedInfo) -> TensorInfo:
    return TensorInfo(words.file, words.offset, "INT4", shape, words.num_bytes, _apart(scales), packed)
