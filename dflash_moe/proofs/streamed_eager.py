"""The eager model of transformers with one layer at a time in memory: each layer is loaded when it
is called and dropped when it returns, and the model's own code computes everything.

A layer is an entry of a list of modules. What lies in no such list, embedding and head above all,
stays as long as the model does.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn

from dflash_moe.integrations.host_weights import TORCH_DTYPES, load_weights, load_whole
from dflash_moe.integrations.parameter_values import ParameterValues
from dflash_moe.model.architecture import load_architecture
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.telemetry.memory import trim_heap

log = logging.getLogger(__name__)

_Found = TypeVar("_Found")

# Tensors of a checkpoint that match this attribute of a model are not reported as unexpected.
_IGNORED_KEYS = "_keys_to_ignore_on_load_unexpected"
# An experts module has at least the second of these.
_MATRICES = ("gate_up_proj", "down_proj")


class StreamedEager:
    """A model in eval mode with its own eager experts. `run` is how it is called.

    `whole` says why all of it is in memory; it is empty where it is streamed. `live` are the names
    of the layers in memory at the moment, and `most_live` is the largest number of them so far.
    """

    def __init__(self, path: str | Path, dtype: str) -> None:
        """Opens the model in `dtype` (f32, f16 or bf16) and loads what belongs to no layer. Errors
        are those of `load_architecture` and `load_weights`.
        """
        self._checkpoint = Checkpoint.open(path)
        self._dtype_name, self._dtype = dtype, TORCH_DTYPES[dtype]
        self.live: set[str] = set()
        self.most_live = 0
        self.whole = ""
        architecture = load_architecture(self._checkpoint)
        self._model_class = architecture.model_class
        self._values = ParameterValues(architecture.model, self._checkpoint, self._dtype)
        self._layers = find_layers(architecture.model, self._values)
        if not self._layers:
            self._load_whole("it has no list of layers whose weights can be loaded one by one")
            return
        streamed = {name for names in self._layers.values() for name in names}
        held = [name for name in architecture.experts if streamed.isdisjoint(f"{name}.{own}" for own in _MATRICES)]
        if held:
            log.warning("%s: the experts of %d layers stay in memory, %s first", self._model_class.__name__, len(held), held[0])
        self.model = self._load_rest(streamed)

    def run(self, compute: Callable[[Any], _Found]) -> _Found:
        """Returns what `compute` returns of the model. Where the model reads weights of a layer
        that it has not called, all of it is loaded and `compute` is called once more.
        """
        try:
            return compute(self.model)
        except (NotImplementedError, RuntimeError) as error:
            # Weights that are not there lie on the device of this name.
            if self.whole or "meta" not in str(error):
                raise
            self._load_whole(f"it reads weights of a layer that it does not call: {str(error).splitlines()[0]}")
        return compute(self.model)

    def close(self) -> None:
        """Frees the model."""
        self.model = None
        # Its hooks know it, and it knows them.
        gc.collect()
        trim_heap()

    def _load_whole(self, reason: str) -> None:
        log.warning("%s: loaded whole: %s", self._model_class.__name__, reason)
        self.whole, self.live = reason, set()
        self.model = None
        self.model = load_whole(self._checkpoint.path, self._dtype_name)

    def _load_rest(self, names: Collection[str]) -> Any:
        """Loads everything but these parameters of layers, and has these come and go with calls."""
        model, _ = load_weights(
            _without(self._model_class, names, tuple(self._layers)), self._checkpoint, has_experts=True, dtype=self._dtype,
            without=names, experts_implementation="eager",
        )  # fmt: skip
        model.__class__ = self._model_class
        dtypes = model._get_dtype_plan(self._dtype)
        for layer, own in self._layers.items():
            self._follow_calls(model, layer, {name: _as_loaded(name, model.get_parameter(name), dtypes) for name in own})
        return model.eval()

    def _follow_calls(self, model: Any, layer: str, empty: Mapping[str, Any]) -> None:
        """Loads the parameters of a layer before it is called, and puts back those in `empty`
        afterwards, also after an error.
        """
        module = model.get_submodule(layer)
        _put(model, empty)

        def bring(*_: Any) -> None:
            self.live.add(layer)
            self.most_live = max(self.most_live, len(self.live))
            filled = {name: torch.empty_like(value, device="cpu") for name, value in empty.items()}
            self._values.fill(filled)
            _put(model, {name: nn.Parameter(value, requires_grad=False) for name, value in filled.items()})

        def drop(*_: Any) -> None:
            _put(model, empty)
            self.live.discard(layer)

        module.register_forward_pre_hook(bring)
        module.register_forward_hook(drop, always_call=True)


def find_layers(model: Any, values: ParameterValues) -> dict[str, list[str]]:
    """Returns for each entry of the outermost lists of modules in `model` the names of the
    parameters that can be loaded with it alone. Entries without such parameters are left out.

    Parameters that are tied stay, and so do those that the checkpoint lacks.
    """
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {*ties, *ties.values()}
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    found = {}
    for layer in (f"{name}.{entry}" for name in outermost for entry in model.get_submodule(name)._modules):
        own = [name for name, _ in model.get_submodule(layer).named_parameters(prefix=layer)]
        if names := [name for name in own if values.has(name) and name not in tied]:
            found[layer] = names
    return found


def _as_loaded(name: str, parameter: Any, dtypes: Mapping[str, Any]) -> Any:
    """Returns a parameter on the meta device in the dtype that the loader gives it: its own, unless
    its class names another for names like this.
    """
    dtype = next((other for pattern, other in dtypes.items() if re.search(pattern.replace("*", ".*"), name)), parameter.dtype)
    return nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=False)


def _put(model: Any, parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = value


def _without(model_class: Any, names: Collection[str], layers: tuple[str, ...]) -> Any:
    """Makes a subclass whose instances are without these parameters while the loader reads weights,
    so that it never reads theirs. Afterwards they are on the meta device.
    """

    class WithoutLayers(model_class):  # type: ignore[misc]
        # transformers searches the source file of a class for the interface's decorator, and this
        # class has none.
        _can_set_experts_implementation_cached_value = True
        _left_out: Mapping[str, Any] = MappingProxyType({})

        def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(config, *arguments, **options)
            self._left_out = {name: self.get_parameter(name) for name in names}
            _put(self, dict.fromkeys(names))
            ignored = {re.escape(f"{layer}.".removeprefix(f"{self.base_model_prefix}.")) for layer in layers}
            setattr(self, _IGNORED_KEYS, ignored.union(getattr(self, _IGNORED_KEYS) or ()))

        def initialize_weights(self) -> None:
            """Initialises what the checkpoint lacks. Families initialise parameters also by way of
            the module above, which must find them.
            """
            for value in self._left_out.values():
                value._is_hf_initialized = True
            _put(self, self._left_out)
            super().initialize_weights()

    for attribute in ("__name__", "__qualname__", "__module__"):
        setattr(WithoutLayers, attribute, getattr(model_class, attribute))
    return WithoutLayers
