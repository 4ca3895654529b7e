"""The longest request is the least of what model, KV cache and settings allow, and is taken.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from dflash_moe.engine.engine import Engine
from dflash_moe.engine.engine_settings import EngineSettings
from dflash_moe.engine.prompt_check import checked_prompt, length_limit
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.errors import ConfigError
from tests.token_forward import BLOCK_TOKENS, TokenForward


def forward_of(positions: int, num_blocks: int) -> TokenForward:
    forward = TokenForward(num_blocks)
    config = SimpleNamespace(max_position_embeddings=positions)
    config.get_text_config = lambda: config
    forward.model = SimpleNamespace(config=config)
    return forward


@pytest.mark.parametrize(
    ("positions", "num_blocks", "max_context", "num_tokens", "reason"),
    [
        (100, 50, None, 100, "for which the model has positions"),
        (0, 10, None, 10 * BLOCK_TOKENS, "for which the KV cache has room"),
        (100, 50, 30, 30, "which --max-context allows"),
        (100, 50, 3000, 100, "for which the model has positions"),
    ],
)
def test_the_least_limit_counts_and_says_what_it_is(positions, num_blocks, max_context, num_tokens, reason):
    found = length_limit(forward_of(positions, num_blocks), EngineSettings(max_context=max_context))
    assert found.num_tokens == num_tokens
    assert found.reason.startswith(reason)


def test_a_request_of_the_limit_is_taken_and_a_longer_one_refused():
    forward, settings = forward_of(0, 10), EngineSettings(max_context=33)
    most = length_limit(forward, settings).num_tokens
    assert checked_prompt(forward, "r", [1], SamplingParams(max_tokens=most - 1), settings) == [1]
    with pytest.raises(ConfigError):
        checked_prompt(forward, "r", [1], SamplingParams(max_tokens=most), settings)


def test_what_has_room_is_taken_and_one_token_more_refused():
    forward = forward_of(0, 10)
    with Engine(forward, EngineSettings(max_context=33)) as engine:
        assert [engine.room(num_prompt) for num_prompt in (1, 30, 32, 33, 500)] == [32, 3, 1, 0, 0]
        for num_prompt in (1, 30, 32):
            prompt, room = [1] * num_prompt, engine.room(num_prompt)
            engine.submit(prompt, SamplingParams(max_tokens=room)).cancel()
            with pytest.raises(ConfigError, match="33"):
                engine.submit(prompt, SamplingParams(max_tokens=room + 1))
