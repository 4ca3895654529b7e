"""A card as the engine's host, simulated: torch's operators over pages, many sequences in a forward
pass, experts by remote calls. Logits have parity with the model's own eager forward; equal bits in
company are not claimed here.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from dflash_moe import ConfigError, DflashError, ExpertRuntime, Topology
from dflash_moe.forward.forward import OutOfBlocks, PackedForward, StepRows
from dflash_moe.forward.host_model import HostModel, open_host
from dflash_moe.integrations.expert_route import ExpertRoute
from dflash_moe.integrations.transformers import expert_calls
from dflash_moe.model.architecture import find_model_class, load_config
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.operators import gathered_attention
from dflash_moe.operators.step_context import StepContext
from tests.host_models import (
    ORIGINAL_MAX,
    PROMPT_TOKENS,
    WINDOW,
    checkpoint,
    forward_part,
    logits_of,
    prompt,
)

pytestmark = pytest.mark.transformers

# Grouped queries; windows with sinks; few heads; latents; a rotary type that looks at others.
FAMILIES = ("qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "phimoe")
NUM_LAYERS = 2
TOPOLOGY = """
version: 1
host: {threads: 1, device: 'sim:0', simulate: cuda}
placement: {policy: explicit}
workers:
  - {name: w0, backend: cpu, experts: {'*': '0-4'}, address: loopback}
  - {name: w1, backend: cpu, experts: {'*': '5-7'}, address: loopback}
"""


@dataclass(frozen=True)
class Opened:
    arch: str
    runtime: ExpertRuntime
    host: HostModel

    @property
    def packed(self) -> PackedForward:
        assert self.host.packed is not None, self.host.report.lines()
        return self.host.packed


def opened_host(arch: str, topology: str = TOPOLOGY, dtype: str = "f32", **overrides: str) -> ExpertRuntime:
    options = {"kv_memory": "4MiB", **overrides}
    return ExpertRuntime.start(Topology.parse(topology), model=checkpoint(arch, dtype), **options)


@pytest.fixture(scope="module", params=FAMILIES)
def opened(request) -> Iterator[Opened]:
    with opened_host(request.param) as runtime:
        yield Opened(request.param, runtime, open_host(checkpoint(request.param, "f32"), runtime))


@functools.cache
def eager_logits(arch: str, count: int = PROMPT_TOKENS, seed: int = 3) -> torch.Tensor:
    """Returns the logits of a prompt's tokens by the model's own eager forward."""
    folder = checkpoint(arch, "f32")
    options = {"dtype": torch.float32, "experts_implementation": "eager", "attn_implementation": "eager"}
    model = find_model_class(load_config(Checkpoint.open(folder))).from_pretrained(folder, **options).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([prompt(count, seed)])).logits[0]
    return logits


def assert_parity(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (torch.float32, expected.shape)
    difference = (found.double() - expected.double()) / expected.double().std()
    assert float(difference.abs().max()) <= 1e-5 * max(1.0, NUM_LAYERS / 6)
    assert float(difference.square().mean().sqrt()) <= 2e-6 * max(1.0, NUM_LAYERS / 12)


def kept_contexts(packed: PackedForward, monkeypatch: pytest.MonkeyPatch) -> list[StepContext]:
    """Has the context of each step kept from now on, and returns the list that gets them."""
    kept, make = [], packed.context

    def keep(*step):
        kept.append(make(*step))
        return kept[-1]

    monkeypatch.setattr(packed, "context", keep)
    return kept


def test_a_card_keeps_torchs_operators_and_claims_no_more_than_parity(opened):
    report = opened.host.report
    assert (report.findings, report.not_paged, report.not_taken) == ([], "", "the model lies on sim:0")
    assert "bit equality in company is not claimed" in "\n".join(report.lines())
    assert opened.packed.loop is None


@pytest.mark.parametrize("cuts", [(), (50,), (1, 2, 30), (PROMPT_TOKENS - 1,)], ids=str)
def test_a_prompt_in_chunks_has_the_logits_of_the_eager_model(opened, cuts):
    before = opened.runtime.stats()["totals"]["calls"], expert_calls(opened.host.model)
    found = logits_of(opened.packed, prompt(), cuts)
    assert_parity(found, eager_logits(opened.arch))
    forwards = len(cuts) + 1
    assert all(count == before[1][name] + forwards for name, count in expert_calls(opened.host.model).items())
    assert opened.runtime.stats()["totals"]["calls"] >= before[0] + len(opened.runtime.layers) * forwards


def test_steps_of_many_sequences_have_the_logits_of_the_eager_model(opened):
    """Prefills, chunks, single tokens and rows with drafts, in two steps and several groups."""
    packed = opened.packed
    # The first step computes so many tokens of a prompt; those that are left are its second step.
    firsts = {PROMPT_TOKENS: 82, 80: 79, 60: 57, 12: 11, 40: 13, 3: 2, 2: 1, 34: 33, 50: 47}
    asked = [(packed.admit(PROMPT_TOKENS), count, prompt(count, seed=count)) for count in firsts]
    try:
        found = []
        for begin, ends in ((0, firsts.values()), (1, firsts.keys())):
            parts = [
                (sequence, tokens[first if begin else 0 : end])
                for (sequence, _, tokens), first, end in zip(asked, firsts.values(), ends, strict=True)
            ]
            logits = packed.forward([StepRows(sequence, part, num_logits=len(part)) for sequence, part in parts])
            found.append(logits.split([len(part) for _, part in parts]))
    finally:
        for sequence, _, _ in asked:
            sequence.release()
    # The eager model has the length of longrope from a sequence that is as long as was admitted.
    for (_, count, tokens), *parts in zip(asked, *found, strict=True):
        if opened.arch != "phimoe" or count > ORIGINAL_MAX:
            assert tokens == prompt(count, seed=count)
            assert_parity(torch.cat(parts), eager_logits(opened.arch, count, count))
    assert packed.blocks.num_free == packed.blocks.num_blocks


def test_logits_are_given_of_the_rows_that_want_them(opened):
    packed, all_rows = opened.packed, eager_logits(opened.arch)
    sequence = packed.admit(PROMPT_TOKENS)
    try:
        assert packed.forward([StepRows(sequence, prompt()[:60], num_logits=0)]).shape[0] == 0
        assert_parity(packed.forward([StepRows(sequence, prompt()[60:], num_logits=3)]), all_rows[-3:])
    finally:
        sequence.release()


def test_forks_share_blocks_and_copy_what_they_write(opened):
    packed = opened.packed
    sequence = packed.admit(PROMPT_TOKENS)
    forward_part(packed, sequence, prompt()[:35])
    forks = [sequence, sequence.fork(), sequence.fork(16)]
    try:
        # Both write into the block that holds tokens 32..34, in one step.
        tails = (prompt()[35:], prompt(20, seed=8))
        rows = [StepRows(fork, tail, num_logits=len(tail)) for fork, tail in zip(forks, tails, strict=False)]
        found = packed.forward(rows).split([len(tail) for tail in tails])
        again = forward_part(packed, forks[2], prompt()[16:])
        packed.blocks.check_integrity(fork.blocks.block_table for fork in forks)
    finally:
        for fork in forks:
            fork.release()
    other = logits_of(packed, [*prompt()[:35], *tails[1]], max_tokens=PROMPT_TOKENS)
    assert_parity(found[0], eager_logits(opened.arch)[35:])
    assert_parity(found[1], other[35:])
    assert_parity(again, eager_logits(opened.arch)[16:])


def test_a_step_that_failed_changes_nothing(opened, monkeypatch):
    packed = opened.packed
    sequence = packed.admit(PROMPT_TOKENS)
    fork = None
    try:
        found = [forward_part(packed, sequence, prompt()[:35])]
        fork = sequence.fork()
        free = packed.blocks.num_free
        with monkeypatch.context() as patch:
            patch.setattr(ExpertRoute, "call", _fails)
            pytest.raises(DflashError, forward_part, packed, sequence, prompt()[35:])
        with pytest.raises(ConfigError, match="outside the vocabulary"):
            forward_part(packed, sequence, [10**6])
        assert (sequence.num_tokens, packed.blocks.num_free) == (35, free)
        found.append(forward_part(packed, sequence, prompt()[35:]))
    finally:
        sequence.release()
        if fork is not None:
            fork.release()
    assert_parity(torch.cat(found), eager_logits(opened.arch))


def _fails(*_arguments: object) -> None:
    raise DflashError("the experts' call failed")


def test_steps_without_enough_blocks_are_refused_by_type(opened):
    packed = opened.packed
    room = packed.blocks.num_blocks * packed.blocks.block_tokens
    with pytest.raises(ConfigError, match="engine.kv_memory"):
        packed.admit(room + 1)
    taken = packed.blocks.allocate(packed.blocks.num_free - 2)
    sequence = packed.admit(PROMPT_TOKENS)
    try:
        with pytest.raises(OutOfBlocks, match="2 free blocks"):
            forward_part(packed, sequence, prompt())
        assert sequence.num_tokens == 0
        forward_part(packed, sequence, prompt()[:32])
    finally:
        sequence.release()
        packed.blocks.release(taken)
    assert packed.blocks.num_free == packed.blocks.num_blocks


def test_pieces_of_rows_have_the_logits_of_whole_chunks(opened, monkeypatch):
    monkeypatch.setattr(gathered_attention, "_MAX_SCORES", 700)
    assert_parity(logits_of(opened.packed, prompt(), (50,)), eager_logits(opened.arch))


def test_what_other_sequences_left_in_blocks_reaches_no_row(opened, monkeypatch):
    """All blocks hold what is no number; a step pads its groups and leaves blocks half full."""
    packed, contexts = opened.packed, kept_contexts(opened.packed, monkeypatch)
    for layer in packed.cache.layers_in_order():
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.inf)
    counts = (PROMPT_TOKENS, 60, 50)
    sequences = [packed.admit(PROMPT_TOKENS) for _ in counts]
    try:
        for sequence, count in zip(sequences, counts, strict=True):
            packed.forward([StepRows(sequence, prompt(count, seed=count)[:-1], num_logits=0)])
        rows = [StepRows(sequence, prompt(count, seed=count)[-1:]) for sequence, count in zip(sequences, counts, strict=True)]
        found = packed.forward(rows)
        assert len(packed.cache.groups(contexts[-1], 0)) == 1
    finally:
        for sequence in sequences:
            sequence.release()
    for place, count in enumerate(counts):
        assert_parity(found[place : place + 1], eager_logits(opened.arch, count, count)[-1:])


def test_all_layers_gather_into_one_buffer_whose_bytes_are_counted(opened, monkeypatch):
    contexts = kept_contexts(opened.packed, monkeypatch)
    cache, model = opened.packed.cache, opened.host.model
    budget, tokens = 4 << 20, opened.packed.blocks.num_blocks * 16
    config = model.config
    if opened.arch == "deepseek_v3":
        values = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        values = 2 * config.num_key_value_heads * head_dim
    assert cache.num_bytes == NUM_LAYERS * tokens * values * 4
    assert cache.gather_bytes == min(tokens, config.max_position_embeddings) * values * 4
    assert opened.host.report.gather_bytes == cache.gather_bytes
    assert 0.9 * budget < cache.num_bytes + cache.gather_bytes + expanded_bytes(opened) <= budget
    before = cache._key_buffer.data_ptr(), cache._value_buffer.data_ptr()
    sequence = opened.packed.admit(PROMPT_TOKENS)
    try:
        forward_part(opened.packed, sequence, prompt())
        for index in range(NUM_LAYERS):
            (group,) = cache.groups(contexts[-1], 0)
            keys, values = cache.gather(index, group)
            assert (keys.data_ptr(), values.data_ptr()) == before
            for gathered, stored in ((keys, cache.layer(index).keys), (values, cache.layer(index).values)):
                places = [stored[block] for block in sequence.blocks.block_table.tolist()]
                assert torch.equal(gathered[0], torch.cat(places)[:PROMPT_TOKENS])
    finally:
        sequence.release()


def expanded_bytes(opened: Opened) -> int:
    """Returns the bytes that the keys and values of as many latents take as can be gathered."""
    if opened.arch != "deepseek_v3":
        return 0
    config = opened.host.model.config
    size = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return 4 * config.num_attention_heads * size * opened.packed.cache._max_keys


def test_windows_gather_no_more_than_they_see(monkeypatch):
    with opened_host("gpt_oss") as runtime:
        packed = open_host(checkpoint("gpt_oss", "f32"), runtime).packed
        contexts = kept_contexts(packed, monkeypatch)
        sequence = packed.admit(PROMPT_TOKENS)
        forward_part(packed, sequence, prompt()[:-1])
        forward_part(packed, sequence, prompt()[-1:])
        seen = [group.num_keys for window in (0, WINDOW) for group in packed.cache.groups(contexts[-1], window)]
        assert seen == [PROMPT_TOKENS, WINDOW]


@pytest.mark.parametrize("capacity", [32, 200])
def test_groups_never_gather_more_than_the_buffer_holds(opened, monkeypatch, capacity):
    """The buffer is as small as the longest sequence allows, or holds two of them."""
    packed, contexts = opened.packed, kept_contexts(opened.packed, monkeypatch)
    sequences = [packed.admit(PROMPT_TOKENS) for _ in range(5)]
    monkeypatch.setattr(packed.cache, "_max_keys", max(PROMPT_TOKENS, capacity))
    try:
        for count in (PROMPT_TOKENS - 1, 1):
            begin = sequences[0].num_tokens
            found = packed.forward([StepRows(sequence, prompt()[begin : begin + count]) for sequence in sequences])
        groups = packed.cache.groups(contexts[-1], 0)
        assert [group.num_sequences for group in groups] == ([1] * 5 if capacity == 32 else [2, 2, 1])
    finally:
        for sequence in sequences:
            sequence.release()
    assert_parity(found, eager_logits(opened.arch)[-1:].expand(5, -1))


def test_a_card_and_a_processor_asked_for_torch_take_the_same_path():
    text = TOPOLOGY.replace("device: 'sim:0', simulate: cuda", "operators: torch")
    with opened_host("qwen3_moe", text) as runtime:
        threads = torch.get_num_threads()
        host = open_host(checkpoint("qwen3_moe", "f32"), runtime)
        assert torch.get_num_threads() == threads
        assert (host.report.not_taken, host.report.findings) == ("host.operators: torch", [])
        assert_parity(logits_of(host.packed, prompt(), (50,)), eager_logits("qwen3_moe"))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_pages_and_logits_of_a_16_bit_model(dtype):
    with opened_host("gpt_oss", dtype=dtype) as runtime:
        packed = open_host(checkpoint("gpt_oss", dtype), runtime).packed
        assert str(packed.cache.layer(0).keys.dtype) == {"f16": "torch.float16", "bf16": "torch.bfloat16"}[dtype]
        found = logits_of(packed, prompt(), (50,))
    assert found.dtype == torch.float32
    assert torch.isfinite(found).all()


def test_a_dtype_of_pages_that_overflows_unseen_is_refused():
    with opened_host("mixtral", kv_dtype="bf16") as runtime:
        packed = open_host(checkpoint("mixtral", "f32"), runtime).packed
        assert packed.cache.layer(0).keys.dtype == torch.bfloat16
        difference = (logits_of(packed, prompt()) - eager_logits("mixtral")) / eager_logits("mixtral").std()
        assert 1e-5 < float(difference.abs().max()) < 0.2
    with (
        opened_host("mixtral", kv_dtype="f16") as runtime,
        pytest.raises(ConfigError, match=r"kv_dtype: f16 .* model in f32"),
    ):
        open_host(checkpoint("mixtral", "f32"), runtime)


def test_a_host_of_a_card_generates_tokens_and_says_what_is_stored(opened):
    from dflash_moe.engine.generation import generate_tokens
    from dflash_moe.forward.sequence_run import run_digest

    steps = list(generate_tokens(opened.host, prompt(), max_new_tokens=4))
    assert steps[0].token_id == int(eager_logits(opened.arch)[-1].argmax())
    runs = [opened.host.sequence(PROMPT_TOKENS) for _ in range(2)]
    digests = [run_digest(run, run.forward(prompt()[: 70 - place])) for place, run in enumerate(runs)]
    assert digests[0] != digests[1]
    for run in runs:
        run.close()
