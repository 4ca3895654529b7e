"""Has a runtime compute the routed experts of a transformers model: `load_model` leaves them out of
this process, and `offload` swaps them for a while.

Both use the experts interface of transformers. Our function is registered there, and finds its
layer on the module that it is called for.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from dflash_moe.errors import CheckpointError, ConfigError, UnsupportedError
from dflash_moe.integrations.expert_route import Detours, ExpertRoute, call_experts
from dflash_moe.integrations.host_weights import TORCH_DTYPES, load_weights
from dflash_moe.model.architecture import find_experts, find_model_class, load_config
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.gguf_architectures.reading import left_out
from dflash_moe.protocol.devices import DeviceChoice

if TYPE_CHECKING:
    from dflash_moe.experts.expert_runtime import ExpertRuntime
    from dflash_moe.model.spec import LayerSpec
    from dflash_moe.topology import HostSpec

log = logging.getLogger(__name__)

# Our function has this name on the experts interface.
IMPLEMENTATION = "dflash_moe"

# The loader of transformers drops the tensors that match this attribute of a class before it reads
# them.
_IGNORED_KEYS = "_keys_to_ignore_on_load_unexpected"
# This attribute tells the loader for each tied parameter which one it is tied to.
_TIED_KEYS = "all_tied_weights_keys"
# This attribute of an experts module holds its route.
_ROUTE = "dflash_moe_route"


def experts_forward(module: Any, hidden_states: Any, topk_ids: Any, topk_weights: Any) -> Any:
    """Computes the experts of `module`; transformers calls it through the experts interface.
    Raises ConfigError for a module without a route, and the errors of `ExpertRuntime.experts`.
    """
    route = module.__dict__.get(_ROUTE)
    if route is None:
        raise ConfigError(
            f"{type(module).__name__} has no runtime: load its model with dflash_moe.load_model, or use dflash_moe.offload"
        )
    return call_experts(route, hidden_states, topk_ids, topk_weights)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def load_model(path: str | Path, runtime: ExpertRuntime, *, without: Collection[str] = frozenset(), **options: Any) -> Any:
    """Loads the model of `path` without its routed experts, which `runtime` computes. Both must
    have the same checkpoint, and the runtime must stay open as long as the model is called.

    The parameters named in `without`, weights of linear layers and embeddings, are not read either:
    they are None, and so are those that are tied to them; the caller puts something else in the
    place of these modules.

    `options` go to `from_pretrained`; the dtype is the runtime's unless given. Returns a model in
    eval mode on the host's device. Errors: CheckpointError (tensors missing), ConfigError (another
    checkpoint), UnsupportedError naming class and field.
    """
    checkpoint = Checkpoint.open(path)
    fingerprint = checkpoint.fingerprint()
    if fingerprint != runtime.spec.fingerprint:
        raise ConfigError(
            f"load_model: {path} is not the checkpoint the runtime serves ({runtime.spec.path}); their fingerprints are "
            f"{fingerprint[:12]} and {runtime.spec.fingerprint[:12]}"
        )
    model_class = find_model_class(load_config(checkpoint))
    if (note := left_out(checkpoint)) is not None:
        log.warning("%s", note)
    options.setdefault("dtype", TORCH_DTYPES[runtime.spec.dtype])
    model, missing_keys = load_weights(
        _without_experts(model_class, frozenset(without)),
        checkpoint,
        has_experts=False,
        without=without,
        experts_implementation=IMPLEMENTATION,
        **options,
    )
    missing = missing_keys + [name for name, value in _tensors(model) if value.is_meta]
    if missing:
        kind = model_class.__name__
        raise CheckpointError(f"checkpoint {checkpoint.path}: lacks {len(missing)} tensors of {kind}, first {missing[0]}")
    model.__class__ = model_class
    model = _moved(model, runtime)
    _connect(find_experts(model), runtime)
    return model


def _moved(model: Any, runtime: ExpertRuntime) -> Any:
    """Moves the model to the host's device. Raises UnsupportedError where this torch cannot use
    it.
    """
    device = runtime.tensor_device
    if device == "cpu":
        return model
    with _refusing_device(device):
        return model.to(device)


def check_torch_device(host: HostSpec) -> None:
    """Raises UnsupportedError where this torch cannot use the host's device."""
    choice = DeviceChoice.of_host(host)
    if choice.has_own_memory:
        with _refusing_device(f"cuda:{choice.device}"):
            torch.empty(1, device=f"cuda:{choice.device}")


@contextmanager
def _refusing_device(device: str) -> Iterator[None]:
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        raise UnsupportedError(f"load_model: torch {torch.__version__} cannot use host.device {device}: {error}") from None


@contextmanager
def offload(model: Any, runtime: ExpertRuntime) -> Iterator[Any]:
    """Opens a block in which `runtime` computes the routed experts of `model`. Afterwards all is as
    before, even after an error.

    The model keeps its own weights, and those of the runtime's checkpoint must be the same. Raises
    ConfigError when the layers of both do not fit together.
    """
    kind = type(model.config).__name__
    if kind != runtime.spec.config_name:
        raise ConfigError(f"the model is configured by {kind}, the runtime's by {runtime.spec.config_name}")
    experts = find_experts(model)
    before = {name: (module.config, module.__dict__.get(_ROUTE)) for name, module in experts.items()}
    try:
        _connect(experts, runtime)
        for module in experts.values():
            # Models may share a configuration, but only these modules are to change.
            module.config = copy.copy(module.config)
            module.config._experts_implementation_internal = IMPLEMENTATION
        yield model
    finally:
        for name, module in experts.items():
            module.config, route = before[name]
            if route is None:
                module.__dict__.pop(_ROUTE, None)
            else:
                module.__dict__[_ROUTE] = route


@contextmanager
def without_experts(model: Any) -> Iterator[None]:
    """Opens a block in which the routed experts of a connected model compute zeros, and nobody is
    called. It is for looking at the rest of the model.
    """
    with routes_replaced(model, lambda route: _Zeros()):
        yield


def route_of(module: Any) -> Any:
    """Returns the `ExpertRoute` of a connected experts module, or what stands in for it within
    `without_experts`.
    """
    return module.__dict__[_ROUTE]


@contextmanager
def experts_watched(model: Any, receive: Callable[[int, Any], None]) -> Iterator[None]:
    """Opens a block in which `receive` is called with the layer and the topk_ids of every call of
    the routed experts of a connected model, before the call.
    """
    with routes_replaced(model, lambda route: _Watched(route, receive)):
        yield


@contextmanager
def routes_replaced(model: Any, replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Opens a block in which each connected experts module has what `replacement` makes of its
    route: something with the method `ExpertRoute.call`.
    """
    routes = {module: module.__dict__[_ROUTE] for module in find_experts(model).values() if _ROUTE in module.__dict__}
    detours = [route.detours for route in routes.values() if isinstance(route, ExpertRoute)]
    for one in detours:
        one.open += 1
    try:
        for module, route in routes.items():
            module.__dict__[_ROUTE] = replacement(route)
        yield
    finally:
        for module, route in routes.items():
            module.__dict__[_ROUTE] = route
        for one in detours:
            one.open -= 1


class _Watched:
    """Stands in for an `ExpertRoute`, and calls it."""

    def __init__(self, route: ExpertRoute, receive: Callable[[int, Any], None]) -> None:
        self._route, self._receive = route, receive

    def call(self, hidden_states: Any, topk_ids: Any, topk_weights: Any) -> Any:
        """Does what the route does."""
        self._receive(self._route.layer, topk_ids)
        return self._route.call(hidden_states, topk_ids, topk_weights)


class _Zeros:
    """Stands in for an `ExpertRoute`."""

    def call(self, hidden_states: Any, topk_ids: Any, topk_weights: Any) -> Any:
        """Returns zeros like `hidden_states`."""
        return torch.zeros_like(hidden_states)


def expert_calls(model: Any) -> dict[str, int]:
    """Returns the number of calls made so far by the name of each experts module that is connected
    to a runtime.
    """
    routes = {name: module.__dict__[_ROUTE] for name, module in find_experts(model).items() if _ROUTE in module.__dict__}
    return {name: route.count.value for name, route in routes.items()}


def _connect(experts: Mapping[str, Any], runtime: ExpertRuntime) -> None:
    layers = {layer.name: layer for layer in runtime.spec.layers}
    if layers.keys() != experts.keys():
        odd = sorted(layers.keys() ^ experts.keys())
        raise ConfigError(
            f"the model has {len(experts)} layers with routed experts, the runtime {len(layers)}; only one of them has {odd[0]}"
        )
    detours = Detours()
    for name, module in experts.items():
        layer = layers[name]
        down = module._parameters.get("down_proj")
        if down is not None and (down.shape[0], *sorted(down.shape[1:])) != _down_shape(layer):
            theirs, ours = list(down.shape), list(_down_shape(layer))
            raise ConfigError(f"{name}: the model's down_proj has shape {theirs}, the runtime's layer is of {ours}")
        module.__dict__[_ROUTE] = ExpertRoute(runtime, layer, detours)


def _down_shape(layer: LayerSpec) -> tuple[int, ...]:
    return (layer.num_experts, *sorted((layer.ffn.out_size, layer.ffn.intermediate_size)))


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _without_experts(model_class: Any, without: frozenset[str] = frozenset()) -> Any:
    """Makes a subclass whose instances lose the parameters of their experts, and those named in
    `without`, when they are built, so that the loader never reads those.
    """

    class WithoutExperts(model_class):  # type: ignore[misc]
        # transformers searches the source file of a class for the interface's decorator, and this
        # class has none.
        _can_set_experts_implementation_cached_value = True

        def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(config, *arguments, **options)
            ignored = set(getattr(self, _IGNORED_KEYS) or ())
            for name, module in find_experts(self).items():
                module._parameters.clear()
                # Nothing is left that initialisation could fill.
                module._is_hf_initialized = True
                ignored.add(re.escape(name.removeprefix(f"{self.base_model_prefix}.") + "."))
            setattr(self, _IGNORED_KEYS, ignored)
            prefixes = tuple(f"{name}." for name in find_experts(self))
            ties = getattr(self, _TIED_KEYS, None) or {}
            ties = {name: source for name, source in ties.items() if not name.startswith(prefixes)}
            tied = {name for name, source in ties.items() if source in without}
            for name in without | tied:
                owner, _, parameter = name.rpartition(".")
                module = self.get_submodule(owner)
                module._parameters[parameter] = None
                module._is_hf_initialized = True
            setattr(self, _TIED_KEYS, {name: source for name, source in ties.items() if name not in tied})

    for attribute in ("__name__", "__qualname__", "__module__"):
        setattr(WithoutExperts, attribute, getattr(model_class, attribute))
    return WithoutExperts
