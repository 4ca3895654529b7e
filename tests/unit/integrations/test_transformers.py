"""load_model and offload: the experts' weights stay away, the calls arrive, everything goes back to
what it was.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import dataclasses

import pytest

from bench.models.families import tiny_options
from dflash_moe import ExpertRuntime, Topology
from dflash_moe.errors import CheckpointError, ConfigError
from dflash_moe.model.make import build_model, make_checkpoint

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

LOOPBACK = "version: 1\nworkers:\n  - {name: w0, backend: cpu, threads: 1, address: loopback}\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(tiny_options("qwen3_moe", "f32"), directory)
    return directory


@pytest.fixture(scope="module")
def runtime(checkpoint):
    with ExpertRuntime.start(Topology.parse(LOOPBACK), model=checkpoint, mode="batched") as started:
        yield started


@pytest.fixture(scope="module")
def input_ids():
    return torch.randint(0, 256, (2, 11), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def eager(checkpoint):
    import transformers

    return transformers.Qwen3MoeForCausalLM.from_pretrained(checkpoint, experts_implementation="eager").eval()


@pytest.fixture
def host(checkpoint, runtime):
    from dflash_moe.integrations.transformers import load_model

    return load_model(checkpoint, runtime)


def logits_of(model, input_ids):
    with torch.no_grad():
        return model(input_ids=input_ids, use_cache=False).logits


def calls_of(model):
    from dflash_moe.integrations.transformers import expert_calls

    return list(expert_calls(model).values())


def test_a_loaded_model_has_no_expert_weights_and_computes_the_same(host, eager, runtime, input_ids):
    names = {name for name, _ in host.named_parameters()}
    assert not [name for name in names if ".experts." in name]
    # gate_up and down of two layers
    assert len(names) == len(list(eager.named_parameters())) - 2 * 2
    assert not [name for name, value in host.named_parameters() if value.is_meta]
    before = runtime.stats()["totals"]["calls"]
    difference = logits_of(host, input_ids) - logits_of(eager, input_ids)
    assert float(difference.abs().max()) < 1e-5
    assert runtime.stats()["totals"]["calls"] == before + 2
    assert calls_of(host) == [1, 1]
    assert type(host) is type(eager)


def test_generation_goes_through_the_runtime(host, eager, input_ids):
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(host.generate(input_ids, **options), eager.generate(input_ids, **options))
    assert calls_of(host) == [5, 5]


def test_the_dtype_can_be_chosen(checkpoint, runtime, input_ids):
    from dflash_moe.integrations.transformers import load_model

    model = load_model(checkpoint, runtime, dtype=torch.bfloat16)
    assert logits_of(model, input_ids).dtype == torch.bfloat16


def test_another_checkpoint_is_refused(tmp_path, runtime):
    from dflash_moe.integrations.transformers import load_model

    make_checkpoint(tiny_options("mixtral"), tmp_path)
    with pytest.raises(ConfigError, match="is not the checkpoint the runtime serves"):
        load_model(tmp_path, runtime)


def test_missing_weights_of_the_host_are_named(tmp_path, eager, runtime, monkeypatch):
    from dflash_moe.integrations import transformers as integration

    state = {name: value for name, value in eager.state_dict().items() if "q_norm" not in name}
    eager.save_pretrained(tmp_path, state_dict=state)
    monkeypatch.setattr(integration.Checkpoint, "fingerprint", lambda _self: runtime.spec.fingerprint)
    with pytest.raises(CheckpointError, match=r"lacks 2 tensors of Qwen3MoeForCausalLM, first model\.layers\.0\..*q_norm"):
        integration.load_model(tmp_path, runtime)


def test_offload_swaps_and_restores_even_after_an_error(eager, runtime, input_ids):
    from dflash_moe.integrations.transformers import offload

    configs = [module.config for module in eager.modules() if hasattr(module, "config")]
    expected = logits_of(eager, input_ids)
    with offload(eager, runtime):
        swapped = logits_of(eager, input_ids)
        assert calls_of(eager) == [1, 1]
    with pytest.raises(IndexError), offload(eager, runtime):
        eager(input_ids=input_ids + 10_000)
    assert float((swapped - expected).abs().max()) < 1e-5
    assert not torch.equal(swapped, torch.zeros_like(swapped))
    assert torch.equal(logits_of(eager, input_ids), expected)
    assert calls_of(eager) == []
    assert all(a is b for a, b in zip(configs, (m.config for m in eager.modules() if hasattr(m, "config")), strict=True))


def test_offload_leaves_other_models_of_the_same_configuration_alone(eager, runtime, input_ids):
    from dflash_moe.integrations.transformers import offload

    other = copy.deepcopy(eager)
    for module in other.modules():
        if hasattr(module, "config"):
            module.config = eager.config
    before = runtime.stats()["totals"]["calls"]
    with offload(eager, runtime):
        logits_of(other, input_ids)
    assert runtime.stats()["totals"]["calls"] == before


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("mixtral", {}, "configured by MixtralConfig, the runtime's by Qwen3MoeConfig"),
        ("qwen3_moe", {"num_layers": 3}, "3 layers with routed experts, the runtime 2; only one of them has model.layers.2"),
        ("qwen3_moe", {"num_experts": 4}, r"down_proj has shape \[4, 96, 40\]"),
    ],
)
def test_offload_of_a_model_that_does_not_fit_is_refused(runtime, arch, changes, message):
    from dflash_moe.integrations.transformers import offload

    model = build_model(dataclasses.replace(tiny_options(arch), **changes))
    with pytest.raises(ConfigError, match=message), offload(model, runtime):
        pass
    assert calls_of(model) == []


def test_inputs_that_require_grad_are_refused(host):
    with pytest.raises(ConfigError, match="require grad"):
        host(input_ids=torch.tensor([[1, 2]]))


def test_a_module_without_a_runtime_says_how_to_get_one(eager, input_ids):
    eager.set_experts_implementation("dflash_moe")
    with pytest.raises(ConfigError, match=r"Qwen3MoeExperts has no runtime: .*load_model"):
        logits_of(eager, input_ids)


def test_compilation_sees_one_operator_per_layer(host, runtime, input_ids):
    expected = logits_of(host, input_ids)
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(host.model.layers[0].mlp, backend=backend, fullgraph=True)
    hidden = torch.randn(1, 9, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = calls_of(host)[0]
        assert torch.equal(compiled(hidden), host.model.layers[0].mlp(hidden))
        assert calls_of(host)[0] == before + 2
    operators = [node for graph in graphs for node in graph.graph.nodes if "dflash_moe" in str(node.target)]
    assert len(operators) == 1
    assert torch.equal(logits_of(host, input_ids), expected)


def test_sentinel_ids_and_weights_in_the_models_dtype_are_taken(host):
    module = host.model.layers[0].mlp.experts
    hidden = torch.randn(3, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights = torch.tensor([[0.5, 0.5]] * 3, dtype=torch.bfloat16)
    with torch.no_grad():
        one = module(hidden, torch.tensor([[1, 8]] * 3), weights)
        both = module(hidden, torch.tensor([[1, 2]] * 3), weights)
        other = module(hidden, torch.tensor([[8, 2]] * 3), weights)
    assert one.dtype == torch.bfloat16
    assert torch.allclose((one.float() + other.float()), both.float(), atol=0.05)
    assert not torch.equal(one, both)
