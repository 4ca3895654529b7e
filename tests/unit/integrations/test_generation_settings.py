"""The tokens that end an answer and the sampling that a checkpoint recommends.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json

import pytest

from dflash_moe.errors import CheckpointError
from dflash_moe.integrations.generation_settings import GenerationSettings, read_generation_settings


def directory(path, **settings):
    (path / "model.safetensors").write_bytes(b"")
    (path / "generation_config.json").write_text(json.dumps(settings))
    return path


def test_a_directory_has_them_in_generation_config(tmp_path):
    made = directory(tmp_path, eos_token_id=[7, 5], do_sample=True, temperature=0.6, top_k=20, top_p=0.95, max_length=9)
    found = read_generation_settings(made)
    assert found.stop_token_ids == {5, 7}
    assert found.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_values_of_greedy_generation_are_no_recommendation(tmp_path):
    assert read_generation_settings(directory(tmp_path, eos_token_id=3, temperature=0.6)) == GenerationSettings(frozenset({3}))


def test_without_the_file_nothing_is_recommended(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert read_generation_settings(tmp_path) == GenerationSettings()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"eos_token_id": ["<|end|>"]}, r"eos_token_id is '<\|end\|>', expected the id of a token"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": True}, "eos_token_id is True"),
        ({"do_sample": True, "temperature": "warm"}, "temperature is 'warm', expected a number"),
    ],
)
def test_what_is_no_id_and_no_number_is_named(tmp_path, settings, words):
    with pytest.raises(CheckpointError, match=words):
        read_generation_settings(directory(tmp_path, **settings))


def test_a_gguf_file_has_them_in_its_metadata(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "qwen3moe")
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(9)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 20)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_generation_settings(tmp_path / "m.gguf")
    assert found.stop_token_ids == {3, 9}
    assert found.sampling == {"temperature": 0.5, "top_k": 20}
