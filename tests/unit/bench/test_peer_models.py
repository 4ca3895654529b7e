"""The random model of engine_against_peers.py: its three forms hold the same values, and the real
shape in Q4_K has the codes, sizes and bytes that it says.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from bench.peers import model as peer_model
from bench.peers.model import LARGEST, PEERS, Q4_K_DEVIATION, REAL, TINY, exact_values, model_path
from dflash_moe.model.checkpoint import Checkpoint

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "model.layers.1.self_attn.k_proj.weight": "blk.1.attn_k.weight",
    "model.layers.1.self_attn.q_norm.weight": "blk.1.attn_q_norm.weight",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint.open(model_path(folder, TINY, "bf16"))


def tensors(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(str(path)).tensors}


def values(tensor: gguf.ReaderTensor) -> np.ndarray:
    return gguf.quants.dequantize(np.asarray(tensor.data), tensor.tensor_type)


@pytest.mark.parametrize("deviation", [1.0, 0.05, 384**-0.5, 1024**-0.5, 2048**-0.5])
def test_drawn_values_are_exact_in_bf16_and_f16(deviation: float) -> None:
    drawn = exact_values((512, 300), deviation, torch.Generator().manual_seed(1))
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(drawn.to(dtype).float(), drawn)
    numbers = drawn / drawn[drawn != 0].abs().min()
    assert torch.equal(numbers, numbers.round())
    assert numbers.abs().max() <= LARGEST
    assert float(drawn.std()) == pytest.approx(deviation, rel=0.01)


def test_the_checkpoint_is_qwen3_moe_with_a_tensor_for_each_matrix_of_an_expert(checkpoint: Checkpoint) -> None:
    config = checkpoint.config()
    assert config["model_type"] == "qwen3_moe"
    assert config["norm_topk_prob"] is True
    assert config["dtype"] == "bfloat16"
    last = f"model.layers.{TINY.num_layers - 1}.mlp.experts.{TINY.num_experts - 1}.down_proj.weight"
    assert checkpoint.values(last).shape == (TINY.hidden_size, TINY.moe_intermediate_size)


def test_f16_holds_the_values_of_bf16(folder: Path, checkpoint: Checkpoint) -> None:
    found = tensors(model_path(folder, TINY, "f16"))
    for source, name in NAMES.items():
        np.testing.assert_array_equal(values(found[name]), checkpoint.values(source))
    for expert in range(TINY.num_experts):
        source = f"model.layers.0.mlp.experts.{expert}.up_proj.weight"
        np.testing.assert_array_equal(values(found["blk.0.ffn_up_exps.weight"])[expert], checkpoint.values(source))
    router = found["blk.0.ffn_gate_inp.weight"]
    assert router.tensor_type == gguf.GGMLQuantizationType.F32
    np.testing.assert_array_equal(router.data, checkpoint.values("model.layers.0.mlp.gate.weight"))


def test_q8_0_is_quantised_from_the_same_values(folder: Path, checkpoint: Checkpoint) -> None:
    found = tensors(model_path(folder, TINY, "q8_0"))
    kind = gguf.GGMLQuantizationType.Q8_0
    for source, name in NAMES.items():
        if not name.endswith("norm.weight"):
            np.testing.assert_array_equal(found[name].data, gguf.quantize(checkpoint.values(source), kind))
    assert found["blk.0.ffn_down_exps.weight"].tensor_type == kind


def test_random_codes_have_the_deviation_and_the_bytes_that_rows_count(folder: Path) -> None:
    path = model_path(folder, TINY, "q4_k")
    found = tensors(path)
    for name in ("output.weight", "blk.0.ffn_gate_exps.weight", "blk.1.attn_output.weight"):
        assert found[name].tensor_type == gguf.GGMLQuantizationType.Q4_K
        assert float(values(found[name]).std()) == pytest.approx(Q4_K_DEVIATION, rel=0.05)
        assert abs(float(values(found[name]).mean())) < 0.1 * Q4_K_DEVIATION
    assert np.unique(np.asarray(found["blk.0.ffn_gate_exps.weight"].data)[0]).size > 200
    not_counted = sum(t.n_bytes for t in found.values() if t.name.endswith("norm.weight") or t.name == "token_embd.weight")
    counted = sum(t.n_bytes for t in found.values()) - not_counted
    assert counted == TINY.weight_bytes("q4_k", experts=TINY.num_experts)
    Checkpoint.open(path)


def test_a_token_of_the_shapes_reads_what_the_documents_say() -> None:
    assert PEERS.token_bytes("f16", 544) == pytest.approx(363e6, rel=0.01)
    assert PEERS.kv_bytes(544) == 12 * 2 * 2 * 128 * 2 * 544
    everything = REAL.weight_bytes("q4_k", experts=REAL.num_experts)
    assert everything == pytest.approx(4.4e9, rel=0.01)


def test_a_model_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_shape: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(peer_model, "write_random_codes", fail)
    with pytest.raises(OSError, match="disk full"):
        model_path(tmp_path, TINY, "q4_k")
    assert not list(tmp_path.iterdir())


def test_a_model_is_made_once(folder: Path) -> None:
    said: list[str] = []
    assert model_path(folder, TINY, "bf16", said.append) == model_path(folder, TINY, "bf16", said.append)
    assert not said
