"""What no proof of a single module sees, parity of whole logits and the proof of independence do:
each test makes one part of a host wrong, and one of both must notice.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dflash_moe import _core
from dflash_moe.forward import host_model
from dflash_moe.forward.forward import PackedForward
from dflash_moe.forward.host_model import open_host
from dflash_moe.forward.independence import find_dependence
from dflash_moe.forward.kept_proofs import ModelProven
from dflash_moe.forward.rotary_tables import RotaryTables
from dflash_moe.integrations.transformers import without_experts
from dflash_moe.operators.step_context import StepContext
from tests.host_models import WINDOW, checkpoint, logits_of, prompt, start

pytestmark = pytest.mark.transformers

ARCHITECTURES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "phimoe")
# What parity allows is far below this, and each wrong form is far above it.
SEEN = 1e-4


class Opened:
    """A host, and what its model's own operators say."""

    def __init__(self, arch: str, packed: PackedForward) -> None:
        self.arch, self.packed = arch, packed
        self.right = self.logits()

    def logits(self) -> torch.Tensor:
        return logits_of(self.packed, prompt(), [50]).double()

    def distance(self, expected: torch.Tensor) -> float:
        return float((self.logits() - expected).abs().max() / expected.std())

    @property
    def layers(self) -> Any:
        return self.packed.model.model.layers


@pytest.fixture(scope="module", params=ARCHITECTURES)
def opened(request):
    with start(request.param, "f32") as runtime, pytest.MonkeyPatch.context() as patch:
        if request.param in ("qwen3_moe", "deepseek_v3"):
            # Whole layers of ours have no modules to exchange.
            patch.setattr(host_model, "take_layers", lambda *_arguments: ModelProven())
        host = open_host(checkpoint(request.param, "f32"), runtime)
        assert host.packed is not None
        yield Opened(request.param, host.packed)


@pytest.fixture
def eager(opened):
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.float32, "experts_implementation": "eager", "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(checkpoint(opened.arch, "f32"), **options).eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([prompt()])).logits[0].double()


# What attention is told of its form: the last arguments of `paged_attention`, of the core and of
# its programs, behind so many.
ATTENTION_FORM = ("scale", "window", "softcap", "sinks_address")
BEFORE_FORM = 10

Patch = Callable[[Opened, pytest.MonkeyPatch], None]


def attention(**changes: Any) -> Patch:
    """Attention is told other things than the model says; a function changes what it was told."""

    def told_wrong(right: Callable[..., None]) -> Callable[..., None]:
        def wrong(*arguments: Any, **named: Any) -> None:
            named |= dict(zip(ATTENTION_FORM, arguments[-len(ATTENTION_FORM) :], strict=True)) if not named else {}
            for name, change in changes.items():
                named[name] = change(named[name])
            right(*arguments[:BEFORE_FORM], **named)

        return wrong

    def apply(opened: Opened, patch: pytest.MonkeyPatch) -> None:
        for owner in (_core, _core.Program):
            patch.setattr(owner, "paged_attention", told_wrong(owner.paged_attention))
        if opened.packed.buffers is not None:
            # Programs are bound anew to buffers that are made anew.
            patch.setattr(opened.packed.buffers, "_kept", ({}, {}))

    return apply


def one_window(step: int) -> Callable[[int], int]:
    return lambda window: window + step if window else 0


def module(path: str, change: Callable[[nn.Module], nn.Module]) -> Patch:
    """A module of the last layer is another."""

    def apply(opened: Opened, patch: pytest.MonkeyPatch) -> None:
        parent, _, name = path.rpartition(".")
        owner = opened.layers[-1].get_submodule(parent)
        patch.setitem(owner._modules, name, change(owner._modules[name]))

    return apply


def swapped(path: str, one: str, other: str) -> Patch:
    """Two modules of the last layer have changed places."""

    def apply(opened: Opened, patch: pytest.MonkeyPatch) -> None:
        modules = opened.layers[-1].get_submodule(path)._modules
        first, second = modules[one], modules[other]
        patch.setitem(modules, one, second)
        patch.setitem(modules, other, first)

    return apply


def function(name: str, change: Callable[[Any], Any]) -> Patch:
    """A function of the model's own file is another."""

    def apply(opened: Opened, patch: pytest.MonkeyPatch) -> None:
        file = importlib.import_module(type(opened.packed.model).__module__)
        patch.setattr(file, name, change(getattr(file, name)))

    return apply


def tables(change: Callable[[Any], Any]) -> Patch:
    """Positions, and so cosines and sines, are other ones."""

    def apply(_opened: Opened, patch: pytest.MonkeyPatch) -> None:
        right = RotaryTables.of

        def of(self: Any, step: StepContext, *others: Any, **named: Any) -> Any:
            lengths = [change(*entry) for entry in step.lengths]
            positions = np.concatenate([np.arange(first, first + count) for _, first, count in lengths])
            return right(self, replace(step, lengths=lengths, positions=positions), *others, **named)

        patch.setattr(RotaryTables, "of", of)
        # A loop's program would copy the rows of the right positions by itself.
        patch.setattr(RotaryTables, "shared", lambda _tables, _step: None)

    return apply


def slots(change: Callable[[Any], Any]) -> Patch:
    """Keys and values go to other slots."""

    def apply(opened: Opened, patch: pytest.MonkeyPatch) -> None:
        right = type(opened.packed.cache).begin

        def begin(self: Any, step: Any) -> torch.Tensor:
            return change(right(self, step)).contiguous()

        patch.setattr(type(opened.packed.cache), "begin", begin)

    return apply


def attribute(path: str, name: str, change: Callable[[Any], Any]) -> Patch:
    """A value of an operator of the last layer is another."""

    def apply(opened: Opened, patch: pytest.MonkeyPatch) -> None:
        owner = opened.layers[-1].get_submodule(path)
        patch.setattr(owner, name, change(getattr(owner, name)))

    return apply


def _interleaved(right: Any) -> Any:
    """Pairs of neighbours for pairs of halves, in queries and keys alike."""

    def rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **options: Any) -> Any:
        mixed = [x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (query, key)]
        found = right(*mixed, cos, sin, **options)
        return tuple(x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for x in found)

    return rotate


class _Zero(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(rows)


class _Of(nn.Module):
    """A module whose outputs are changed."""

    def __init__(self, right: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.right, self.change = right, change

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.change(self.right(rows))


WRONG: dict[str, tuple[str, Patch]] = {
    "scale": ("qwen3_moe", attention(scale=lambda scale: scale * 1.001)),
    "a window where there is none": ("qwen3_moe", attention(window=lambda _window: 64)),
    "a soft cap where there is none": ("qwen3_moe", attention(softcap=lambda _cap: 10.0)),
    "window one longer": ("gpt_oss", attention(window=one_window(1))),
    "window one shorter": ("gpt_oss", attention(window=one_window(-1))),
    "no window": ("gpt_oss", attention(window=lambda _window: 0)),
    "windows in every layer": ("gpt_oss", attention(window=lambda _window: WINDOW)),
    "no sinks": ("gpt_oss", attention(sinks_address=lambda _address: 0)),
    "sinks of the next head": ("gpt_oss", attention(sinks_address=lambda address: address + 4)),
    "scale of a latent key": ("deepseek_v3", attention(scale=lambda _scale: (2 * 24 + 12) ** -0.5)),
    "no query norm": ("qwen3_moe", module("self_attn.q_norm", lambda _right: nn.Identity())),
    "no key norm": ("qwen3_moe", module("self_attn.k_norm", lambda _right: nn.Identity())),
    "norms of query and key swapped": ("qwen3_moe", swapped("self_attn", "q_norm", "k_norm")),
    "keys and values swapped": ("qwen3_moe", swapped("self_attn", "k_proj", "v_proj")),
    "norms before attention and MLP swapped": ("qwen3_moe", swapped("", "input_layernorm", "post_attention_layernorm")),
    "no norm of latents": ("deepseek_v3", module("self_attn.kv_a_layernorm", lambda _right: nn.Identity())),
    "gate and up swapped": ("deepseek_v3", swapped("mlp.shared_experts", "gate_proj", "up_proj")),
    "no shared experts": ("deepseek_v3", module("mlp.shared_experts", lambda _right: _Zero())),
    "shared experts twice": ("deepseek_v3", module("mlp.shared_experts", lambda right: _Of(right, lambda x: 2 * x))),
    "another correction bias": ("deepseek_v3", attribute("mlp.gate", "correction", lambda bias: bias.roll(1))),
    "interleaved pairs": ("qwen3_moe", function("apply_rotary_pos_emb", _interleaved)),
    "halves for interleaved pairs": (
        "deepseek_v3",
        lambda opened, patch: function("apply_rotary_pos_emb_interleave", lambda _right: _file(opened).apply_rotary_pos_emb)(
            opened, patch
        ),
    ),
    "positions that jump at a cut": ("gpt_oss", tables(lambda length, first, count: (length, first // 2, count))),
    "positions from the cut on": ("qwen3_moe", tables(lambda length, first, count: (length, 0, count))),
    "the short set beyond the original maximum": ("phimoe", tables(lambda _length, first, count: (40, first, count))),
    "keys one slot on": ("qwen3_moe", slots(lambda places: places.roll(1))),
    "keys in reverse": ("qwen3_moe", slots(lambda places: places.flip(0))),
}


def _file(opened: Opened) -> Any:
    return importlib.import_module(type(opened.packed.model).__module__)


def test_wrong_forms_are_seen_by_parity(opened, eager, monkeypatch):
    assert opened.distance(eager) < SEEN / 10
    for name, (arch, apply) in WRONG.items():
        if arch != opened.arch:
            continue
        with monkeypatch.context() as patch:
            apply(opened, patch)
            assert not opened.distance(eager) < SEEN, f"{name}: nothing was seen"
    assert torch.equal(opened.logits(), opened.right), "a test left something changed"


# What looks at other rows of a forward, and the module that must be named.
DEPENDENT: dict[str, tuple[Patch, str]] = {
    "a mean over rows": (
        module("post_attention_layernorm", lambda right: _Of(right, lambda x: x + 1e-6 * x.mean(dim=1, keepdim=True))),
        "layers.1.post_attention_layernorm",
    ),
    "one scale for all rows": (
        module("self_attn.q_proj", lambda right: _Of(right, lambda x: x.mul(64 / x.abs().amax()).round())),
        "layers.1.self_attn",
    ),
    "rows in the order of the packed step": (
        tables(lambda length, first, count: (length, first + count // 30, count)),
        "rotary_emb",
    ),
    "a row's place": (
        module("self_attn.o_proj", lambda right: _Of(right, lambda x: x * (1 + 1e-6 * torch.arange(x.shape[1])[:, None]))),
        "layers.1.self_attn",
    ),
    "a router that fills experts": (
        module("mlp.gate", lambda right: _Filled(right)),
        "layers.1.mlp",
    ),
}  # fmt: skip


class _Filled(nn.Module):
    """A router that gives a row's second choice up where its expert is taken often."""

    def __init__(self, right: nn.Module) -> None:
        super().__init__()
        self.right = right

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, weights, ids = self.right(rows)
        return logits, weights * (1 - 1e-3 * (torch.bincount(ids.flatten(), minlength=8)[ids] > 9)), ids


@pytest.mark.parametrize("opened", ["qwen3_moe"], indirect=True, scope="module")
def test_what_looks_at_other_rows_is_named(opened, monkeypatch):
    with without_experts(opened.packed.model):
        assert find_dependence(opened.packed) == ""
        for name, (apply, named) in DEPENDENT.items():
            with monkeypatch.context() as patch:
                apply(opened, patch)
                found = find_dependence(opened.packed)
            assert named in found, f"{name}: {found or 'nothing was seen'}"
        assert find_dependence(opened.packed) == ""
