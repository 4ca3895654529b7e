"""Walks a loaded model and puts our operators in the place of its modules, each only where it is
proven on probe rows to compute what the module computes.

Candidates come from types of leaves, shapes of parameters and attributes, never from a list of
families. What no form fits stays in torch, and the report names it.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from dflash_moe import _core
from dflash_moe.errors import UnsupportedError
from dflash_moe.model.architecture import find_experts
from dflash_moe.model.gates import known_activation
from dflash_moe.operators.activations import HostActivation
from dflash_moe.operators.addresses import DTYPE_NAMES
from dflash_moe.operators.bounds import excess, norm_bound
from dflash_moe.operators.linear import HostEmbedding, HostLinear, bias_source, linear_excess, memory_source
from dflash_moe.operators.norms import HostNorm, NormForm, norm_forms
from dflash_moe.operators.probes import SCALES, probe_rows
from dflash_moe.operators.report import Finding, TakeoverReport
from dflash_moe.operators.router_form import RouterForm
from dflash_moe.operators.routers import (
    HostRouter,
    RouterSignature,
    find_form,
    find_signature,
    matrix_of,
    router_excess,
)

# An error of at most what is allowed.
_PROVEN = 1.0


class Takeover:
    """Takes over one model, once. The model's dense weights move into packed operators, module by
    module, so that at most one tensor exists twice.
    """

    def __init__(
        self,
        model: Any,
        pool: _core.HostPool,
        numerics: str,
        placed: Sequence[Finding] = (),
        read_modules: frozenset[str] = frozenset(),
    ) -> None:
        """`model` is in eval mode on the processor; `numerics` is its linear layers' class. What
        `placed` says was taken over before. Others read the parameters of `read_modules`.
        """
        self._read_modules = read_modules
        self._model = model
        self._pool = pool
        self._numerics = numerics
        self._dtype: torch.dtype = model.dtype
        # Which form a module had, by what forms are found from (`_kind`): it is tried first on the
        # next one of its kind.
        self._norm_forms: dict[Any, NormForm] = {}
        self._router_forms: dict[Any, RouterForm] = {}
        self.report = TakeoverReport(type(model).__name__, list(placed))

    def run(self) -> TakeoverReport:
        """Replaces what can be replaced and returns what became of each module. Raises
        UnsupportedError for a model that is not on the processor, and CheckpointError for damaged
        weights.
        """
        with torch.no_grad():
            return self._run()

    def _run(self) -> TakeoverReport:
        if any(not value.is_cpu for value in self._model.parameters()):
            raise UnsupportedError("host operators run on the processor; this model lies on a card, where torch's stay")
        experts = find_experts(self._model)
        self._take_routers(experts)
        skipped = tuple(f"{name}." for name in experts)
        output = self._model.get_output_embeddings() if hasattr(self._model, "get_output_embeddings") else None
        # By name, because a list of modules would keep the weights of all of them until its end.
        for name in [name for name, _ in self._model.named_modules()]:
            module = self._model.get_submodule(name)
            if name in experts or name.startswith(skipped) or any(True for _ in module.children()):
                continue
            if type(module) is nn.Linear:
                self._take_linear(name, module, is_output=module is output)
            elif not isinstance(module, (HostRouter, HostLinear, HostEmbedding, nn.Embedding)) and not self._is_kept(name):
                try:
                    self._take_leaf(name, module)
                except (RuntimeError, TypeError, ValueError, IndexError) as error:
                    self._keep(name, module, f"it does not take rows: {type(error).__name__}")
        self._model.state_dict = _refuse_state_dict
        return self.report

    # -- linear layers -------------------------------------------------------------------------
    def _take_linear(self, name: str, module: nn.Linear, *, is_output: bool) -> None:
        weight, bias = module.weight, module.bias
        if name in self._read_modules:
            return self._keep(name, module, "another module reads its parameters")
        if weight.dtype not in DTYPE_NAMES:
            return self._keep(name, module, f"its weight is in {weight.dtype}")
        part = (memory_source(weight), bias_source(bias), 0)
        packed = _core.PackedLinear(self._pool, [part], numerics=self._numerics)
        ours = HostLinear(packed, torch.float32 if is_output else None, bias, weight.dtype)
        numerics = packed.numerics[0]
        found = linear_excess(ours, module, weight, bias, numerics)
        if not found <= _PROVEN:
            return self._keep(name, module, f"packed, its error is {found:.3g} times what is allowed")
        self._put(name, ours)
        self._add(name, module, "linear", f"{packed.formats[0]}, {numerics}", found)
        if is_output:
            self._take_tied_embedding(weight, packed)
        return None

    def _take_tied_embedding(self, weight: torch.Tensor, packed: _core.PackedLinear) -> None:
        """Has an embedding with the output's weight read its rows from the packed store."""
        for name, module in list(self._model.named_modules()):
            if module._parameters.get("weight") is not weight:
                continue
            if type(module) is nn.Embedding:
                self._put_embedding(name, module, packed, "rows of the packed output")
            else:
                self._keep(name, module, "it shares the output's weight, which is kept a second time for it")

    def _put_embedding(self, name: str, module: nn.Embedding, packed: _core.PackedLinear, form: str) -> None:
        ours = HostEmbedding(packed, module.weight.dtype)
        ids = torch.arange(0, packed.outputs, max(1, packed.outputs // 64))
        if not torch.equal(ours(ids), module(ids)):
            return self._keep(name, module, "its rows differ from those that are packed")
        self._put(name, ours)
        return self._add(name, module, "embedding", form, 0.0)

    # -- norms and activations -----------------------------------------------------------------
    def _take_leaf(self, name: str, module: nn.Module) -> None:
        activation = known_activation(module)
        if activation is not None and not module._parameters:
            found = self._elementwise_excess(HostActivation(self._pool, activation), module)
            if found <= _PROVEN:
                self._put(name, HostActivation(self._pool, activation))
                return self._add(name, module, "activation", activation, found)
            return self._keep(name, module, f"as {activation}, its error is {found:.3g} times what is allowed")
        forms = list(norm_forms(module))
        if forms:
            return self._take_norm(name, module, forms)
        if any(value is not None for value in module._parameters.values()) and not isinstance(module, nn.Embedding):
            self._keep(name, module, "no form fits its parameters")
        return None

    def _elementwise_excess(self, ours: nn.Module, module: nn.Module) -> float:
        rows = probe_rows(61, self._dtype, scales=(1.0, 1e-4, 30.0, 1e4))
        return excess(ours(rows), module(rows), copy.deepcopy(module).double()(rows.double()))

    def _take_norm(self, name: str, module: nn.Module, forms: list[Any]) -> None:
        weight = module._parameters["weight"]
        assert weight is not None
        dtype = self._dtype
        rows = probe_rows(weight.numel(), dtype, scales=SCALES if dtype != torch.float16 else SCALES[:2])
        try:
            own = module(rows)
            exact = copy.deepcopy(module).double()(rows.double()).double()
        except (RuntimeError, TypeError, ValueError) as error:
            return self._keep(name, module, f"it does not run on rows: {type(error).__name__}")

        def fitting(forms: Iterable[NormForm]) -> list[tuple[float, HostNorm]]:
            tried = [HostNorm(self._pool, form, weight, module._parameters.get("bias")) for form in forms]
            found = [excess(ours(rows).to(own.dtype), own, exact, norm_bound(exact)) for ours in tried]
            return [(one, ours) for one, ours in zip(found, tried, strict=True) if one <= _PROVEN]

        kind = _kind(module)
        known = self._norm_forms.get(kind)
        fit = ([] if known is None else fitting([known])) or fitting(forms)
        if len(fit) != 1:
            return self._keep(name, module, f"{len(fit) or 'no'} forms of norm fit")
        found, ours = fit[0]
        form = self._norm_forms[kind] = ours.form
        self._put(name, ours)
        return self._add(name, module, "norm", str(form), found)

    # -- routers -------------------------------------------------------------------------------
    def _take_routers(self, experts: dict[str, Any]) -> None:
        for experts_name, module in experts.items():
            block_name = experts_name.rpartition(".")[0]
            block = self._model.get_submodule(block_name)
            num_experts = int(getattr(module, "num_experts", 0))
            taken = False
            for child_name, child in list(block.named_children()):
                weight = matrix_of(child)._parameters.get("weight")
                if weight is None or weight.ndim != 2 or weight.shape[0] != num_experts:
                    continue
                taken = self._take_router(f"{block_name}.{child_name}", child, num_experts, weight.shape[1]) or taken
            if not taken and not any(finding.module.startswith(f"{block_name}.") for finding in self.report.kept):
                self._keep(block_name, block, "no module of it is a router on its own")

    def _take_router(self, name: str, module: nn.Module, num_experts: int, hidden_size: int) -> bool:
        signature = find_signature(module, num_experts, hidden_size)
        if signature is None:
            self._keep(name, module, "it returns no ids and weights of chosen experts")
            return False
        kind = signature, _kind(module)
        form = self._router_forms.get(kind)
        ours, found = self._router(module, signature, form)
        if not found <= _PROVEN:
            form, reason = find_form(module, signature)
            if form is None:
                self._keep(name, module, reason)
                return False
            ours, found = self._router(module, signature, form)
        if ours is None or not found <= _PROVEN:
            self._keep(name, module, f"as {form}, its error is {found:.3g} times what is allowed")
            return False
        self._router_forms[kind] = ours.form
        self._put(name, ours)
        self._add(name, module, "router", str(form), found)
        return True

    def _router(
        self, module: nn.Module, signature: RouterSignature, form: RouterForm | None
    ) -> tuple[HostRouter | None, float]:
        """Returns a router of this form and how far it is from the module."""
        if form is None:
            return None, float("inf")
        ours = HostRouter(self._pool, form, signature, module)
        return ours, router_excess(ours, module)

    # -- the tree ------------------------------------------------------------------------------
    def _put(self, name: str, ours: nn.Module) -> None:
        parent_name, _, child = name.rpartition(".")
        setattr(self._model.get_submodule(parent_name) if parent_name else self._model, child, ours.eval())

    def _add(self, name: str, module: nn.Module, operator: str, form: str, found: float) -> None:
        self.report.findings.append(Finding(name, type(module).__name__, operator, form, excess=found))

    def _keep(self, name: str, module: nn.Module, reason: str) -> None:
        self.report.findings.append(Finding(name, type(module).__name__, reason=reason))

    def _is_kept(self, name: str) -> bool:
        return any(finding.module == name for finding in self.report.kept)


def take_over(
    model: Any,
    pool: _core.HostPool,
    numerics: str,
    placed: Sequence[Finding] = (),
    read_modules: frozenset[str] = frozenset(),
) -> TakeoverReport:
    """Puts host operators in the place of a model's modules; see `Takeover.run`. The model cannot
    be saved afterwards.
    """
    return Takeover(model, pool, numerics, placed, read_modules).run()


def _kind(module: nn.Module) -> tuple[Any, ...]:
    """Returns what the forms of a module are found from, but for the values of its parameters. Two
    modules with the same have one form, unless their code reads something else, so that the form of
    the one is proven of the other before it is taken.
    """
    plain = [(name, value) for name, value in sorted(vars(module).items()) if type(value) in (bool, int, float, str)]
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    return type(module), *plain, *((name, value.shape, value.dtype) for name, value in tensors)


def _refuse_state_dict(*_arguments: Any, **_options: Any) -> Any:
    raise UnsupportedError(
        "state_dict: this model's weights are packed for an engine; to save them, load the checkpoint again with "
        "dflash_moe.load_model"
    )
