"""What no command can run is refused before a model's code is imported, in one sentence that names
the thing, the reason and what to do.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from dflash_moe.cli.main import run
from dflash_moe.model.make import MakeOptions, make_checkpoint

COMMANDS = (["plan"], ["generate", "-p", "x"], ["chat"], ["verify"])


def refusals(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What each command says last of a model, its path taken out."""
    monkeypatch.setattr(sys, "stdin", open("/dev/null"))  # noqa: SIM115 - pytest's own fails where it is read
    said = set()
    for command in COMMANDS:
        assert run([*command, "-m", str(path)]) == 2, command
        said.add(capsys.readouterr().err.splitlines()[-1].replace(str(path), "PATH"))
    return said


@pytest.fixture
def model(tmp_path: Path) -> Path:
    made = MakeOptions("qwen3_moe", num_layers=1, hidden_size=64, num_experts=2, top_k=1, moe_intermediate_size=32, dtype="f32")
    make_checkpoint(made, tmp_path / "model")
    return tmp_path / "model"


def test_an_empty_folder(tmp_path, capsys, monkeypatch):
    assert refusals(tmp_path, capsys, monkeypatch) == {
        "checkpoint PATH: the folder is empty; pass the folder that config.json and *.safetensors are in, or a GGUF file"
    }


@pytest.mark.transformers
def test_a_folder_without_config_json(model, capsys, monkeypatch):
    (model / "config.json").unlink()
    assert refusals(model, capsys, monkeypatch) == {
        "checkpoint PATH: it has weights but no config.json, which says of what model they are; download the whole folder "
        "again, config.json and the tokenizer's files included"
    }
    assert run(["model", "inspect", str(model)]) == 2
    assert "it has weights but no config.json" in capsys.readouterr().err


@pytest.mark.transformers
def test_a_folder_without_weights(model, capsys, monkeypatch):
    (model / "model.safetensors").unlink()
    (said,) = refusals(model, capsys, monkeypatch)
    assert said.endswith("config.json is there without the weights; download the whole folder again")


@pytest.mark.transformers
def test_a_truncated_safetensors_file(model, capsys, monkeypatch):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (said,) = refusals(model, capsys, monkeypatch)
    assert re.fullmatch(r"PATH/model\.safetensors: tensor .*: ends at .*; it is truncated - download or copy it again", said)
    for num_bytes, words in ((100, "found a header length of"), (0, "found 0 bytes, too few")):
        weights.write_bytes(weights.read_bytes()[:num_bytes])
        (said,) = refusals(model, capsys, monkeypatch)
        assert said.startswith(f"PATH/model.safetensors: {words}")
        assert said.endswith("download or copy it again")


@pytest.mark.transformers
def test_a_dense_safetensors_model(tmp_path, capsys, monkeypatch):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    capsys.readouterr()
    assert refusals(tmp_path, capsys, monkeypatch) == {
        "checkpoint PATH: this 'qwen3' model is dense: it has no experts that workers could compute; transformers alone runs "
        "it, and llama.cpp alone runs a GGUF file of it"
    }
    # A name that sounds like experts is not enough; the model's own code then says the same.
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "num_experts": 0}))
    assert run(["plan", "-m", str(tmp_path)]) == 2
    assert "Qwen3ForCausalLM: the model is dense: it has no experts" in capsys.readouterr().err


@pytest.fixture
def dense_gguf(tmp_path: Path) -> Path:
    gguf = pytest.importorskip("gguf", reason="the gguf package is an extra of the tests")
    path = tmp_path / "dense.gguf"
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_tensor("token_embd.weight", np.zeros((16, 32), np.float32))
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((64, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_dense_gguf_model(dense_gguf, capsys, monkeypatch):
    assert refusals(dense_gguf, capsys, monkeypatch) == {
        "PATH: this 'qwen3' model is dense: it has no experts that workers could compute; llama.cpp alone runs it, as in "
        "`llama-cli -m dense.gguf`"
    }


def test_a_truncated_gguf_file(dense_gguf, capsys, monkeypatch):
    whole = dense_gguf.read_bytes()
    for num_bytes in (len(whole) - 4, 150, 30, 10, 0):
        dense_gguf.write_bytes(whole[:num_bytes])
        (said,) = refusals(dense_gguf, capsys, monkeypatch)
        assert re.fullmatch(r"PATH: .*download or copy it again", said), said
