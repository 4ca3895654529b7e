"""Families whose attention is not paged through the engine: recurrent and sparse ones keep
transformers' own cache, within a budget, and get the tokens of the plain loop.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bench.models.families import tiny_options
from dflash_moe import ExpertRuntime
from dflash_moe.forward.host_model import HostModel, open_host
from dflash_moe.forward.one_sequence import OneSequenceForward, _tensor_bytes, measure_cache
from dflash_moe.integrations.transformers import load_model, without_experts
from dflash_moe.model.make import make_checkpoint
from dflash_moe.operators.report import TakeoverReport
from tests.engine_runs import Alone, EngineRun, asked, come_and_go, engine_run
from tests.host_models import topology

pytestmark = pytest.mark.transformers
# Linear attention with a state beside full attention, an indexer that selects keys, and full
# attention only, which has pages unless a test opens it otherwise.
NUM_LAYERS = {"minimax": 2, "deepseek_v32": 2, "qwen3_moe": 2, "qwen3_next": 4, "nemotron_h": 2, "glm_moe_dsa": 2}
# Their states take megabytes, which takes time too.
LONG = ("qwen3_next", "nemotron_h", "glm_moe_dsa")
RECURRENT = ("minimax", "qwen3_next", "nemotron_h")
KV_MEMORY = 64 << 20


@dataclass
class Opened:
    """A host whose attention is not paged, and its forward pass for an engine."""

    arch: str
    host: HostModel
    forward: OneSequenceForward
    alone: Alone


FAMILIES = [pytest.param(arch, marks=pytest.mark.long if arch in LONG else ()) for arch in NUM_LAYERS]


@pytest.fixture(scope="module", params=FAMILIES)
def opened(request, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(replace(tiny_options(request.param, "f32"), num_layers=NUM_LAYERS[request.param]), folder)
    with ExpertRuntime.start(topology("loopback"), model=folder, kv_memory="64MiB") as runtime:
        if request.param == "qwen3_moe":
            host = HostModel(load_model(folder, runtime), TakeoverReport("", not_paged="as if it could not be"), None)
        else:
            host = open_host(folder, runtime)
        assert host.packed is None
        forward = host.engine_forward(runtime.settings.kv_memory)
        assert isinstance(forward, OneSequenceForward)
        yield Opened(request.param, host, forward, Alone(host))


def cache_bytes(run: EngineRun) -> list[tuple[int, int]]:
    """The number of tokens and the bytes of the cache of each sequence that runs."""
    running = [one.sequence for one in run.engine._planner.scheduler.running]
    return [(sequence.num_tokens, _tensor_bytes(sequence.cache)) for sequence in running if sequence is not None]


def test_requests_in_company_get_the_tokens_of_the_plain_loop(opened):
    companions = [asked(600 + number, max_tokens=6) for number in range(6)]
    with engine_run(opened.host, come_and_go(1, companions, cancels=0.4), forward=opened.forward, max_batch_tokens=50) as run:
        run.submit_all([asked(610 + number) for number in range(6)])
        stats = run.assert_exact(opened.alone)
    assert max(stats["batch_sizes"]) >= 4
    assert stats["finished"]["cancelled"] > 0
    assert stats["cached_tokens"] == stats["drafted_tokens"] == 0


def test_choices_and_drafts_are_not_for_them_and_change_nothing(opened):
    with engine_run(opened.host, forward=opened.forward, speculate="prompt") as run:
        run.submit_all([asked(620, 17, n=3, max_tokens=8)])
        stats = run.assert_exact(opened.alone)
    assert stats["prompt_tokens"] == 3 * 17, "each choice computes its prompt"
    assert stats["drafted_tokens"] == 0


def test_a_prompt_beyond_a_step_s_tokens_is_computed_whole(opened):
    with engine_run(opened.host, forward=opened.forward, max_batch_tokens=8) as run:
        run.submit_all([asked(630 + number, length) for number, length in enumerate((40, 5, 33))])
        run.assert_exact(opened.alone)
    assert {40, 5, 33} <= {count for counts in run.watched.steps for count in counts}


def test_what_a_sequence_takes_is_measured(opened):
    with without_experts(opened.host.model):
        token_bytes, sequence_bytes = measure_cache(opened.host.model)
    config = opened.host.model.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if opened.arch == "qwen3_moe":
        kept = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size
        assert (token_bytes, sequence_bytes) == (4 * kept, 0)
    if opened.arch == "minimax":
        # A layer of linear attention has a square matrix for each head, and one layer is full.
        kept = config.num_attention_heads * head_size**2
        assert (token_bytes, sequence_bytes) == (4 * 2 * config.num_key_value_heads * head_size, 4 * kept)
    assert (sequence_bytes > 0) == (opened.arch in RECURRENT)
    found: list[tuple[int, int]] = []
    with engine_run(opened.host, lambda run: found.extend(cache_bytes(run)), forward=opened.forward) as run:
        run.submit_all([asked(640, 37, max_tokens=5)])
        run.collect()
    assert [count for count, _ in found] == [0, 37, 38, 39, 40]
    assert [size for _, size in found[1:]] == [token_bytes * count + sequence_bytes for count, _ in found[1:]]


def test_memory_is_bounded_and_who_gives_up_begins_again(opened):
    most: list[int] = []
    wanted = [asked(650 + number, 12 + number, max_tokens=30, stop_token_ids=()) for number in range(4)]

    def watch(run: EngineRun) -> None:
        most.append(sum(size for _, size in cache_bytes(run)))
        assert most[-1] <= KV_MEMORY

    with engine_run(opened.host, watch, forward=opened.forward, num_blocks=5) as run:
        run.submit_all(wanted)
        answers = [answer for _, _, found in run.collect() for answer in found]
        stats = run.engine.stats()
    assert max(most) > 0
    assert stats["preemptions"] > 0
    assert [len(answer.tokens) for answer in answers] == [30] * 4
    # Equality after a preemption is not claimed; the oldest is never preempted.
    assert answers[0].tokens == opened.alone.answer(wanted[0]).tokens


def test_no_more_sequences_run_than_their_states_have_room(opened):
    if opened.arch not in RECURRENT:
        pytest.skip("only tokens take memory here")
    forward, kept = opened.forward, opened.forward.max_sequences
    with without_experts(opened.host.model):
        token_bytes, sequence_bytes = measure_cache(opened.host.model)
    assert kept * sequence_bytes + forward.blocks.num_blocks * 16 * token_bytes <= KV_MEMORY
    forward.max_sequences = 2
    try:
        with engine_run(opened.host, forward=forward) as run:
            run.submit_all([asked(660 + number, max_tokens=4) for number in range(5)])
            stats = run.assert_exact(opened.alone)
    finally:
        forward.max_sequences = kept
    assert max(stats["batch_sizes"]) == 2
