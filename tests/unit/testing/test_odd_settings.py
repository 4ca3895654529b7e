"""What odd settings are derived of configuration classes, and that a sweep over them sees a wrong
model.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest
import torch

from bench.models import family_sweep
from bench.models.families import tiny_options
from bench.models.family_sweep import try_setting
from bench.models.odd_models import default_text, odd_model, source_of
from bench.models.odd_rotary import ORIGINAL_MAX
from bench.models.odd_settings import TOKENS, WINDOW, OddSetting, most_dangerous, odd_settings, usual_fields
from dflash_moe.model.make import build_config

pytestmark = pytest.mark.transformers


def derived(arch: str) -> dict[str, OddSetting]:
    model = odd_model(arch, {})
    return {setting.name: setting for setting in odd_settings(model.config.get_text_config(), source_of(model), 12)}


def test_what_a_class_declares_none_gets_values_of_its_type():
    found = derived("olmoe")
    assert found["clip_qkv=8"].fields == {"clip_qkv": 8.0}
    assert found["norm_topk_prob=True"].fields == {"norm_topk_prob": True}
    assert not [name for name in found if "dropout" in name or "token_id" in name or "vocab" in name]


def test_every_model_goes_past_its_windows_and_original_positions():
    text = build_config(tiny_options("mistral4"), usual_fields(default_text("mistral4"))).get_text_config()
    assert text.max_position_embeddings == TOKENS
    assert text.rope_parameters["original_max_position_embeddings"] == ORIGINAL_MAX
    assert usual_fields(default_text("qwen2_moe"))["sliding_window"] == WINDOW
    assert 4 * max(ORIGINAL_MAX, WINDOW, text.hidden_size) < TOKENS


def test_rotary_kinds_keep_what_a_family_reads_itself():
    found = derived("mistral4")
    assert found["rope_parameters: longrope"].fields["rope_parameters"]["llama_4_scaling_beta"] == 0.1
    assert found["rope_parameters: llama_4_scaling_beta 0.2"].fields["rope_parameters"]["rope_type"] == "yarn"


def test_words_are_those_that_the_code_compares_a_field_with():
    assert {"topk_method=group_limited_greedy"} <= derived("deepseek_v2").keys()


def test_the_most_dangerous_are_of_kinds_that_are_overlooked_apart():
    usual = OddSetting("", {})
    chosen = most_dangerous([usual, *derived("olmoe").values()], 3)
    assert [setting.name for setting in chosen] == ["", "clip_qkv=8", "rope_parameters: longrope", "rope_parameters: yarn"]


def test_a_model_that_is_another_past_a_position_is_wrong(monkeypatch):
    right = family_sweep._logits

    def wrong(host, prompt):
        logits = right(host, prompt)
        logits[-1] += 1e-3 * logits.std() * torch.ones_like(logits[-1])
        return logits

    setting = OddSetting("", {})
    assert not try_setting("mixtral", setting, []).is_wrong
    monkeypatch.setattr(family_sweep, "_logits", wrong)
    assert try_setting("mixtral", setting, []).is_wrong
