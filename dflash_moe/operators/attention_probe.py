"""Finds out, before modules are taken over, whether a model's attention can be paged: a forward
pass of a few tokens, and one of a single token behind them, with a cache that only looks, and
attention that computes nothing. Both note who reads positions and lengths, and how layers are
called.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from dflash_moe.errors import DflashError, UnsupportedError
from dflash_moe.operators.attention_interface import AttentionTerms, on_interface, set_implementation
from dflash_moe.operators.attribute_probe import read_parameters
from dflash_moe.operators.linear import HostLinear
from dflash_moe.operators.looks import LookingCache, watched

_IMPLEMENTATION = "dflash_moe_probe"
# This attribute of the probed model's modules says which layers they stored keys for.
_PROBE = "dflash_moe_probe"
_TOKENS = 3
# Masks are compared at queries of these positions, as far as a model has them.
_QUERIES = (0, 1, 100, 5_000, 100_000, 1_000_000)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What an attention module tells the interface beside its tensors: query heads, the scale of
    products, the window and soft cap (0 for none), and sinks [num_heads] or None. `told_window` is
    the window among its arguments (0 for none): a mask may have one that they lack, and a window of
    more than all positions is none.
    """

    num_heads: int
    scale: float
    window: int
    told_window: int
    softcap: float
    sinks: Any


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """An attention module, its layer in the cache, and what it stores of a token: heads, and the
    widths of what it calls key and value.
    """

    module: str
    index: int
    num_kv_heads: int
    key_size: int
    value_size: int
    # Keys are latents that heads expand (MLA): key and value are the latent and its rotated part.
    is_latent: bool
    # What the module told the interface.
    call: AttentionCall


@dataclass(slots=True)
class AttentionProbe:
    """What was seen of a model. `refusal` is empty where its attention can be paged."""

    layers: list[AttentionLayer] = field(default_factory=list)
    refusal: str = ""
    # Modules whose parameters others read, so that no operator can stand in for them.
    read_modules: frozenset[str] = frozenset()
    # Modules that read the positions of rows, rotary modules among them.
    position_readers: frozenset[str] = frozenset()
    # With which arguments beside hidden states the layer around each attention module was called,
    # by the layer's name.
    layer_calls: dict[str, dict[str, Any]] = field(default_factory=dict)


class _Mask:
    """Stands in for a mask that a model makes: which keys each query sees, by position. Pages make
    no mask, so that one must be a window, and the one that the attention's arguments tell of, if
    they tell of any.
    """

    def __init__(self, sees: Callable[..., torch.Tensor]) -> None:
        self._sees = sees

    def window(self, module: nn.Module, told: int, max_positions: int, device: torch.device) -> int:
        """Returns how many keys up to its own a query sees, 0 meaning all. Raises UnsupportedError
        where that is not so for each query, or is not `told`, unless that is 0.
        """
        last = max(0, max_positions - 1) if max_positions else _QUERIES[-1]
        window = told or self._keys_seen_by(last, device)
        self._check(module, window if window <= last else 0, told, last, device)
        return window if window <= last else 0

    def _keys_seen_by(self, query: int, device: torch.device) -> int:
        zero, keys = torch.tensor(0, device=device), torch.arange(query + 1, device=device)
        return int(self._sees(zero, zero, torch.full_like(keys, query), keys).expand_as(keys).sum())

    def _check(self, module: nn.Module, window: int, told: int, last: int, device: torch.device) -> None:
        zero = torch.tensor(0, device=device)
        for query in sorted({min(place, last) for place in (*_QUERIES, last)}):
            steps = {0, 1, 2, query, window - 1, window, window + 1, *(1 << bit for bit in range(21))}
            seen = sorted({query - step for step in steps if 0 <= step <= query} | {query + 1})
            keys = torch.tensor(seen, device=device)
            expected = (keys <= query) & ((keys > query - window) if window else torch.ones_like(keys, dtype=torch.bool))
            found = self._sees(zero, zero, torch.full_like(keys, query), keys).expand_as(keys)
            if not torch.equal(found.bool(), expected):
                place = int(keys[int((found.bool() != expected).nonzero()[0])])
                said = f"sliding_window {told}" if told else "no window"
                raise UnsupportedError(
                    f"{type(module).__name__}: its attention is told {said}, and its mask says otherwise for the query at "
                    f"{query} and the key at {place}"
                )


def _look_at_mask(*_arguments: Any, mask_function: Callable[..., torch.Tensor], **_options: Any) -> _Mask:
    """Stands in for the function that makes masks."""
    return _Mask(mask_function)


class _ProbeCache(LookingCache):
    """A looking cache that notes what each layer would store."""

    def __init__(self, max_positions: int, length: int, on_look: Callable[[str], None]) -> None:
        super().__init__(length, on_look)
        self.stored: dict[int, tuple[int, int, int]] = {}
        self.attended: list[tuple[nn.Module, int, AttentionCall]] = []
        self.max_positions = max_positions

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *_arguments: Any, **_options: Any) -> tuple[Any, Any]:
        """Notes and returns keys and values."""
        self.stored[layer_idx] = (key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        return key_states, value_states


class _Calls:
    """Notes, while a model runs, which of its modules reads positions and lengths, and with what
    each module that has children was called.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._model = model
        self._under_way: list[str] = []
        self.positions: set[str] = set()
        self.lengths: dict[str, str] = {}
        self.arguments: dict[str, dict[str, Any]] = {}

    def see_positions(self) -> None:
        """Notes that the module under way reads positions."""
        self.positions.add(self._under_way[-1] if self._under_way else "")

    def see_length(self, what: str) -> None:
        """Notes that the module under way asks for a length."""
        self.lengths[self._under_way[-1] if self._under_way else ""] = what

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Opens a block in which calls are noted."""
        self._under_way = []
        hooks: list[Any] = []
        for module in self._model.modules():
            hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            hooks.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        name = self._names.get(id(module), "")
        self._under_way.append(name)
        if any(True for _ in module.children()):
            names = list(inspect.signature(module.forward).parameters)[: len(given)]
            self.arguments[name] = {**dict(zip(names[1:], given[1:], strict=False)), **named}

    def _leave(self, *_: Any) -> None:
        self._under_way.pop()


def probe_attention(model: Any) -> AttentionProbe:
    """Looks at the attention of a model, whose experts compute nothing meanwhile (the caller sees
    to that). Changes nothing.
    """
    found = AttentionProbe()
    calls = _Calls(model)
    most = max_positions(model.config)
    cache = _ProbeCache(most, 0, calls.see_length)
    try:
        with read_parameters(model) as read, _without_products(model):
            _run(model, cache, calls, torch.arange(_TOKENS))
            # A token alone goes through branches of its own in some models.
            _run(model, _ProbeCache(most, _TOKENS, calls.see_length), calls, torch.tensor([_TOKENS]))
    except DflashError as error:
        found.refusal = str(error)
        return found
    except Exception as error:  # noqa: BLE001 - whatever a model's code raises over a cache that it does not expect
        found.refusal = f"{type(model).__name__} does not run with a paged cache: {type(error).__name__}: {error}"
        return found
    found.read_modules, found.position_readers = frozenset(read), frozenset(calls.positions)
    _note_layers(found, model, cache, calls)
    return found


@contextmanager
def _without_products(model: nn.Module) -> Iterator[None]:
    """Opens a block in which linear layers that are packed already give zeros, as attention does:
    all weights would be read twice to learn nothing.
    """
    packed = [module for module in model.modules() if isinstance(module, HostLinear)]
    try:
        for module in packed:
            module.__dict__["forward"] = partial(_zeros, module)
        yield
    finally:
        for module in packed:
            module.__dict__.pop("forward", None)


def _zeros(module: HostLinear, rows: torch.Tensor) -> torch.Tensor:
    return module.empty(rows).zero_()


def _run(model: Any, cache: _ProbeCache, calls: _Calls, positions: torch.Tensor) -> None:
    """Runs a model on a token for each of the positions."""
    places = positions.to(model.device)[None]
    ids = places % int(model.config.get_text_config().vocab_size)
    with _implementation(model, cache), torch.inference_mode(), calls.noted():
        model(input_ids=ids, position_ids=watched(places, calls.see_positions), past_key_values=cache, use_cache=True)


def _note_layers(found: AttentionProbe, model: Any, cache: _ProbeCache, calls: _Calls) -> None:
    """Adds the layers that a cache saw, or why they cannot be paged."""
    names = {id(module): name for name, module in model.named_modules()}
    for name, what in calls.lengths.items():
        kind = type(model.get_submodule(name)).__name__
        found.refusal = (
            f"{kind}{f' ({name})' if name else ''} asks the cache for {what}; a packed step has a length for each sequence"
        )
        return
    for module, index, call in cache.attended:
        if index not in cache.stored:
            found.refusal = f"{type(module).__name__} ({names[id(module)]}) reads keys that another layer stored"
            return
        is_latent = hasattr(module, "expand_kv")
        found.layers.append(AttentionLayer(names[id(module)], index, *cache.stored[index], is_latent, call))
        layer = names[id(module)].rpartition(".")[0]
        found.layer_calls[layer] = calls.arguments.get(layer, {})
    num_layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", 0) or 0)
    indices = [layer.index for layer in found.layers]
    if len(set(indices)) != len(indices) or set(cache.stored) != set(indices) or len(indices) != num_layers:
        found.refusal = f"{len(set(indices))} of {num_layers} layers attend through the interface, each to its own keys"


def max_positions(config: Any) -> int:
    """Returns the number of positions that a model has by its configuration, 0 where it says
    none.
    """
    return int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0)


@contextmanager
def _implementation(model: Any, cache: _ProbeCache) -> Iterator[None]:
    before = model.config._attn_implementation
    modules = [module for module in model.modules() if hasattr(module, "layer_idx")]
    for module in modules:
        module.__dict__[_PROBE] = cache
    try:
        set_implementation(model, _IMPLEMENTATION)
        yield
    finally:
        set_implementation(model, before)
        for module in modules:
            module.__dict__.pop(_PROBE, None)


def _look(
    module: nn.Module, query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor, terms: AttentionTerms
) -> torch.Tensor:
    """Notes the call and returns zeros of the right shape."""
    cache = module.__dict__[_PROBE]
    window = terms.window
    if terms.mask is not None:
        window = terms.mask.window(module, window, cache.max_positions, query.device)
    call = AttentionCall(query.shape[1], terms.scale, window, terms.window, terms.softcap, terms.sinks)
    cache.attended.append((module, int(getattr(module, "layer_idx", -1)), call))
    return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[-1]))


on_interface(_IMPLEMENTATION, _look, masks=_Mask)
ALL_MASK_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, _look_at_mask)
