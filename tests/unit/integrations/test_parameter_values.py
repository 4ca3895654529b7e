"""Parameters made a few at a time: the same values as the loader's, experts one by one where their
tensors allow it, and together where they do not.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

from bench.models.families import tiny_options
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.make import make_checkpoint

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.transformers


@pytest.fixture(params=["mixtral", "gpt_oss"])
def loaded(request, tmp_path):
    """Values of a checkpoint, the whole model, and the name of its first experts module."""
    from dflash_moe.integrations.host_weights import load_whole
    from dflash_moe.integrations.parameter_values import ParameterValues
    from dflash_moe.model.architecture import load_architecture

    make_checkpoint(tiny_options(request.param), tmp_path)
    architecture = load_architecture(Checkpoint.open(tmp_path))
    values = ParameterValues(architecture.model, Checkpoint.open(tmp_path), torch.bfloat16)
    return values, load_whole(tmp_path, "f32"), next(iter(architecture.experts))


def test_an_expert_alone_has_its_part_of_each_parameter(loaded):
    values, model, module = loaded
    expected = model.get_submodule(module)
    names = list(expected._parameters)
    found = dict(values.experts(module, (5, 0, 7), names))
    assert list(found) == [5, 0, 7]
    for expert, parameters in found.items():
        for name in names:
            assert torch.equal(parameters[name], expected._parameters[name][expert : expert + 1])


def test_experts_that_no_conversion_makes_one_by_one_are_cut_from_all(loaded, monkeypatch):
    values, model, module = loaded
    monkeypatch.setattr(type(values), "_one", lambda *_: None)
    expected = model.get_submodule(module)._parameters["down_proj"]
    found = dict(values.experts(module, range(3), ["down_proj"]))
    assert all(torch.equal(found[expert]["down_proj"][0], expected[expert]) for expert in range(3))


def test_only_what_the_checkpoint_has_is_had(loaded):
    values, model, _ = loaded
    assert all(values.has(name) for name, _ in model.named_parameters())
    assert not values.has("model.layers.9.mlp.gate.weight")


def test_a_damaged_tensor_of_one_expert_is_an_error_of_ours(loaded, monkeypatch):
    from dflash_moe.errors import CheckpointError

    values, _, module = loaded
    monkeypatch.setattr(Checkpoint, "values", lambda *_: (_ for _ in ()).throw(CheckpointError("planted")))
    with pytest.raises(CheckpointError, match="planted"):
        list(values.experts(module, range(8), ["down_proj"]))
