"""Finds where in the checkpoint each element of an experts parameter comes from, by tracing the
conversion of transformers itself.

The renamings and operations of the loader run on small tensors of coordinates instead of weights.
The result is matched against the patterns that a worker can follow. So every layout that the loader
can convert is either understood exactly or refused by name.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dflash_moe.errors import CheckpointError, UnsupportedError
from dflash_moe.model.ffn import EXPERT_FIELD, PARTS, TensorPattern
from dflash_moe.model.refusals import refusing
from dflash_moe.model.shrink import Shrink

if TYPE_CHECKING:
    from dflash_moe.model.checkpoint import Checkpoint

# A coordinate is tensor number * _TENSOR_STEP + element number, in int64.
_TENSOR_STEP = 1 << 40


@dataclass(slots=True)
class _Recipe:
    """How the loader makes one parameter: a converter, or None for a plain renaming, and its
    sources by pattern in the order of loading.
    """

    converter: Any
    sources: dict[str, list[str]] = field(default_factory=dict)

    def names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]


@dataclass(slots=True)
class Conversion:
    """The recipes of the loader for all parameters of a model on the meta device for which the
    checkpoint has tensors.
    """

    model: Any
    checkpoint: Checkpoint
    recipes: dict[str, _Recipe]

    @classmethod
    def of(cls, model: Any, checkpoint: Checkpoint) -> Conversion:
        """Runs the naming of the loader over all tensors of the checkpoint."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        mapping = _mapping(model, checkpoint)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        wanted = model.state_dict()
        prefix = model.base_model_prefix
        recipes: dict[str, _Recipe] = {}
        with refusing(f"checkpoint {checkpoint.path}: the names of its tensors cannot be mapped to the model's"):
            for name in sorted(checkpoint.tensors, key=dot_natural_key):
                target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
                if target not in wanted and name in wanted:
                    target, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=wanted)
                if target not in wanted:
                    continue
                recipe = recipes.setdefault(target, _Recipe(converter_of[pattern] if pattern is not None else None))
                recipe.sources.setdefault(pattern or name, []).append(name)
        return cls(model, checkpoint, recipes)

    def patterns(
        self, parameter: str, shape: tuple[int, ...], parts: Mapping[str, str], *, is_transposed: bool
    ) -> dict[str, TensorPattern]:
        """Returns for each label in `parts` the pattern that yields that part ("all", "first_half"
        ...) of the parameter's outputs.

        `shape` is the parameter's: [experts, outputs, inputs], [experts, inputs, outputs] where
        `is_transposed`, or [experts, outputs] for a bias. Raises CheckpointError when the
        checkpoint lacks the parameter, and UnsupportedError when no pattern fits.
        """
        ties = getattr(self.model, "all_tied_weights_keys", None) or {}
        if parameter not in self.recipes and ties.get(parameter) in self.recipes:
            # A tied tensor is stored once, under the name that it is tied to.
            parameter = ties[parameter]
        target, recipe = self._recipe_for(parameter)
        layout = _Layout.of(self.checkpoint, recipe, shape)
        with refusing(f"{parameter}: its tensors cannot be traced{_operations_text(recipe)}"):
            traced = self._trace(target, parameter, recipe, layout, is_transposed=is_transposed)
            if is_transposed and traced.ndim == 3:
                traced = traced.transpose(1, 2)
            matches = {label: layout.match(take_part(traced, part)) for label, part in parts.items()}
        found = {}
        for label, pattern in matches.items():
            if pattern is None:
                raise UnsupportedError(
                    f"{parameter}: no known layout describes how it is made of {layout.names[0]} and "
                    f"{len(layout.names) - 1} more tensors{_operations_text(recipe)}"
                )
            found[label] = pattern
        return found

    def _recipe_for(self, parameter: str) -> tuple[str, _Recipe]:
        """Returns the recipe that makes `parameter`, and the target under which it is listed. That
        is the first one where the recipe makes several.
        """
        recipe = self.recipes.get(parameter)
        if recipe is not None:
            return parameter, recipe
        for target, other in self.recipes.items():
            first, *rest = other.converter.target_patterns if other.converter is not None else [""]
            if any(target.replace(first, another) == parameter for another in rest):
                return target, other
        raise CheckpointError(
            f"checkpoint {self.checkpoint.path}: no tensor becomes {parameter}; the weights are not of the model that "
            "config.json describes"
        )

    def _trace(self, target: str, parameter: str, recipe: _Recipe, layout: _Layout, *, is_transposed: bool) -> Any:
        """Makes the parameter from coordinates instead of weights."""
        import torch

        sources = [
            torch.arange(math.prod(shape), dtype=torch.int64).reshape(shape) + number * _TENSOR_STEP
            for number, shape in enumerate(layout.toy_shapes)
        ]
        if recipe.converter is None:
            # MXFP4 is published with the outputs first, also for a parameter that has them last.
            is_swapped = is_transposed and self.checkpoint.tensors[layout.names[0]].dtype == "MXFP4"
            return sources[0].transpose(1, 2) if is_swapped else sources[0]
        converter = copy.deepcopy(recipe.converter)
        places = ((pattern, name) for pattern, names in recipe.sources.items() for name in names)
        for (pattern, name), source in zip(places, sources, strict=True):
            converter.add_tensor(target, name, pattern, lambda source=source: source)
        made = converter.convert(target, model=_ToyParameters(self.model, layout.shrink), config=self.model.config)
        value = made.get(parameter)
        if value is None:
            raise UnsupportedError(f"{parameter}: the conversion yields {', '.join(made)} instead{_operations_text(recipe)}")
        return value[0] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class _Layout:
    """The source tensors of one parameter: their names in the order of loading, and toy shapes."""

    names: tuple[str, ...]
    toy_shapes: tuple[tuple[int, ...], ...]
    is_packed: tuple[bool, ...]
    shrink: Shrink

    @classmethod
    def of(cls, checkpoint: Checkpoint, recipe: _Recipe, shape: tuple[int, ...]) -> _Layout:
        names = tuple(recipe.names())
        shapes = [checkpoint.tensors[name].shape for name in names]
        is_packed = tuple(len(found) == len(shape) for found in shapes)
        inner = [found[1:] if packed else found for found, packed in zip(shapes, is_packed, strict=True)]
        shrink = Shrink.for_widths([*shape[1:], *(width for found in set(inner) for width in found)])
        toy = tuple(
            (found[0], *shrink.shape(rest)) if packed else shrink.shape(rest)
            for found, rest, packed in zip(shapes, inner, is_packed, strict=True)
        )
        return cls(names, toy, is_packed, shrink)

    def match(self, traced: Any) -> TensorPattern | None:
        """Returns the pattern whose coordinates are those of `traced` [experts, outputs(, inputs)],
        element for element, or None.
        """
        numbers = traced.flatten(1)[:, 0].div(_TENSOR_STEP, rounding_mode="floor").tolist()
        name = self._name_pattern(numbers)
        if name is None:
            return None
        for is_transposed in (False, True) if traced.ndim == 3 else (False,):
            for part in PARTS:
                pattern = TensorPattern(name, EXPERT_FIELD not in name, is_transposed, part)
                if all(self._agrees(pattern, expert_id, number, traced) for expert_id, number in enumerate(numbers)):
                    return pattern
        return None

    def _agrees(self, pattern: TensorPattern, expert_id: int, number: int, traced: Any) -> bool:
        import torch

        shape = self.toy_shapes[number]
        source = torch.arange(math.prod(shape), dtype=torch.int64).reshape(shape) + number * _TENSOR_STEP
        if pattern.is_packed:
            if expert_id >= shape[0]:
                return False
            source = source[expert_id]
        if pattern.is_transposed:
            source = source.T
        if source.ndim != traced.ndim - 1 or (pattern.part != "all" and source.shape[0] % 2):
            return False
        return bool(torch.equal(take_part(source[None], pattern.part)[0], traced[expert_id]))

    def _name_pattern(self, numbers: Sequence[int]) -> str | None:
        """Returns the one name for all experts, or a template with their id, or None when there is
        neither.
        """
        names = [self.names[number] for number in numbers]
        if all(self.is_packed[number] for number in numbers):
            return names[0] if len(set(names)) == 1 else None
        first = names[0].split(".")
        for place in range(len(first) - 1, -1, -1):
            template = [*first[:place], EXPERT_FIELD, *first[place + 1 :]]
            name = ".".join(template)
            if all(name.replace(EXPERT_FIELD, str(expert_id)) == found for expert_id, found in enumerate(names)):
                return name
        return None


def _mapping(model: Any, checkpoint: Checkpoint) -> list[Any]:
    """Returns the transforms of the loader from the names of the checkpoint to those of the
    model.
    """
    if checkpoint.metadata is not None:
        from dflash_moe.model.gguf_architectures.reading import gguf_conversion

        return gguf_conversion(checkpoint, model.config)
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))


def take_part(values: Any, part: str) -> Any:
    """Returns the part of `values` [experts, outputs, ...] along the outputs. There is an even
    number of them unless the part is "all".
    """
    outputs = values.shape[1]
    if part == "all":
        return values
    return {
        "first_half": values[:, : outputs // 2],
        "second_half": values[:, outputs // 2 :],
        "even": values[:, ::2],
        "odd": values[:, 1::2],
    }[part]


class _ToyParameters:
    """Stands in for the model where an operation asks for the shape of a parameter."""

    def __init__(self, model: Any, shrink: Shrink) -> None:
        self._model = model
        self._shrink = shrink
        self.config = model.config

    def get_parameter(self, name: str) -> Any:
        import torch

        first, *rest = self._model.get_parameter(name).shape
        return torch.empty((first, *self._shrink.shape(rest)), device="meta")


def _operations_text(recipe: _Recipe) -> str:
    if recipe.converter is None:
        return ""
    return f" by {', '.join(type(operation).__name__ for operation in recipe.converter.operations)}"
