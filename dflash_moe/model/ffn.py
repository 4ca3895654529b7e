"""The formula of an expert, and where its matrices lie in the checkpoint. The host derives it, and
workers get it as data of a closed schema.

The formula is that of csrc/compute/experts/ffn_spec.h. Nothing from the wire is used before
`FfnSpec.from_wire` has checked it.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_moe.errors import ProtocolError
from dflash_moe.model.formats.weight_formats import FLOATS, FORMATS, WeightFormat, split_formats

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared", "identity", "sigmoid", "quick_gelu")
GATES = ("none", "gated", "clamped_swiglu")
PARTS = ("all", "first_half", "second_half", "even", "odd")
EXPERT_FIELD = "{expert}"

# The core refuses wider ones with the same bound (csrc/compute/experts/ffn_spec.cc).
MAX_WIDTH = 1 << 18
# No tensor name in use is as long. The bound limits what a peer can make a worker keep.
MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class TensorPattern:
    """Names the tensor that holds a matrix or bias of every expert, and the part of it.

    A packed tensor has the experts as its first dimension; otherwise `name` contains `{expert}`.
    Then follow [outputs, inputs], or [inputs, outputs] where `is_transposed`; a bias has [outputs]
    only. `part` selects along the outputs: a half, or every other one.
    """

    name: str
    is_packed: bool = False
    is_transposed: bool = False
    part: str = "all"

    def tensor_name(self, expert_id: int) -> str:
        """Returns the name of the tensor that holds the values of this expert."""
        return self.name if self.is_packed else self.name.replace(EXPERT_FIELD, str(expert_id))

    def to_wire(self) -> list[Any]:
        """Returns [name, is_packed, is_transposed, part]."""
        return [self.name, self.is_packed, self.is_transposed, self.part]

    @classmethod
    def from_wire(cls, field: str, value: Any) -> TensorPattern:
        """Rebuilds what `to_wire` wrote. Raises ProtocolError naming `field` when `value` is
        anything else.
        """
        if type(value) not in (list, tuple) or len(value) != 4:
            raise _refused(field, value, "[name, is_packed, is_transposed, part]")
        name, is_packed, is_transposed, part = value
        if type(is_packed) is not bool or type(is_transposed) is not bool:
            raise _refused(field, value, "booleans at places 2 and 3")
        if type(part) is not str or part not in PARTS:
            raise _refused(f"{field}.part", part, f"one of {', '.join(PARTS)}")
        pattern = cls(name, is_packed, is_transposed, part)
        pattern.check_name(field)
        return pattern

    def check_name(self, field: str) -> None:
        """Raises ProtocolError unless the name is bounded printable text that has `{expert}`
        exactly where it must.
        """
        name = self.name
        if type(name) is not str or not 1 <= len(name) <= MAX_NAME or not name.isascii() or not name.isprintable():
            raise _refused(f"{field}.name", name, f"1..{MAX_NAME} printable ASCII characters")
        rest = name.replace(EXPERT_FIELD, "", 1)
        if "{" in rest or "}" in rest:
            raise _refused(f"{field}.name", name, f"no braces but one {EXPERT_FIELD}")
        if self.is_packed == (EXPERT_FIELD in name):
            wanted = f"no {EXPERT_FIELD} in a packed tensor's name" if self.is_packed else f"{EXPERT_FIELD} in the name"
            raise _refused(f"{field}.name", name, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnSpec:
    """What one expert computes, and the tensors with which it computes. Widths are in elements, and
    the formulas are in csrc/compute/experts/ffn_spec.h.
    """

    in_size: int
    intermediate_size: int
    out_size: int
    activation: str = "silu"
    gate: str = "gated"
    alpha: float = 1.0
    up_offset: float = 0.0
    gate_max: float = math.inf
    up_limit: float = math.inf
    up_tensor: TensorPattern
    down_tensor: TensorPattern
    gate_tensor: TensorPattern | None = None
    gate_bias_tensor: TensorPattern | None = None
    up_bias_tensor: TensorPattern | None = None
    down_bias_tensor: TensorPattern | None = None
    # Each names a tensor [experts] in f32 whose value multiplies an expert's matrix while it loads,
    # which then must be stored in f32. Kernels do not know of it.
    gate_scale_tensor: TensorPattern | None = None
    up_scale_tensor: TensorPattern | None = None
    down_scale_tensor: TensorPattern | None = None

    @property
    def has_gate_up_bias(self) -> bool:
        """Whether biases are added to gate and up."""
        return self.up_bias_tensor is not None

    @property
    def has_down_bias(self) -> bool:
        """Whether a bias is added after down."""
        return self.down_bias_tensor is not None

    @property
    def num_matrices(self) -> int:
        """The number of matrices of one expert: 3 with a gate, else 2."""
        return 2 if self.gate == "none" else 3

    def num_values(self) -> int:
        """Returns the number of weights and biases of one expert."""
        num_inner = self.num_matrices - 1
        values = num_inner * self.in_size * self.intermediate_size + self.intermediate_size * self.out_size
        if self.has_gate_up_bias:
            values += num_inner * self.intermediate_size
        return values + (self.out_size if self.has_down_bias else 0)

    def stored_bytes(self, weight_dtype: str) -> int:
        """Returns the bytes of one expert in a checkpoint in `weight_dtype`, which is one format,
        or that of gate and up and that of down joined by `+`.
        """
        return self._num_bytes(weight_dtype, WeightFormat.stored_bytes)

    def resident_bytes(self, weight_dtype: str) -> int:
        """Returns the bytes of one expert in the memory of a worker that keeps `weight_dtype`."""
        return self._num_bytes(weight_dtype, WeightFormat.resident_bytes)

    def _num_bytes(self, weight_dtype: str, size_of: Callable[[WeightFormat, int, int], int]) -> int:
        first, down = split_formats(weight_dtype)
        matrices = (self.num_matrices - 1) * size_of(FORMATS[first], self.intermediate_size, self.in_size)
        matrices += size_of(FORMATS[down], self.out_size, self.intermediate_size)
        num_matrix_values = ((self.num_matrices - 1) * self.in_size + self.out_size) * self.intermediate_size
        bias_bytes = FORMATS[first].block_bytes if first in FLOATS else 4
        return matrices + (self.num_values() - num_matrix_values) * bias_bytes

    def kernel_spec(self) -> dict[str, Any]:
        """Returns the formula alone, as `_core.ShardStore.borrow` and `_core.FfnOracle` take it."""
        return {
            "in_size": self.in_size,
            "intermediate_size": self.intermediate_size,
            "out_size": self.out_size,
            "activation": self.activation,
            "gate": self.gate,
            "has_gate_up_bias": self.has_gate_up_bias,
            "has_down_bias": self.has_down_bias,
            "alpha": self.alpha,
            "up_offset": self.up_offset,
            "gate_max": self.gate_max,
            "up_limit": self.up_limit,
        }

    def to_wire(self) -> dict[str, Any]:
        """Returns a map of scalars, texts and lists for patterns. Absent tensors are left out."""
        wire: dict[str, Any] = {key: getattr(self, key) for key in (*_SIZES, *_NUMBERS, "activation", "gate")}
        for key in TENSOR_KEYS:
            pattern: TensorPattern | None = getattr(self, key)
            if pattern is not None:
                wire[key] = pattern.to_wire()
        return wire

    @classmethod
    def from_wire(cls, wire: Any) -> FfnSpec:
        """Rebuilds what `to_wire` wrote. Raises ProtocolError naming the first field that is
        unknown, missing or out of bounds.
        """
        if type(wire) is not dict:
            raise _refused("ffn", wire, "a map")
        for key in wire:
            if key not in _KEYS:
                raise _refused("ffn", key, f"only the keys {', '.join(_KEYS)}")
        for key in (*_SIZES, *_NUMBERS, "activation", "gate", "up_tensor", "down_tensor"):
            if key not in wire:
                raise _refused(key, "nothing", "a value")
        for key in _SIZES:
            if type(wire[key]) is not int or not 1 <= wire[key] <= MAX_WIDTH:
                raise _refused(key, wire[key], f"an integer in 1..{MAX_WIDTH}")
        _check_choice("activation", wire["activation"], ACTIVATIONS)
        _check_choice("gate", wire["gate"], GATES)
        values = dict(wire)
        for key in _NUMBERS:
            values[key] = _checked_number(key, wire[key])
        for key in TENSOR_KEYS:
            if key in wire:
                values[key] = TensorPattern.from_wire(key, wire[key])
        spec = cls(**values)
        spec._check_presence(values)
        return spec

    def _check_presence(self, values: Mapping[str, Any]) -> None:
        has_gate = self.gate != "none"
        if has_gate != ("gate_tensor" in values):
            raise _refused("gate_tensor", values.get("gate_tensor"), f"a pattern exactly with a gate, here {self.gate!r}")
        if ("gate_bias_tensor" in values) != (has_gate and self.has_gate_up_bias):
            raise _refused("gate_bias_tensor", values.get("gate_bias_tensor"), "a pattern exactly where gate and up have one")
        if not has_gate and "gate_scale_tensor" in values:
            raise _refused("gate_scale_tensor", values["gate_scale_tensor"], "a pattern only where there is a gate")
        for key in _SCALES:
            if key in values and not values[key].is_packed:
                raise _refused(key, values[key], "the pattern of one tensor for all experts")
        if not has_gate and not (math.isinf(self.gate_max) and math.isinf(self.up_limit)):
            raise _refused("gate", self.gate, "a gate where there are limits")


_SIZES = ("in_size", "intermediate_size", "out_size")
_NUMBERS = ("alpha", "up_offset", "gate_max", "up_limit")
_SCALES = ("gate_scale_tensor", "up_scale_tensor", "down_scale_tensor")
TENSOR_KEYS = (
    "up_tensor", "down_tensor", "gate_tensor", "gate_bias_tensor", "up_bias_tensor", "down_bias_tensor", *_SCALES,
)  # fmt: skip
_KEYS = (*_SIZES, *_NUMBERS, "activation", "gate", *TENSOR_KEYS)


def _refused(field: str, found: Any, allowed: str) -> ProtocolError:
    return ProtocolError(f"FfnSpec: field {field}: found {str(found)[:80]!r}, allowed is {allowed}")


def _check_choice(field: str, value: Any, allowed: tuple[str, ...]) -> None:
    if type(value) is not str or value not in allowed:
        raise _refused(field, value, f"one of {', '.join(allowed)}")


def _checked_number(field: str, value: Any) -> float:
    if type(value) not in (int, float) or math.isnan(value):
        raise _refused(field, value, "a number")
    if field in ("alpha", "up_offset") and not math.isfinite(value):
        raise _refused(field, value, "a finite number")
    if field == "up_limit" and value < 0:
        raise _refused(field, value, "0 or more")
    if field == "gate_max" and value == -math.inf:
        raise _refused(field, value, "more than minus infinity")
    return float(value)
