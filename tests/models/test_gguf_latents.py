"""A GGUF file for absorbed latent attention: the host computes with the matrices of its heads as
the file stores them, and the whole model passes `verify`.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

import pytest

gguf = pytest.importorskip("gguf", reason="the gguf package is an extra of the tests")
pytestmark = pytest.mark.transformers

GOLDENS = Path(__file__).parents[1] / "golden" / "gguf"
STORED = {"attn_k_b.weight": "Q8_0", "attn_v_b.weight": "Q4_0"}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Returns the file that llama.cpp's converter made, with the matrices of heads quantised."""
    import numpy as np

    from bench.models.gguf_goldens import unpack

    folder = tmp_path_factory.mktemp("latents")
    reader = gguf.GGUFReader(str(unpack(GOLDENS, "deepseek2-v3", folder / "f32.gguf")))
    writer = gguf.GGUFWriter(str(folder / "quantised.gguf"), "deepseek2")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.")):
            writer.add_key_value(key, field.contents(), *field.types[:2])
    for tensor in reader.tensors:
        kind = gguf.GGMLQuantizationType[STORED.get(tensor.name.split(".", 2)[-1], "F32")]
        # Weights with more than a few values are not exact in bf16.
        value = np.asarray(tensor.data) * np.linspace(0.9, 1.1, tensor.data.shape[-1], dtype=np.float32)
        writer.add_tensor(tensor.name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "quantised.gguf"


def test_heads_are_those_of_the_file(file, monkeypatch):
    import torch

    from dflash_moe.experts.expert_runtime import ExpertRuntime
    from dflash_moe.forward import host_model
    from dflash_moe.model.architecture import load_architecture
    from dflash_moe.model.checkpoint import Checkpoint
    from dflash_moe.model.dense_tensors import stored_latents
    from dflash_moe.model.spec import model_spec
    from dflash_moe.topology import Topology

    checkpoint = Checkpoint.open(file)
    latents = stored_latents(load_architecture(checkpoint).model, checkpoint)
    assert sorted(latents) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    with ExpertRuntime.start(Topology.local(1), model=model_spec(file, "bf16")) as runtime:
        taken = []
        take = host_model.take_latent_heads
        monkeypatch.setattr(host_model, "take_latent_heads", lambda *given: taken.append(take(*given)) or taken[-1])
        assert host_model.open_host(file, runtime).packed is not None
        for (heads, reason), found in zip(taken, latents.values(), strict=True):
            assert reason == ""
            assert (heads.keys.formats[0], heads.values.formats[0]) == ("q8_0", "q4_0")
            assert torch.equal(heads.exact().weight, torch.from_numpy(found.joined()).double())


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_model_passes_verify(file, dtype):
    from dflash_moe.proofs.verify import verify
    from dflash_moe.topology import Topology

    assert verify(file, Topology.local(1), dtype=dtype).excesses == []
