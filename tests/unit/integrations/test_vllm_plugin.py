"""The plug-in of vLLM as far as it needs no vLLM: when it does nothing, what it refuses, and which
tensors of a checkpoint it leaves out. The rest is in tests/vllm.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_moe.errors import ConfigError, TopologyError, UnsupportedError
from dflash_moe.integrations.vllm.refusals import refuse_layer, refuse_settings
from dflash_moe.integrations.vllm.registration import register
from dflash_moe.integrations.vllm.versions import check_version
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.make import make_checkpoint
from dflash_moe.model.spec import model_spec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from bench.models.families import tiny_options  # noqa: E402 - makes models
from dflash_moe.integrations.engine_experts import EngineExperts, spec_for  # noqa: E402 - needs torch
from dflash_moe.integrations.expert_route import Detours, ExpertRoute  # noqa: E402 - needs torch

ROOT = Path(__file__).parents[3]
PARALLEL = {
    "pipeline_parallel_size": 1, "data_parallel_size": 1, "prefill_context_parallel_size": 1,
    "decode_context_parallel_size": 1, "enable_expert_parallel": False, "enable_eplb": False, "enable_elastic_ep": False,
    "enable_dbo": False, "use_sequence_parallel_moe": False,
}  # fmt: skip


def vllm_config(model="model", *, parallel=None, device="cpu", **fields):
    """What the plug-in reads of a VllmConfig."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**PARALLEL | (parallel or {})),
        load_config=SimpleNamespace(load_format=fields.get("load_format", "auto"), download_dir=None),
        lora_config=fields.get("lora_config"),
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(model=model, revision=None, dtype=torch.float32, enforce_eager=fields.get("eager", True)),
    )


# -- the door --------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["dflash_moe_vllm", "dflash_moe_sglang"])
def test_without_the_variable_nothing_is_imported(door):
    env = {name: value for name, value in os.environ.items() if not name.startswith("DFLASH_MOE_")}
    code = (
        f"import sys, {door}; {door}.register();"
        "print([name for name in sys.modules if name.split('.')[0] in ('dflash_moe', 'torch', 'vllm', 'sglang')])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "DFLASH_MOE_TOPOLOGY: '' is not allowed; allowed: path of a topology"),
        ("nowhere.yaml", "nowhere.yaml"),
    ],
)
def test_a_variable_that_names_no_topology_is_an_error(value, said):
    with pytest.raises((ConfigError, TopologyError), match=said.replace(".", r"\.")):
        register(value)


def test_a_topology_that_does_not_parse_is_an_error(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text("version: 1\nwrokers: []\n")
    with pytest.raises(TopologyError, match=r"two\.yaml:2: .*did you mean 'workers'"):
        register(str(path))


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "1.0", "dev"])
def test_a_version_outside_of_the_window_is_refused_with_both(version):
    with pytest.raises(UnsupportedError, match=rf"vLLM is {version}: .*>=0\.32,<0\.33; pip install 'vllm>=0\.32,<0\.33'"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.dev3+gabc", "0.32.0+cpu"])
def test_a_version_within_the_window_is_taken(version):
    check_version(version)


# -- settings of vLLM ------------------------------------------------------------------------------


def test_what_works_is_not_refused():
    refuse_settings(vllm_config())
    refuse_settings(vllm_config(device="cuda"))
    refuse_settings(vllm_config(load_format="safetensors"))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (vllm_config(parallel={"pipeline_parallel_size": 2}), "--pipeline-parallel-size 2"),
        (vllm_config(parallel={"data_parallel_size": 4}), "--data-parallel-size 4"),
        (vllm_config(parallel={"prefill_context_parallel_size": 2}), "--prefill-context-parallel-size 2"),
        (vllm_config(parallel={"decode_context_parallel_size": 2}), "--decode-context-parallel-size 2"),
        (vllm_config(parallel={"enable_expert_parallel": True}), "--enable-expert-parallel"),
        (vllm_config(parallel={"enable_eplb": True}), "--enable-eplb"),
        (vllm_config(parallel={"enable_elastic_ep": True}), "--enable-elastic-ep"),
        (vllm_config(parallel={"enable_dbo": True}), "--enable-dbo"),
        (vllm_config(parallel={"use_sequence_parallel_moe": True}), "sequence parallel"),
        (vllm_config(lora_config=object()), "--enable-lora"),
        (vllm_config(load_format="tensorizer"), "--load-format tensorizer"),
        (vllm_config(load_format="dummy"), "--load-format dummy"),
        (vllm_config(device="cuda", eager=False), "--enforce-eager"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_flag(config, named):
    with pytest.raises(UnsupportedError, match=named) as raised:
        refuse_settings(config)
    assert "DFLASH_MOE_TOPOLOGY" in str(raised.value)


# -- layers ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")

    def make(arch):
        if not (folder / arch).is_dir():
            make_checkpoint(tiny_options(arch, "f32"), folder / arch)
        return folder / arch

    return make


def moe_of(layer, **changed):
    fields = {"num_experts": layer.num_experts, "hidden_dim": layer.ffn.in_size}
    return SimpleNamespace(**fields | changed)


def test_a_layer_that_is_not_the_checkpoints_is_refused(checkpoints):
    layer = model_spec(checkpoints("qwen3_moe")).layers[0]
    refuse_layer("model.layers.0.mlp.experts", layer, moe_of(layer), {"apply_router_weight_on_input": False})
    with pytest.raises(UnsupportedError, match="draft model"):
        refuse_layer("model.layers.7.mtp_block.mlp.experts", None, moe_of(layer), {})
    with pytest.raises(UnsupportedError, match="apply_router_weight_on_input"):
        refuse_layer("one", layer, moe_of(layer), {"apply_router_weight_on_input": True})
    with pytest.raises(UnsupportedError, match=r"\(9, 96\), the checkpoint's \(8, 96\)"):
        refuse_layer("one", layer, moe_of(layer, num_experts=9), {})


@pytest.fixture
def other_rank(checkpoints):
    """The experts of a rank that calls nobody, which needs no workers."""

    def of(arch):
        spec = spec_for(checkpoints(arch), torch.float32)
        return EngineExperts(spec, Path("unread.yaml"), device="cpu", is_caller=False, cpus=[])

    return of


def test_a_rank_that_is_not_the_first_starts_no_worker_and_has_no_way_to_one(other_rank):
    engine = other_rank("qwen3_moe")
    for number in range(2):
        layer = engine.layer(f"model.layers.{number}.mlp.experts")
        assert layer.index == number
        assert engine.route(layer.name, layer) is None
    engine.all_built()
    assert engine.layer("model.layers.2.mlp.experts") is None
    assert engine.layer("mtp.experts") is None


def test_a_layer_that_vllm_did_not_build_is_an_error(other_rank):
    engine = other_rank("qwen3_moe")
    first = engine.layer("model.layers.0.mlp.experts")
    engine.route(first.name, first)
    with pytest.raises(UnsupportedError, match="layer 0 is built twice"):
        engine.route(first.name, first)
    with pytest.raises(UnsupportedError, match=r"of 2 layers .* 1 were built .*model\.layers\.1\.mlp\.experts was not"):
        engine.all_built()


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss", "granitemoe", "glm4_moe", "phimoe"])
def test_tensors_of_routed_experts_are_left_out_and_no_others(other_rank, checkpoints, arch):
    engine = other_rank(arch)
    left_out = engine.expert_tensors()
    names = Checkpoint.open(checkpoints(arch)).tensors
    found = {name for name in names if left_out.match(name)}
    # What is left is what a model without routed experts has.
    kept = sum(torch.Size(names[name].shape).numel() for name in names if name not in found)
    experts = sum(torch.Size(names[name].shape).numel() for name in found)
    layers = engine.spec.layers
    assert experts == sum(
        layer.num_experts * (layer.ffn.in_size * layer.ffn.intermediate_size * 3 + biases(layer.ffn)) for layer in layers
    )
    assert kept > 0
    assert not any("shared" in name or "router" in name or name.endswith("gate.weight") for name in found)


def biases(ffn):
    """How many values of biases one expert has."""
    return (2 * ffn.intermediate_size if ffn.has_gate_up_bias else 0) + (ffn.out_size if ffn.has_down_bias else 0)


def test_scales_beside_a_matrix_belong_to_it_and_longer_names_do_not(other_rank):
    left_out = other_rank("qwen3_moe").expert_tensors()
    prefix = "model.layers.0.mlp"
    assert left_out.match(f"{prefix}.experts.3.gate_proj.weight_scale_inv")
    assert not left_out.match(f"{prefix}.experts.3.gate_projection.weight")
    assert not left_out.match(f"{prefix}.gate.weight")
    assert not left_out.match("model.layers.5.mlp.experts.3.gate_proj.weight")


# -- routes ----------------------------------------------------------------------------------------


def test_a_routes_key_is_its_layers_name_and_free_again_when_it_is_gone(checkpoints):
    # Other tests of this process may have models with routes of the usual names.
    layer = dataclasses.replace(model_spec(checkpoints("qwen3_moe")).layers[0], name="a.layer.of.this.test")
    first = ExpertRoute(None, layer, Detours())
    second = ExpertRoute(None, layer, Detours())
    assert (first.key, second.key) == (layer.name, f"{layer.name}#2")
    del first
    gc.collect()
    assert ExpertRoute(None, layer, Detours()).key == layer.name
