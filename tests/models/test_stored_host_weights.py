"""The dense weights of a quantised checkpoint are packed as they are stored, and never loaded into
torch.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

pytest.importorskip("gguf")
torch = pytest.importorskip("torch")

from bench.models.gguf_files import write_gguf  # noqa: E402
from bench.models.quantised_files import write_fp8  # noqa: E402
from dflash_moe.errors import CheckpointError  # noqa: E402
from dflash_moe.experts.expert_runtime import ExpertRuntime  # noqa: E402
from dflash_moe.forward import host_model  # noqa: E402
from dflash_moe.forward.forward import StepRows  # noqa: E402
from dflash_moe.forward.host_model import open_host  # noqa: E402
from dflash_moe.integrations.transformers import load_model  # noqa: E402
from dflash_moe.model.dense_tensors import stored_matrices  # noqa: E402
from dflash_moe.model.make import MakeOptions, make_checkpoint  # noqa: E402
from dflash_moe.topology import Topology  # noqa: E402

OPTIONS = MakeOptions(
    "qwen3_moe", num_layers=2, hidden_size=256, num_experts=4, top_k=2, moe_intermediate_size=256, dtype="f32"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "model"
    make_checkpoint(OPTIONS, folder)
    return folder


@pytest.mark.parametrize("host_format", ["q8_0", "q4_0", "q4_k", "q6_k", "gguf_mxfp4", "q2_k", "q5_0"])
def test_linear_layers_and_embedding_are_packed_as_stored(source, tmp_path, host_format):
    path = write_gguf(source, tmp_path / "model.gguf", host=host_format)
    with ExpertRuntime.start(Topology.local(1, address="loopback"), model=path, dtype="f32") as runtime:
        host = open_host(path, runtime, dtype=torch.float32)
        assert host.packed is not None, host.report.not_paged
        forms = {finding.module: finding.form for finding in host.report.taken if finding.operator in ("linear", "embedding")}
        assert set(forms) >= {"model.embed_tokens", "lm_head", "model.layers.1.self_attn.q_proj"}
        assert {form.partition(",")[0] for form in forms.values()} == {host_format}
        assert not host.report.not_independent
        token_ids = list(range(3, 40))
        ours = host.packed.forward([StepRows(host.packed.admit(64), token_ids, num_logits=len(token_ids))])
        # The same numbers, dequantised, in torch.
        with torch.inference_mode():
            theirs = load_model(path, runtime, dtype=torch.float32)(input_ids=torch.tensor([token_ids])).logits[0]
    difference = (ours - theirs) / theirs.std()
    assert float(difference.abs().max()) <= 1e-5


def test_a_latent_attention_packs_all_but_what_expands_its_latents(tmp_path):
    source = tmp_path / "source"
    make_checkpoint(replace(OPTIONS, arch="deepseek_v3"), source)
    path = write_fp8(source, tmp_path / "fp8")
    with ExpertRuntime.start(Topology.local(1, address="loopback"), model=path, dtype="f32") as runtime:
        host = open_host(path, runtime, dtype=torch.float32)
        assert host.packed is not None, host.report.not_paged
        forms = {finding.module: finding.form for finding in host.report.taken if finding.operator == "linear"}
        for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"):
            assert forms[f"model.layers.1.self_attn.{name}"].startswith("fp8_e4m3_b128,")
        token_ids = list(range(3, 40))
        ours = host.packed.forward([StepRows(host.packed.admit(64), token_ids, num_logits=len(token_ids))])
        with torch.inference_mode():
            theirs = load_model(path, runtime, dtype=torch.float32)(input_ids=torch.tensor([token_ids])).logits[0]
    difference = (ours - theirs) / theirs.std()
    assert float(difference.abs().max()) <= 1e-5


def test_a_model_that_is_not_taken_over_is_loaded_whole(source, tmp_path):
    path = write_gguf(source, tmp_path / "model.gguf", host="q8_0")
    with ExpertRuntime.start(Topology.local(1, address="loopback"), model=path, host_operators="torch") as runtime:
        host = open_host(path, runtime)
        assert host.report.not_taken == "host.operators: torch"
        assert host.model.lm_head.weight is not None
        run = host.sequence(8)
        assert torch.isfinite(run.forward([1, 2, 3])).all()


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.o_proj"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_matrix_that_was_packed_from_another_ones_bytes_ends_the_start(source, tmp_path, monkeypatch, name, layer):
    """Of two that differ in nothing but values one is proven by rows, the other by values."""
    path = write_gguf(source, tmp_path / "model.gguf", host="q4_k")

    def exchanged(model, checkpoint):
        found = stored_matrices(model, checkpoint)
        wrong, other = (f"model.layers.{at}.{name}.weight" for at in (layer, 1 - layer))
        return found | {wrong: replace(found[wrong], source=found[other].source)}

    monkeypatch.setattr(host_model, "stored_matrices", exchanged)
    message = rf"^tensor 'blk\.{layer}\..*': packed, it is .* times as far off"
    with (
        ExpertRuntime.start(Topology.local(1, address="loopback"), model=path, dtype="f32") as runtime,
        pytest.raises(CheckpointError, match=message),
    ):
        open_host(path, runtime, dtype=torch.float32)


def test_a_tied_output_shares_the_packed_embedding(source, tmp_path):
    folder = tmp_path / "tied"
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    path = write_gguf(folder, tmp_path / "model.gguf", host="q8_0")
    with ExpertRuntime.start(Topology.local(1, address="loopback"), model=path) as runtime:
        model = open_host(path, runtime).model
        assert model.lm_head.packed is model.model.embed_tokens.packed
