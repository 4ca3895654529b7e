"""What cannot work ends vLLM's start with one of our sentences, before a weight is read.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

from bench.lab.vllm_process import VllmFailed
from tests.vllm.prompts import TWO_WORKERS, prompts

# What vLLM's loader says when it begins to read weights.
READS_WEIGHTS = "Loading weights took"


def refused(start, model, topology, **options):
    """Returns what a vLLM said that did not start."""
    with pytest.raises(VllmFailed) as failed, start(model, topology, **options):
        pass
    said = str(failed.value)
    assert READS_WEIGHTS not in said
    return said


def test_a_topology_that_does_not_parse(start, made):
    said = refused(start, made("qwen3_moe", "f32"), "version: 1\nwrokers: []\n")
    assert "did you mean 'workers'" in said


def test_a_setting_of_vllm_with_which_experts_cannot_be_ours(start, made):
    said = refused(start, made("qwen3_moe", "f32"), TWO_WORKERS, load_format="dummy")
    assert "DFLASH_MOE_TOPOLOGY is set and so is vLLM's --load-format dummy" in said


def test_a_misspelt_variable_of_ours(start, made):
    said = refused(start, made("qwen3_moe", "f32"), TWO_WORKERS, environment={"DFLASH_MOE_NUMERIX": "exact"})
    assert "DFLASH_MOE_NUMERIX is not a setting; did you mean 'DFLASH_MOE_NUMERICS'" in said


def test_a_worker_that_nobody_started(start, made):
    topology = (
        "version: 1\nipc: {start_timeout_s: 2, encryption: off}\n"
        "workers:\n  - {name: far, backend: cpu, address: 'tcp://127.0.0.1:9'}\n"
    )
    said = refused(start, made("qwen3_moe", "f32"), topology)
    assert "far" in said
    assert "127.0.0.1:9" in said


def test_a_model_without_routed_experts(start, tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    config = Qwen3Config(vocab_size=257, hidden_size=128, intermediate_size=64, num_hidden_layers=1, **heads)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    said = refused(start, tmp_path, TWO_WORKERS)
    assert "has no routed experts" in said
    assert "unset it" in said


def test_without_the_variable_vllm_has_its_own_experts(start, made):
    with start(made("qwen3_moe", "f32")) as plain:
        plain.generate(prompts(1))
        (rank,) = plain.look()
    assert rank["expert_bytes"] > 0
    assert rank["classes"] == ["RoutedExperts"]
