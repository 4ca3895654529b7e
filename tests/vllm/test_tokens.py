"""With our workers vLLM gives the tokens that it gives by itself, and no expert is in its memory.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics

import pytest

from tests.vllm.prompts import TWO_WORKERS, prompts

# With shared experts beside the routed ones, with a router that chooses among groups, and with
# biases in experts.
FAMILIES = ("qwen2_moe", "glm4_moe", "gpt_oss")
NUM_PROMPTS, NEW_TOKENS = 64, 16
# As many log-probabilities as vLLM gives at most.
TOP = 20
# By itself vLLM runs a checkpoint of float32 in bfloat16.
F32 = {"dtype": "float32"}


@pytest.mark.parametrize("arch", FAMILIES)
def test_greedy_tokens_are_those_of_plain_vllm(start, made, arch):
    model, asked = made(arch, "f32"), prompts(NUM_PROMPTS)
    with start(model, **F32) as plain:
        expected = plain.generate(asked, max_tokens=NEW_TOKENS)["tokens"]
    with start(model, TWO_WORKERS, **F32) as ours:
        assert ours.generate(asked, max_tokens=NEW_TOKENS)["tokens"] == expected
        (rank,) = ours.look()
    assert rank["expert_bytes"] == 0
    assert all(name.startswith("Remote") for name in rank["classes"])
    assert min(rank["calls"]) >= NEW_TOKENS
    assert rank["totals"]["rows"] >= len(asked) * NEW_TOKENS


@pytest.mark.parametrize("arch", FAMILIES)
def test_in_bf16_logits_are_as_near_the_truth_as_plain_vllms(start, made, arch):
    """vLLM rounds between the two matrices of an expert where our workers do not, so that in bf16
    the two part where two tokens nearly tie. The truth is vLLM in float32: the logits of a prompt's
    next token are off by no more with our workers than with vLLM alone. The median counts, since a
    router that nearly ties may choose another expert on either side, which moves a prompt's logits
    by more than any rounding.
    """
    model, asked = made(arch, "bf16"), prompts(NUM_PROMPTS)
    with start(model, **F32) as truth:
        exact = truth.generate(asked, max_tokens=1, logprobs=TOP)["logprobs"]
    with start(model) as plain:
        theirs = plain.generate(asked, max_tokens=1, logprobs=TOP)["logprobs"]
    with start(model, TWO_WORKERS) as running:
        ours = running.generate(asked, max_tokens=1, logprobs=TOP)["logprobs"]
    assert error_of(ours, exact) <= 1.1 * error_of(theirs, exact)


def error_of(found: list, exact: list) -> float:
    """Returns the largest difference of a prompt's log-probabilities that both have, its median
    over prompts.
    """
    worst = []
    for (seen,), (true,) in zip(found, exact, strict=True):
        off = [abs(seen[token] - value) for token, value in true.items() if token in seen]
        assert len(off) > TOP // 2
        worst.append(max(off))
    return statistics.median(worst)


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen2_moe"])
def test_two_ranks_give_the_tokens_of_one(start, made, arch):
    model, asked = made(arch, "f32"), prompts(8)
    with start(model, TWO_WORKERS, **F32) as one:
        expected = one.generate(asked)["tokens"]
    with start(model, TWO_WORKERS, tensor_parallel_size=2, **F32) as two:
        assert two.generate(asked)["tokens"] == expected
        caller, other = sorted(two.look(), key=lambda rank: -sum(rank["calls"]))
    assert min(caller["calls"]) > 0
    assert set(other["calls"]) == {0}
    assert other["totals"] is None
    assert other["expert_bytes"] == 0


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen2_moe"])
def test_two_ranks_add_up_as_often_as_in_plain_vllm(start, made, arch):
    """A block of experts, shared ones included, is added up over the ranks once in a step, and our
    workers bring no further sum. How many steps there are is up to when requests arrive.
    """
    model, asked = made(arch, "f32"), prompts(8)
    tokens, sums = [], []
    for topology in (None, TWO_WORKERS):
        with start(model, topology, tensor_parallel_size=2, **F32) as two:
            before = two.look()
            two.count_sums()
            tokens.append(two.generate(asked, max_tokens=NEW_TOKENS)["tokens"])
            ranks = two.look()
        found, found_at_other = (rank["sums"] for rank in ranks)
        assert found == found_at_other
        steps = found.pop("steps")
        assert steps >= NEW_TOKENS
        sums.append({name: count / steps for name, count in found.items()})
    # The embedding, and of each of both layers the attention and the experts.
    assert sums == [{"all": 5, "experts 0": 1, "experts 1": 1}] * 2
    assert tokens[0] == tokens[1]
    # One rank calls the workers as often as blocks are added up, and the other never does.
    calls = [sum(now["calls"]) - sum(then["calls"]) for then, now in zip(before, ranks, strict=True)]
    assert sorted(calls) == [0, 2 * steps]


def test_what_vllm_compiled_for_one_start_serves_the_next(start, made, tmp_path):
    """Graphs that vLLM keeps on disk name a layer, and nothing of the process that made them."""
    model, asked = made("qwen3_moe", "f32"), prompts(8)
    with start(model, **F32) as plain:
        expected = plain.generate(asked)["tokens"]
    cache = {"VLLM_CACHE_ROOT": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    for _start in range(2):
        with start(model, TWO_WORKERS, environment=cache, enforce_eager=False, **F32) as ours:
            assert ours.generate(asked)["tokens"] == expected
            assert min(ours.look()[0]["calls"]) > 0


def test_chunks_of_prompts_a_prefix_cache_and_drafts_change_no_token(start, made):
    model = made("qwen3_moe", "f32")
    asked = [one * 4 for one in prompts(4, length=20)]
    with start(model, **F32) as plain:
        expected = plain.generate(asked)["tokens"]
    options = {
        "max_num_batched_tokens": 16, "max_num_seqs": 4, "enable_chunked_prefill": True, "enable_prefix_caching": True,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
    }  # fmt: skip
    with start(model, TWO_WORKERS, **options, **F32) as ours:
        for _again in range(2):
            assert ours.generate(asked)["tokens"] == expected
