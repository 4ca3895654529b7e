"""Makes the parameters of a model from its checkpoint a few at a time, as the loader of
transformers makes all of them at once: its own conversions run, on the tensors of these alone.

Experts are converted one by one, so that never more than a few of them are in float32.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dflash_moe.integrations.host_weights import convert_sources, shaped
from dflash_moe.model.architecture import find_experts
from dflash_moe.model.dense_tensors import is_plain
from dflash_moe.model.formats.weight_formats import FLOATS, STORED_NAMES
from dflash_moe.model.tensor_names import Conversion
from dflash_moe.telemetry.machine import usable_cores

if TYPE_CHECKING:
    from dflash_moe.model.checkpoint import Checkpoint

# Experts that are being converted take at most so many bytes, or there is one at a time.
# Dequantising a value takes so many bytes for a moment.
CONVERTING_BYTES = 256 << 20
_BYTES_A_VALUE = 16
# A disk that gives nothing for so long is gone.
STANDSTILL_S = 600.0


class ParameterValues:
    """What a checkpoint has for the parameters of `model`, which is on the meta device. The loader
    would load it in torch dtype `dtype`.
    """

    def __init__(self, model: Any, checkpoint: Checkpoint, dtype: Any) -> None:
        """Errors are those of `Conversion.of`."""
        self._model, self._checkpoint = model, checkpoint
        self._is_plain = is_plain(checkpoint)
        # Floats are rounded by the loader itself, once and to the dtype that each parameter has.
        self._dtype = torch.float32 if self._is_plain else dtype
        self._recipes = Conversion.of(model, checkpoint).recipes
        self._experts = find_experts(model)
        # The loader lists a recipe that makes several parameters under the first of them.
        self._target = {name: target for target in self._recipes for name in self._made_by(target)}
        # Experts that no conversion makes one by one are converted together, those of one module.
        self._together: dict[str, dict[str, Any]] = {}

    def has(self, name: str) -> bool:
        """Says whether the checkpoint has what parameter or buffer `name` is made of, in formats
        that are read here.
        """
        if name not in self._target:
            return False
        sources = self._recipes[self._target[name]].names()
        return not self._is_plain or all(
            STORED_NAMES.get(self._checkpoint.tensors[source].dtype) in FLOATS for source in sources
        )

    def fill(self, parameters: Mapping[str, Any]) -> None:
        """Writes the values of these parameters, which `has` has. They are rounded to the dtype of
        the model where the loader rounds them, and to the tensor's own. Errors are those of
        `dequantised_state`.
        """
        left = dict(parameters)
        for module in self._experts:
            own = {name.rpartition(".")[2]: left.pop(name) for name in [*left] if name.rpartition(".")[0] == module}
            count = next(iter(own.values())).shape[0] if own else 0
            for expert, made in self.experts(module, range(count), tuple(own)):
                for name, value in made.items():
                    own[name][expert].copy_(value[0].to(self._dtype))
        for target in {self._target[name]: None for name in left}:
            made = convert_sources(target, self._recipes[target], self._model, self._checkpoint, self._dtype)
            for name in self._made_by(target):
                if name in left:
                    left[name].copy_(shaped(made[name], left[name].shape))

    def experts(self, module: str, experts: Sequence[int], parameters: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields each of these experts with the named parameters of experts module `module` for it
        alone, float32 [1, ...] and as exact as they are stored. A few are converted ahead.
        """
        if not experts or not parameters:
            return
        threads = self._threads(module, parameters)
        ahead: deque[tuple[int, Future[dict[str, Any]]]] = deque()
        with ThreadPoolExecutor(threads, thread_name_prefix="convert") as pool:
            for expert in experts:
                ahead.append((expert, pool.submit(self._expert, module, expert, parameters)))
                if len(ahead) > threads:
                    first, made = ahead.popleft()
                    yield first, made.result(timeout=STANDSTILL_S)
            while ahead:
                first, made = ahead.popleft()
                yield first, made.result(timeout=STANDSTILL_S)

    def _threads(self, module: str, parameters: Sequence[str]) -> int:
        """Returns how many experts are converted at a time; those that cannot be are one."""
        if any(self._one(f"{module}.{name}", 0) is None for name in parameters):
            return 1
        largest: int = max(self._experts[module]._parameters[name].shape[1:].numel() for name in parameters)
        return max(1, min(usable_cores(), CONVERTING_BYTES // (_BYTES_A_VALUE * largest)))

    def _expert(self, module: str, expert: int, parameters: Sequence[str]) -> dict[str, Any]:
        found = {}
        for leaf in parameters:
            name = f"{module}.{leaf}"
            target = self._target[name]
            if (one := self._one(name, expert)) is None:
                found[leaf] = self._of_all(module, name)[expert : expert + 1]
                continue
            recipe, checkpoint = one
            found[leaf] = convert_sources(target, recipe, _OneExpert(self._model), checkpoint, torch.float32)[name]
        return found

    def _one(self, name: str, expert: int) -> tuple[Any, Checkpoint] | None:
        """Returns the recipe of an experts parameter with the tensors of one expert alone, or the
        expert's entries of packed ones. None where the tensors are neither.
        """
        target = self._target[name]
        recipe, shape = self._recipes[target], self._model.get_parameter(name).shape
        if self._made_by(target) != [name]:
            return None
        sources, tensors = {}, {}
        for pattern, names in recipe.sources.items():
            infos = [self._checkpoint.tensors[source] for source in names]
            if len(names) == 1 and len(infos[0].shape) == len(shape) and infos[0].shape[0] == shape[0]:
                sources[pattern], tensors[names[0]] = names, infos[0].entries(expert, 1)
            elif len(names) == shape[0] and all(len(info.shape) == len(shape) - 1 for info in infos):
                sources[pattern], tensors[names[expert]] = [names[expert]], infos[expert]
            else:
                return None
        return replace(recipe, sources=sources), self._checkpoint.of_tensors(tensors)

    def _of_all(self, module: str, name: str) -> Any:
        """Returns a parameter of all experts in float32, and forgets those of other modules."""
        self._together = {module: self._together.get(module, {})}
        if name not in self._together[module]:
            target = self._target[name]
            made = convert_sources(target, self._recipes[target], self._model, self._checkpoint, torch.float32)
            self._together[module] |= {key: made[key] for key in self._made_by(target)}
        return self._together[module][name]

    def _made_by(self, target: str) -> list[str]:
        """Returns the parameters that the recipe listed under `target` makes."""
        converter = self._recipes[target].converter
        first, *rest = converter.target_patterns if converter is not None else [""]
        return [target, *(target.replace(first, another) for another in rest)]


class _OneExpert:
    """Stands in for the model where an operation asks for the shape of an experts parameter."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.config = model.config

    def get_parameter(self, name: str) -> Any:
        return torch.empty((1, *self._model.get_parameter(name).shape[1:]), device="meta")

    def get_submodule(self, name: str) -> Any:
        return self._model.get_submodule(name)
