"""The router of a layer with experts, by the core, and the forms of it that a module may have.

A form is found in float64, on a copy of the module whose correction bias is random, so that forms
which differ only in what happens to be zero are told apart. Modules that compute in float32 inside
do so in the copy too; rows whose choice float32 cannot tell say nothing.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from dflash_moe import _core
from dflash_moe.operators.addresses import dense, rows_of
from dflash_moe.operators.bounds import EPSILON, chain_steps
from dflash_moe.operators.linear import HostLinear, bias_source, memory_source
from dflash_moe.operators.probes import SEED, probe_rows
from dflash_moe.operators.router_form import RouterForm
from dflash_moe.topology.numerics import DEFAULT_NUMERICS

# The router's products are few and decide which experts compute, so they are never rounded.
NUMERICS = DEFAULT_NUMERICS
# A module agrees with its form in float64 to this, once it got the same logits.
_AGREEMENT = 1e-5
# A logit that a module sums in float32 is off by less than this part of its products' magnitudes.
_FLOAT32_LOGIT = 8 * 2.0**-24
# Probe rows whose choice rounding could change prove nothing, and are passed over. At least this
# share must be left (11 of the 44 rows that `probe_rows` makes). With fewer, too little was
# compared: no form is found, or the router does not stand in.
_CLEAR_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class RouterSignature:
    """Where a router's tuple has its logits (None where it has none), weights and ids, and whether
    it is called with a correction bias as its second argument.
    """

    logits: int | None
    weights: int
    ids: int
    length: int
    num_experts: int
    top_k: int
    hidden_size: int
    takes_correction: bool = False


class HostRouter(nn.Module):  # type: ignore[misc]
    """Stands in for a router module that returns a tuple. Weights are float32."""

    def __init__(self, pool: _core.HostPool, form: RouterForm, signature: RouterSignature, module: nn.Module) -> None:
        super().__init__()
        self.form, self.signature = form, signature
        weight, bias = _linear_of(module, signature)
        kept = [tensor.detach().contiguous() for tensor in (weight, bias) if tensor is not None]
        self.packed = _core.PackedLinear(
            pool, [(memory_source(kept[0]), bias_source(kept[1] if len(kept) > 1 else None), 0)], numerics=NUMERICS
        )
        self.shift = None if bias is None else bias.detach().clone()
        correction = _correction_of(module, signature)
        self.correction = correction.detach().float().contiguous() if form.has_bias and correction is not None else None
        self._pool = pool
        fields = {key: value for key, value in asdict(form).items() if key != "has_bias"}
        self._form = _core.RouterForm(**fields, weight=form.weight, sum_epsilon=form.sum_epsilon)

    def route(self, rows: torch.Tensor, given: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns logits [num_rows, num_experts] and weights [num_rows, top_k] in float32, and ids
        [num_rows, top_k] in int64, for rows [num_rows, hidden_size]. `given` is the correction bias
        of a module that is called with one.
        """
        rows = dense(rows)
        address, stride, dtype, count = rows_of(rows)
        logits = torch.empty((count, self.form.num_experts), dtype=torch.float32)
        weights = torch.empty((count, self.form.top_k), dtype=torch.float32)
        ids = torch.empty((count, self.form.top_k), dtype=torch.int64)
        self.packed.run(address, stride, dtype, count, *rows_of(logits)[:3])
        given = None if given is None else given.detach().float().contiguous()
        _core.route(*self.route_arguments(logits, ids, weights, given))
        return logits, weights, ids

    def route_arguments(
        self, logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, given: torch.Tensor | None = None
    ) -> tuple[Any, ...]:
        """Returns what the core's `route` takes to choose by logits [num_rows, num_experts] and
        write ids and weights [num_rows, top_k]. `given` is a correction in float32 that the module
        is called with instead of having it. All are dense and stay the caller's.
        """
        correction = self.correction if given is None or not self.form.has_bias else given
        bias = 0 if correction is None else correction.data_ptr()
        return self._pool, self._form, *rows_of(logits), ids.data_ptr(), "i64", weights.data_ptr(), bias

    def exact(self) -> nn.Module:
        """Returns the router in float64, with what is packed."""
        return _ExactRouter(self)

    def forward(self, hidden_states: torch.Tensor, correction: torch.Tensor | None = None) -> tuple[Any, ...]:
        """Returns what the module returned, with float32 weights and logits."""
        logits, weights, ids = self.route(hidden_states.reshape(-1, self.signature.hidden_size), correction)
        return in_order(self.signature, logits, weights, ids)


class _ExactRouter(nn.Module):  # type: ignore[misc]
    """A router by its form in float64."""

    def __init__(self, ours: HostRouter) -> None:
        super().__init__()
        self._form, self._signature, self._correction = ours.form, ours.signature, ours.correction
        self._linear = HostLinear(ours.packed, bias=ours.shift).exact()

    def forward(self, hidden_states: torch.Tensor, correction: torch.Tensor | None = None) -> tuple[Any, ...]:
        logits = self._linear(hidden_states.reshape(-1, self._signature.hidden_size).double())
        correction = self._correction if correction is None or not self._form.has_bias else correction
        ids, weights, _ = self._form.choose(logits, None if correction is None else correction.double())
        return in_order(self._signature, logits, weights, ids)


def in_order(signature: RouterSignature, logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> tuple[Any, ...]:
    """Returns the tuple that a router of this signature gives."""
    out: list[Any] = [None] * signature.length
    out[signature.weights], out[signature.ids] = weights, ids
    if signature.logits is not None:
        out[signature.logits] = logits
    return tuple(out)


def matrix_of(module: nn.Module) -> nn.Module:
    """Returns what has a router's matrix as its weight: it, or the one linear layer in it."""
    children = list(module.children())
    is_inside = "weight" not in module._parameters and len(children) == 1 and type(children[0]) is nn.Linear
    return children[0] if is_inside else module


def find_signature(module: nn.Module, num_experts: int, hidden_size: int) -> RouterSignature | None:
    """Runs a module on a few rows and returns what it gives, or None where it is no router."""
    weight = matrix_of(module)._parameters.get("weight")
    if weight is None or tuple(weight.shape) != (num_experts, hidden_size) or type(module) is nn.Linear:
        return None
    rows = probe_rows(hidden_size, weight.dtype, scales=(1.0,))
    out = _called(module, (rows,))
    takes_correction = out is None
    if takes_correction:
        out = _called(module, (rows, torch.zeros(num_experts)))
    if not isinstance(out, tuple) or not all(isinstance(item, torch.Tensor) for item in out):
        return None
    ids = [place for place, item in enumerate(out) if item.dtype in (torch.int64, torch.int32) and item.ndim == 2]
    if len(ids) != 1:
        return None
    shape = out[ids[0]].shape
    weights = [place for place, item in enumerate(out) if item.is_floating_point() and item.shape == shape]
    logits = [
        place for place, item in enumerate(out) if item.is_floating_point() and tuple(item.shape) == (len(rows), num_experts)
    ]
    if len(weights) != 1 or len(logits) > 1 or logits == weights:
        return None
    place = logits[0] if logits else None
    return RouterSignature(place, weights[0], ids[0], len(out), num_experts, shape[1], hidden_size, takes_correction)


def _called(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> Any:
    """Returns what a module gives for the arguments, or None where it wants others."""
    with torch.no_grad():
        try:
            return module(*arguments)
        except Exception:  # noqa: BLE001 - whatever a module raises, it is no router that is called so
            return None


def find_form(module: nn.Module, signature: RouterSignature) -> tuple[RouterForm | None, str]:
    """Returns the one form that a router has, or None and why."""
    copied = copy.deepcopy(module).double()
    correction = _random_correction(copied, signature)
    rows = _probe(module, signature, torch.float64)
    with torch.no_grad():
        out = copied(rows, correction) if signature.takes_correction else copied(rows)
    logits, magnitudes = _logits(copied, signature, rows)
    error = _FLOAT32_LOGIT * magnitudes.amax(-1, keepdim=True)
    if signature.logits is not None and not bool(((out[signature.logits].double() - logits).abs() <= error).all()):
        return None, "what it returns as logits is not its product"
    theirs = _spread(out[signature.ids], out[signature.weights].double(), signature.num_experts)
    allowed = (_AGREEMENT + 4 * error) * theirs.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    found = []
    for form in _candidates(module, signature, has_correction=correction is not None):
        bias = correction if form.has_bias else None
        ids, weights, _ = form.choose(logits, bias)
        is_clear = form.is_clear(logits, bias, error)
        is_equal = ((_spread(ids, weights, signature.num_experts) - theirs).abs() <= allowed).all(-1, keepdim=True)
        if _are_enough(is_clear) and bool((is_equal | ~is_clear).all()):
            found.append(form)
    if len({form.function for form in found}) == 1:
        return found[0], ""
    return None, "no form of router fits" if not found else f"{len(found)} forms of router fit equally"


def router_excess(ours: HostRouter, module: nn.Module) -> float:
    """Returns how far a router is from its module in float64 on probe rows: at most 1 where it may
    stand in. Rows whose choice is closer than the error of a logit may choose otherwise.
    """
    signature, form = ours.signature, ours.form
    rows = _probe(module, signature, _linear_of(module, signature)[0].dtype)
    logits, magnitudes = _logits(module, signature, rows)
    given = torch.rand(form.num_experts, generator=torch.Generator().manual_seed(SEED)) * 0.1
    arguments = (rows, given) if signature.takes_correction else (rows,)
    correction = given if signature.takes_correction else ours.correction
    with torch.no_grad():
        own = module(*arguments)
        mine = ours(*arguments)
        out = copy.deepcopy(module).double()(*(value.double() for value in arguments))
    exact = _spread(out[signature.ids], out[signature.weights].double(), form.num_experts)
    bound = chain_steps(signature.hidden_size) * 2.0**-24 * magnitudes.amax(-1, keepdim=True)
    is_near = ~form.is_clear(logits, correction.double() if form.has_bias and correction is not None else None, bound)
    if not _are_enough(~is_near):
        return float("inf")
    own_error = (_spread(own[signature.ids], own[signature.weights].double(), form.num_experts) - exact).abs()
    error = (_spread(mine[signature.ids], mine[signature.weights].double(), form.num_experts) - exact).abs()
    top = exact.abs().amax(-1, keepdim=True)
    own_error = torch.where(own_error.amax(-1, keepdim=True) < 0.1 * top, own_error, torch.zeros_like(own_error))
    allowed = own_error.amax(-1, keepdim=True) + (4 * bound + 2 * EPSILON[torch.float32] * form.num_experts) * top + 1e-30
    ratio = torch.where(is_near, torch.zeros_like(error), error / allowed)
    return float(ratio.nan_to_num(nan=float("inf")).max())


def _probe(module: nn.Module, signature: RouterSignature, dtype: torch.dtype) -> torch.Tensor:
    """Returns probe rows, among them for a router that may be a sparse mixer rows whose two highest
    logits are so near that both are mixed in.
    """
    rows = probe_rows(signature.hidden_size, torch.float64)
    found = [rows]
    logits, _ = _logits(module, signature, rows)
    weight = _linear_of(module, signature)[0].double()
    for threshold in _mixer_thresholds(module):
        first, second = (weight[column] for column in logits.topk(2, dim=-1).indices.T)
        # Moved along the difference of their weights, the second logit becomes this part of the
        # first.
        part, way = 1.0 - threshold / 4, second - first
        gap = part * (rows * first).sum(-1) - (rows * second).sum(-1)
        step = gap / ((second - part * first) * way).sum(-1)
        found.append(rows + step[:, None] * way)
    return torch.cat(found).to(dtype)


def _mixer_thresholds(module: nn.Module) -> list[float]:
    """Returns what may be the threshold of a sparse mixer: twice a jitter that a module knows."""
    jitters = {value for name, value in vars(module).items() if "jitter" in name and type(value) is float}
    return sorted(2.0 * jitter for jitter in jitters if 0.0 < jitter < 0.5)


def _are_enough(is_clear: torch.Tensor) -> bool:
    return float(is_clear.double().mean()) >= _CLEAR_SHARE


def _logits(module: nn.Module, signature: RouterSignature, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logits of rows in float64, and the sums of their products' magnitudes."""
    weight, bias = (None if value is None else value.detach().double() for value in _linear_of(module, signature))
    assert weight is not None
    product = rows.double() @ weight.T
    magnitudes = rows.double().abs() @ weight.abs().T
    return (product, magnitudes) if bias is None else (product + bias, magnitudes + bias.abs())


def _random_correction(copied: nn.Module, signature: RouterSignature) -> torch.Tensor | None:
    """Gives a copy random correction biases and returns them, None where it has none."""
    generator = torch.Generator().manual_seed(SEED)
    random = torch.rand(signature.num_experts, generator=generator, dtype=torch.float64) * 0.1
    if signature.takes_correction:
        return random
    correction = _correction_of(copied, signature)
    if correction is None:
        return None
    correction.data.copy_(random)
    return random


def _spread(ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> torch.Tensor:
    return torch.zeros(ids.shape[0], num_experts, dtype=torch.float64).scatter_add(1, ids.long(), weights.double())


def _linear_of(module: nn.Module, signature: RouterSignature) -> tuple[torch.Tensor, torch.Tensor | None]:
    parameters = matrix_of(module)._parameters
    bias = parameters.get("bias")
    return parameters["weight"], bias if bias is not None and tuple(bias.shape) == (signature.num_experts,) else None


def _correction_of(module: nn.Module, signature: RouterSignature) -> torch.Tensor | None:
    """Returns the one vector over experts that is not the bias of the logits, if there is one."""
    linear = [value for value in matrix_of(module)._parameters.values() if value is not None]
    others = [value for value in (*module.parameters(), *module.buffers()) if not any(value is one for one in linear)]
    found = [value for value in others if value.numel() == signature.num_experts and value.ndim <= 2]
    return found[0].reshape(-1) if len(found) == 1 else None


def _candidates(module: nn.Module, signature: RouterSignature, *, has_correction: bool) -> Iterator[RouterForm]:
    """Yields every form that the attributes of a module allow, no two of which are the same
    function: softmax over the chosen logits is softmax and then normalising, and the best of all
    are in as many of the best groups by their best.
    """
    numbers = {name: value for name, value in vars(module).items() if type(value) in (int, float)}
    scales = sorted({1.0, *(float(value) for name, value in numbers.items() if "scal" in name and value > 0)})
    groups = {value for name, value in numbers.items() if "group" in name and type(value) is int and value > 1}
    layouts = [(1, 1, "top_two_sum")]
    for num_groups in sorted(groups):
        if signature.num_experts % num_groups == 0:
            size = signature.num_experts // num_groups
            kept = [value for name, value in numbers.items() if "topk" in name and "group" in name and 0 < value < num_groups]
            for topk in sorted(set(kept)):
                layouts += [(num_groups, int(topk), "top_two_sum")] if size > 1 else []
                layouts += [(num_groups, int(topk), "max")] if topk < signature.top_k else []
    for score, normalizes, layout, scale in itertools.product(
        ("softmax", "sigmoid", "identity"), (False, True), layouts, scales
    ):
        for has_bias in (False, True) if has_correction else (False,):
            yield RouterForm(signature.num_experts, signature.top_k, score, normalizes, has_bias, *layout, scale)
    for threshold in _mixer_thresholds(module):
        yield RouterForm(signature.num_experts, signature.top_k, "identity", False, mixer_threshold=threshold)
