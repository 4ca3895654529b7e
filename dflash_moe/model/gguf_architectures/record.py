"""The record that describes one GGUF architecture, and what its functions are given: the metadata
and tensors of a file.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_moe.errors import CheckpointError, UnsupportedError
from dflash_moe.model.gguf_architectures.conversions import gate_above_up

if TYPE_CHECKING:
    from dflash_moe.model.checkpoint import Checkpoint

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
# The numbers of routers in the metadata that llama.cpp writes.
GATINGS = {1: "softmax", 2: "sigmoid"}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The metadata of an architecture's file below its name, and its tensors."""

    checkpoint: Checkpoint
    architecture: str

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of `key` below the architecture's name, or `default`."""
        return _decimal(self.checkpoint.config().get(f"{self.architecture}.{key}", default))

    def value(self, key: str) -> Any:
        """Returns the value of `key`. Raises KeyError naming it where the file lacks it."""
        return _decimal(self.checkpoint.config()[f"{self.architecture}.{key}"])

    def has(self, ending: str) -> bool:
        """Says whether the name of a tensor ends so."""
        return any(name.endswith(ending) for name in self.checkpoint.tensors)

    @staticmethod
    def layer_of(name: str) -> int:
        """Returns the number of the layer of a tensor, -1 where it is in none."""
        parts = name.split(".", 2)
        return int(parts[1]) if parts[0] == "blk" and len(parts) == 3 and parts[1].isdecimal() else -1

    def layers_with(self, leaf: str) -> list[int]:
        """Returns the numbers of the layers that have a tensor blk.N.`leaf`, in ascending order."""
        names = (name.split(".", 2) for name in self.checkpoint.tensors if name.startswith("blk."))
        return sorted(int(parts[1]) for parts in names if parts[2] == leaf and parts[1].isdigit())

    def expert_width(self, kind: str = "exps") -> int:
        """Returns the intermediate width of routed (`exps`) or shared (`shexp`) experts from their
        tensors, because the metadata of older files does not say it.
        """
        for name, info in self.checkpoint.tensors.items():
            if name.endswith(f".ffn_down_{kind}.weight") and len(info.shape) >= 2:
                return info.shape[-1]
        raise CheckpointError(
            f"{self.checkpoint.path}: has no tensor blk.N.ffn_down_{kind}.weight; it has no experts, was converted before "
            "llama.cpp kept those of a layer in one tensor, or is damaged"
        )

    def num_layers(self) -> int:
        """Returns the number of the model's own layers. Those behind them predict further tokens,
        and are no part of the model.
        """
        return int(self.value("block_count")) - int(self.get("nextn_predict_layers", 0))

    def check_gating(self, wanted: str, default: str) -> None:
        """Raises UnsupportedError where the router is not `wanted`; files that do not say it have
        `default`.
        """
        number = self.get("expert_gating_func")
        found = default if number is None else GATINGS.get(number, str(number))
        if found != wanted:
            raise self.refusal("expert_gating_func", found, f"transformers' class of it has {wanted}")

    def refusal(self, key: str, found: Any, reason: str) -> UnsupportedError:
        """Returns the error that names a metadata value and the reason why it is not read."""
        return UnsupportedError(f"{self.checkpoint.path}: metadata {self.architecture}.{key}: found {found!r}; {reason}")


def routed_width(file: GgufFile) -> dict[str, Any]:
    """Returns the field of most configurations that have one width of routed experts."""
    return {"moe_intermediate_size": file.expert_width()}


def one_width(file: GgufFile) -> dict[str, Any]:
    """Returns the field of configurations whose experts have the width of an MLP."""
    return {"intermediate_size": file.expert_width()}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """What metadata cannot say of an architecture.

    `model_type` is that of transformers, and `settings` are fields that llama.cpp has in its code.
    `keys` are metadata keys that become fields of the configuration, and `defaults` those that a
    file may lack. `fields` computes the others, and may replace `model_type`. `names` are words of
    llama.cpp and the modules of transformers in whose place they stand (`names.py`), and
    `converters` make, for a configuration, the transforms of tensors that are laid out otherwise;
    those of them that are not experts, and that a processor keeps dequantised, have their words in
    `remade`.
    """

    model_type: str
    names: tuple[tuple[str, str], ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    fields: Callable[[GgufFile], dict[str, Any]] = routed_width
    converters: Callable[[Any], list[Any]] = gate_above_up
    remade: frozenset[str] = frozenset()


def _decimal(value: Any) -> Any:
    """Returns the shortest decimal of a float32. That is what the configuration said from which the
    file was made, but for numbers with more digits than float32 has.
    """
    return float(str(np.float32(value))) if type(value) is float else value
