"""With our workers vLLM gives the tokens that it gives by itself, and no expert is in its memory.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

from tests.vllm.prompts import TWO_WORKERS, prompts

# With routed experts alone, with shared ones beside them, with a router that chooses among groups,
# and with biases in experts.
FAMILIES = ("qwen3_moe", "qwen2_moe", "glm4_moe", "gpt_oss")
NUM_PROMPTS, NEW_TOKENS = 64, 16


@pytest.mark.parametrize("arch", FAMILIES)
def test_greedy_tokens_are_those_of_plain_vllm(start, made, arch):
    model, asked = made(arch, "f32"), prompts(NUM_PROMPTS)
    with start(model) as plain:
        expected = plain.generate(asked, max_tokens=NEW_TOKENS)["tokens"]
    with start(model, TWO_WORKERS) as ours:
        assert ours.generate(asked, max_tokens=NEW_TOKENS)["tokens"] == expected
        (rank,) = ours.look()
    assert rank["expert_bytes"] == 0
    assert all(name.startswith("Remote") for name in rank["classes"])
    assert min(rank["calls"]) >= NEW_TOKENS
    assert rank["totals"]["calls"] == sum(rank["calls"])


@pytest.mark.parametrize("arch", FAMILIES)
def test_in_bf16_where_tokens_part_both_were_as_likely(start, made, arch):
    """vLLM rounds between the two matrices of an expert where our workers do not, so that in bf16
    the two may choose otherwise. Where they first do, each gives the other's token nearly the same
    logit: within what one step of bf16 is at that size.
    """
    model, asked = made(arch, "bf16"), prompts(NUM_PROMPTS)
    with start(model) as plain:
        theirs = plain.generate(asked, max_tokens=NEW_TOKENS, logprobs=5)
    with start(model, TWO_WORKERS) as running:
        ours = running.generate(asked, max_tokens=NEW_TOKENS, logprobs=5)
    parted = 0
    for tokens, their_tokens, steps, their_steps in zip(
        ours["tokens"], theirs["tokens"], ours["logprobs"], theirs["logprobs"], strict=True
    ):
        for token, their_token, step, their_step in zip(tokens, their_tokens, steps, their_steps, strict=True):
            if token != their_token:
                parted += 1
                assert step[str(token)] - step[str(their_token)] < 2**-6 * abs(step[str(token)])
                assert their_step[str(their_token)] - their_step[str(token)] < 2**-6 * abs(their_step[str(token)])
                break
    assert parted < NUM_PROMPTS // 4


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen2_moe"])
def test_two_ranks_give_the_tokens_of_one(start, made, arch):
    model, asked = made(arch, "f32"), prompts(8)
    with start(model, TWO_WORKERS) as one:
        expected = one.generate(asked)["tokens"]
    with start(model, TWO_WORKERS, tensor_parallel_size=2) as two:
        assert two.generate(asked)["tokens"] == expected
        caller, other = sorted(two.look(), key=lambda rank: -sum(rank["calls"]))
    assert min(caller["calls"]) > 0
    assert set(other["calls"]) == {0}
    assert other["totals"] is None
    assert other["expert_bytes"] == 0


def test_what_vllm_compiled_for_one_start_serves_the_next(start, made, tmp_path):
    """Graphs that vLLM keeps on disk name a layer, and nothing of the process that made them."""
    model, asked = made("qwen3_moe", "f32"), prompts(8)
    with start(model) as plain:
        expected = plain.generate(asked)["tokens"]
    cache = {"VLLM_CACHE_ROOT": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    for _start in range(2):
        with start(model, TWO_WORKERS, environment=cache, enforce_eager=False) as ours:
            assert ours.generate(asked)["tokens"] == expected
            assert min(ours.look()[0]["calls"]) > 0


def test_chunks_of_prompts_a_prefix_cache_and_drafts_change_no_token(start, made):
    model = made("qwen3_moe", "f32")
    asked = [one * 4 for one in prompts(4, length=20)]
    with start(model) as plain:
        expected = plain.generate(asked)["tokens"]
    options = {
        "max_num_batched_tokens": 16, "max_num_seqs": 4, "enable_chunked_prefill": True, "enable_prefix_caching": True,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
    }  # fmt: skip
    with start(model, TWO_WORKERS, **options) as ours:
        for _again in range(2):
            assert ours.generate(asked)["tokens"] == expected
