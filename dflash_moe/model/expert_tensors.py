"""Finds where the matrices and biases of one expert lie in a checkpoint, as
`_core.ResidentShard.load_expert` takes them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from dflash_moe.errors import CheckpointError, UnsupportedError
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.ffn import FfnSpec, TensorPattern
from dflash_moe.model.formats.scaled_experts import scaled_source
from dflash_moe.model.formats.stored_tensor import TensorInfo
from dflash_moe.model.formats.weight_formats import FLOATS, FORMATS, FP8_BLOCK, STORED_NAMES, common_format

_ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


@dataclass(frozen=True, slots=True)
class _Place:
    """The part of one expert in a tensor that exists and has the expected shape."""

    # Errors begin with this: the file and the tensor.
    where: str
    info: TensorInfo
    # The expert's first element lies at this byte of the file.
    offset: int
    format_name: str
    # A tensor that packs all experts has this one at this index; others have index 0.
    expert: int


def expert_sources(checkpoint: Checkpoint, ffn: FfnSpec, expert_id: int) -> dict[str, Any]:
    """Returns the arguments of `_core.ResidentShard.load_expert`, which point into the mapped
    files.

    Raises CheckpointError naming the tensor, the found and the expected shape, or that the
    checkpoint is a stub, and UnsupportedError naming a format that no kernel reads.
    """
    checkpoint.refuse_stub()
    inner = (ffn.intermediate_size, ffn.in_size)
    outer = (ffn.out_size, ffn.intermediate_size)
    return {
        "gate": _scaled_matrix(checkpoint, ffn.gate_tensor, ffn.gate_scale_tensor, expert_id, *inner),
        "up": _scaled_matrix(checkpoint, ffn.up_tensor, ffn.up_scale_tensor, expert_id, *inner),
        "down": _scaled_matrix(checkpoint, ffn.down_tensor, ffn.down_scale_tensor, expert_id, *outer),
        "gate_bias": _vector(checkpoint, ffn.gate_bias_tensor, expert_id, ffn.intermediate_size),
        "up_bias": _vector(checkpoint, ffn.up_bias_tensor, expert_id, ffn.intermediate_size),
        "down_bias": _vector(checkpoint, ffn.down_bias_tensor, expert_id, ffn.out_size),
    }


def check_expert(checkpoint: Checkpoint, ffn: FfnSpec, expert_id: int) -> tuple[str, str]:
    """Makes the checks of `expert_sources` without mapping anything. Returns the format that holds
    gate and up exactly, and the one that holds down.
    """
    inner, outer = (ffn.intermediate_size, ffn.in_size), (ffn.out_size, ffn.intermediate_size)

    def found(pattern: TensorPattern | None, outputs: int, inputs: int) -> list[str]:
        return [] if pattern is None else [_locate_matrix(checkpoint, pattern, expert_id, outputs, inputs).format_name]

    first = common_format([*found(ffn.gate_tensor, *inner), *found(ffn.up_tensor, *inner)])
    for pattern, outputs in (
        (ffn.gate_bias_tensor, ffn.intermediate_size),
        (ffn.up_bias_tensor, ffn.intermediate_size),
        (ffn.down_bias_tensor, ffn.out_size),
    ):
        if pattern is not None:
            _locate_vector(checkpoint, pattern, expert_id, outputs)
    for matrix, scale in (
        (ffn.gate_tensor, ffn.gate_scale_tensor),
        (ffn.up_tensor, ffn.up_scale_tensor),
        (ffn.down_tensor, ffn.down_scale_tensor),
    ):
        if matrix is not None and scale is not None:
            _locate_scale(checkpoint, matrix, scale, expert_id)
    return first, found(ffn.down_tensor, *outer)[0]


def stored_format(checkpoint: Checkpoint, pattern: TensorPattern, expert_id: int = 0) -> str:
    """Returns the format of the tensor that holds the values of this expert. Errors are those of
    `expert_sources`.
    """
    return _format_of(checkpoint, *_find(checkpoint, pattern, expert_id))


def _find(checkpoint: Checkpoint, pattern: TensorPattern, expert_id: int) -> tuple[str, TensorInfo]:
    name = pattern.tensor_name(expert_id)
    info = checkpoint.tensors.get(name)
    if info is None:
        raise CheckpointError(f"checkpoint {checkpoint.path}: tensor {name!r} is missing (expert {expert_id})")
    return name, info


def _format_of(checkpoint: Checkpoint, name: str, info: TensorInfo) -> str:
    found = STORED_NAMES.get(info.dtype)
    if found is None:
        where = f"{checkpoint.files[info.file]}: tensor {name!r}"
        hint = " without scales per square of 128, output or tensor" if info.dtype == "F8_E4M3" else ""
        raise UnsupportedError(f"{where} has format {info.dtype}{hint}; supported: {', '.join(STORED_NAMES)}")
    return found


def _locate(checkpoint: Checkpoint, pattern: TensorPattern, expert_id: int, shape: tuple[int, ...]) -> _Place:
    """Finds the part of an expert in its tensor, which must have `shape`, its dimension of experts
    apart.
    """
    name, info = _find(checkpoint, pattern, expert_id)
    format_name = _format_of(checkpoint, name, info)
    where = f"{checkpoint.files[info.file]}: tensor {name!r}"
    if (info.shape[1:] if pattern.is_packed else info.shape) != shape or len(info.shape) != len(shape) + pattern.is_packed:
        expected = [*(["experts"] if pattern.is_packed else []), *shape]
        raise CheckpointError(
            f"{where} has shape {list(info.shape)}, expected {expected}; "
            "the checkpoint is not of the model that the host describes"
        )
    if not pattern.is_packed:
        return _Place(where, info, info.offset, format_name, 0)
    if not 0 <= expert_id < info.shape[0]:
        raise CheckpointError(f"{where} has {info.shape[0]} experts, asked for {expert_id}")
    return _Place(where, info, info.offset + info.num_bytes // info.shape[0] * expert_id, format_name, expert_id)


def _locate_matrix(checkpoint: Checkpoint, pattern: TensorPattern, expert_id: int, outputs: int, inputs: int) -> _Place:
    stored = _selection(pattern.part, outputs)[0]
    place = _locate(checkpoint, pattern, expert_id, (inputs, stored) if pattern.is_transposed else (stored, inputs))
    if place.info.packed is not None and (pattern.is_packed or pattern.is_transposed or pattern.part != "all"):
        raise UnsupportedError(
            f"{place.where}: packed integers with part {pattern.part!r} of several experts or matrices in one tensor; "
            "they are read as one tensor for each matrix of an expert"
        )
    if place.format_name not in FLOATS and pattern.is_transposed:
        raise UnsupportedError(
            f"{place.where} has format {place.info.dtype} with the outputs last; blocks must run along the inputs"
        )
    block = FORMATS[place.format_name].block
    if inputs % block:
        raise UnsupportedError(f"{place.where} has rows of {inputs} values, which {place.info.dtype} cannot cut into {block}")
    if place.info.packed is not None:
        checkpoint.check_packed(pattern.tensor_name(expert_id))
    return place


def _locate_vector(checkpoint: Checkpoint, pattern: TensorPattern, expert_id: int, outputs: int) -> _Place:
    place = _locate(checkpoint, pattern, expert_id, (_selection(pattern.part, outputs)[0],))
    if place.format_name not in FLOATS:
        raise UnsupportedError(f"{place.where} has format {place.info.dtype}; biases are read in {', '.join(FLOATS)}")
    return place


def _locate_scale(checkpoint: Checkpoint, matrix: TensorPattern, scale: TensorPattern, expert_id: int) -> _Place:
    """Finds the factor of an expert's matrix, which must be stored in f32, as the factor is."""
    found = stored_format(checkpoint, matrix, expert_id)
    if found != "f32" or matrix.is_transposed or matrix.part in ("even", "odd"):
        what = "with the outputs last" if matrix.is_transposed else f"of part {matrix.part} stored in {found}"
        raise UnsupportedError(
            f"tensor {matrix.tensor_name(expert_id)!r}: a scale per expert on weights {what}; "
            "it is applied to f32 weights with their rows one after another"
        )
    place = _locate(checkpoint, scale, expert_id, ())
    if place.format_name != "f32":
        raise UnsupportedError(f"{place.where} has format {place.info.dtype}; scales per expert are read in f32")
    return place


def _selection(part: str, outputs: int) -> tuple[int, int, int]:
    """Returns how many outputs the tensor has, the first one of the part, and the step between two
    of the part.
    """
    if part == "all":
        return outputs, 0, 1
    first, step = {"first_half": (0, 1), "second_half": (outputs, 1), "even": (0, 2), "odd": (1, 2)}[part]
    return 2 * outputs, first, step


def matrix_source(checkpoint: Checkpoint, name: str, outputs: int, inputs: int) -> tuple[Any, ...]:
    """Returns the matrix of that name as the core takes it, pointing into the mapped file. Errors
    are those of `expert_sources`.
    """
    source: tuple[Any, ...] = _matrix(checkpoint, TensorPattern(name), 0, outputs, inputs)
    return source


def slice_source(checkpoint: Checkpoint, name: str, index: int, outputs: int, inputs: int) -> tuple[Any, ...]:
    """Returns matrix `index` of the tensor of that name [matrices, outputs, inputs], as
    `matrix_source` returns a matrix.
    """
    source: tuple[Any, ...] = _matrix(checkpoint, TensorPattern(name, True), index, outputs, inputs)
    return source


def _matrix(checkpoint: Checkpoint, pattern: TensorPattern | None, expert_id: int, outputs: int, inputs: int) -> Any:
    """Returns a matrix as `_core` takes it. Floats have strides in elements, and blocks the step
    from row to row in bytes.
    """
    if pattern is None:
        return None
    place = _locate_matrix(checkpoint, pattern, expert_id, outputs, inputs)
    stored, first, step = _selection(pattern.part, outputs)
    file = checkpoint.mapped_file(place.info.file)
    if place.format_name in FLOATS:
        output_stride, input_stride = (1, stored) if pattern.is_transposed else (inputs, 1)
        offset = place.offset + first * output_stride * _ITEM_BYTES[place.format_name]
        return file, offset, place.format_name, outputs, inputs, output_stride * step, input_stride
    if place.info.packed is not None:
        return _packed_source(checkpoint, place, outputs, inputs)
    shape = FORMATS[place.format_name]
    row_bytes = inputs // shape.block * shape.block_bytes
    source = (file, place.offset + first * row_bytes, place.format_name, outputs, inputs, row_bytes * step, 0)
    if place.info.scales is None:
        return source
    if place.info.dtype == "FP8":
        return (*source, *_fp8_scales(checkpoint, place, first, step, inputs))
    return (*source, *_scales(checkpoint, place, first, step))


def _scaled_matrix(
    checkpoint: Checkpoint,
    pattern: TensorPattern | None,
    scale: TensorPattern | None,
    expert_id: int,
    outputs: int,
    inputs: int,
) -> Any:
    """Returns what `_matrix` does, of the matrix times the expert's factor where there is one."""
    source = _matrix(checkpoint, pattern, expert_id, outputs, inputs)
    if pattern is None or scale is None:
        return source
    place = _locate_scale(checkpoint, pattern, scale, expert_id)
    factor = checkpoint.mapped_file(place.info.file).read(place.offset, 4)
    return scaled_source(source, struct.unpack("<f", factor)[0])


def _scales(checkpoint: Checkpoint, place: _Place, first: int, step: int) -> tuple[Any, int, int]:
    """Returns the file, the offset of the first scale, and the bytes from one row of scales to the
    next.
    """
    scales = place.info.scales
    assert scales is not None
    row_bytes = scales.shape[-1] * _ITEM_BYTES.get(STORED_NAMES.get(scales.dtype, ""), 1)
    row, row_step = first, step
    if place.format_name == "fp8_e4m3_b128":
        if first % FP8_BLOCK or step != 1:
            raise UnsupportedError(
                f"{place.where}: the part that begins at output {first} with step {step} shares its FP8 scales with another; "
                f"parts must begin at a multiple of {FP8_BLOCK}"
            )
        row = first // FP8_BLOCK
    offset = scales.offset + (place.expert * scales.shape[-2] + row) * row_bytes
    return checkpoint.mapped_file(scales.file), offset, row_bytes * row_step


def _fp8_scales(checkpoint: Checkpoint, place: _Place, first: int, step: int, inputs: int) -> tuple[Any, ...]:
    """Returns what `_scales` does and the layout, of scales whose rows are squares, outputs or
    one.
    """
    scales = place.info.scales
    assert scales is not None
    dtype = STORED_NAMES[scales.dtype]
    rows, columns = scales.shape[-2:]
    row_bytes, outputs = columns * _ITEM_BYTES[dtype], place.info.shape[-2]
    offset = scales.offset + place.expert * rows * row_bytes
    file = checkpoint.mapped_file(scales.file)
    if rows == outputs and columns == 1:
        return file, offset + first * row_bytes, row_bytes * step, ("fp8_scales", dtype, 1, inputs, None, 0)
    if rows == 1 and columns == 1:
        return file, offset, row_bytes, ("fp8_scales", dtype, outputs, inputs, None, 0)
    _, offset, stride = _scales(checkpoint, place, first, step)
    return file, offset, stride, ("fp8_scales", dtype, FP8_BLOCK, FP8_BLOCK, None, 0)


def _packed_source(checkpoint: Checkpoint, place: _Place, outputs: int, inputs: int) -> tuple[Any, ...]:
    """Returns the matrix of packed integers, whose rows of words have steps in bytes."""
    packed, scales = place.info.packed, place.info.scales
    assert packed is not None
    assert scales is not None
    stride = {"awq": outputs // 2, "gptq": outputs * 4}.get(packed.packing, inputs // 2)
    dtype, zeros = STORED_NAMES[scales.dtype], None
    if packed.zeros is not None:
        zeros = (checkpoint.mapped_file(packed.zeros.file), packed.zeros.offset, packed.zeros.shape[1] * 4)
    return (
        checkpoint.mapped_file(place.info.file), place.offset, place.format_name, outputs, inputs, stride, 0,
        checkpoint.mapped_file(scales.file), scales.offset, scales.shape[1] * _ITEM_BYTES[dtype],
        (packed.packing, dtype, 1, packed.group, zeros, packed.zero_bias),
    )  # fmt: skip


def _vector(checkpoint: Checkpoint, pattern: TensorPattern | None, expert_id: int, outputs: int) -> Any:
    if pattern is None:
        return None
    place = _locate_vector(checkpoint, pattern, expert_id, outputs)
    _, first, step = _selection(pattern.part, outputs)
    offset = place.offset + first * _ITEM_BYTES[place.format_name]
    return checkpoint.mapped_file(place.info.file), offset, place.format_name, outputs, step
