"""The formats in which weights are stored and kept: their names, blocks and bytes, and the names
that checkpoint files have for them.

The formats and their facts are those of the table in csrc/compute/formats/weight_format.cc. Blocks
run along a row of inputs.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dflash_moe import _core


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The facts of one format. `block` values take `block_bytes`, and scales that lie apart add
    `scale_bytes` for each `scale_outputs` x `scale_inputs`.

    In a worker's memory `record` inputs of an output take `record_bytes`
    (csrc/compute/cpu/panels/panel_layout.h).
    """

    name: str
    block: int
    block_bytes: int
    record: int
    record_bytes: int
    # Whether kernels of processors read panels of the format, and whether cards have kernels for
    # it (1 or 0). What has no panels can be computed with from the mapped checkpoint only.
    has_panels: int
    is_on_cards: int
    scale_outputs: int = 0
    scale_inputs: int = 0
    scale_bytes: int = 0

    def resident_bytes(self, outputs: int, inputs: int) -> int:
        """Returns the bytes of a matrix in a worker's memory, but for the padding of its last
        panel.
        """
        return outputs * -(-inputs // self.record) * self.record_bytes

    def stored_bytes(self, outputs: int, inputs: int) -> int:
        """Returns the bytes of a matrix in a checkpoint, scales included."""
        values = outputs * -(-inputs // self.block) * self.block_bytes
        if not self.scale_bytes:
            return values
        return values + -(-outputs // self.scale_outputs) * -(-inputs // self.scale_inputs) * self.scale_bytes


FORMATS = {
    name: WeightFormat(name, **{field: value for field, value in facts.items() if field != "is_stored"})
    for name, facts in _core.weight_formats().items()
}
FLOATS = ("f32", "f16", "bf16")

# The squares of values that share a scale have sides of this many values.
FP8_BLOCK = FORMATS["fp8_e4m3_b128"].scale_inputs
MXFP4_BLOCK = FORMATS["mxfp4"].scale_inputs

# Checkpoint files have these names for the formats. FP8 and MXFP4 of safetensors are known by their
# scales (`scaled_tensors.py`).
STORED_NAMES = {
    "F32": "f32", "F16": "f16", "BF16": "bf16", "FP8_B128": "fp8_e4m3_b128", "MXFP4": "mxfp4", "Q8_0": "q8_0", "Q4_0": "q4_0",
    "Q4_K": "q4_k", "Q5_K": "q5_k", "Q6_K": "q6_k", "GGUF_MXFP4": "gguf_mxfp4", "IQ4_NL": "iq4_nl", "IQ4_XS": "iq4_xs",
    "Q4_1": "q4_1", "Q5_0": "q5_0", "Q5_1": "q5_1", "Q3_K": "q3_k", "Q2_K": "q2_k",
    "IQ3_XXS": "iq3_xxs", "IQ3_S": "iq3_s", "IQ2_XXS": "iq2_xxs", "IQ2_XS": "iq2_xs", "IQ2_S": "iq2_s",
    "IQ1_S": "iq1_s", "IQ1_M": "iq1_m", "TQ1_0": "tq1_0", "TQ2_0": "tq2_0", "NVFP4": "nvfp4",
    "INT4": "int4_zp", "FP8": "fp8_e4m3_b128",
}  # fmt: skip

# The words of `workers[].weights`, and the format that a worker keeps in place of the stored one.
# Only floats are requantised.
RESIDENT_CHOICES = {"auto": "", "int8": "int8_g32", "int4": "int4_g32"}


def common_format(formats: Iterable[str]) -> str:
    """Returns the format that holds the values of all these exactly: their own where they agree,
    else f32.
    """
    found = set(formats)
    return found.pop() if len(found) == 1 else "f32"


def join_formats(first: str, down: str) -> str:
    """Returns the format of gate and up and that of down as one text: one name where they agree,
    else `first+down`.
    """
    return first if first == down else f"{first}+{down}"


def split_formats(weight_dtype: str) -> tuple[str, str]:
    """Returns the two formats that `join_formats` joined."""
    first, _, down = weight_dtype.partition("+")
    return first, down or first


def mapped_only(weight_dtype: str) -> tuple[str, ...]:
    """Returns those formats of a text of `join_formats` that cannot be packed."""
    return tuple(name for name in dict.fromkeys(split_formats(weight_dtype)) if not FORMATS[name].has_panels)


def not_on_cards(weight_dtype: str) -> tuple[str, ...]:
    """Returns those formats of a text of `join_formats` for which cards have no kernels."""
    return tuple(name for name in dict.fromkeys(split_formats(weight_dtype)) if not FORMATS[name].is_on_cards)


def is_requantised(weight_dtype: str) -> bool:
    """Says whether a worker that keeps this format has other numbers than the checkpoint."""
    return not set(split_formats(weight_dtype)).isdisjoint(name for name in RESIDENT_CHOICES.values() if name)


def resident_formats(stored: str, weights: str) -> str:
    """Returns what a worker whose `weights` are auto, int8 or int4 keeps of an expert that is
    stored as `stored`. Both are texts of `join_formats`.
    """
    wanted = RESIDENT_CHOICES[weights]
    return join_formats(*(wanted if wanted and name in FLOATS else name for name in split_formats(stored)))
