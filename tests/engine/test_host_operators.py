"""A sequence's logits have the same bits however it is computed: whole, cut, in company, by one
thread or two, with experts in this process or behind any transport, forked, behind a cached prefix,
or after a failure.

Where a model's rows were not proven independent, the report names the module, and the weaker
promise of parity (docs/numerics.md) is held instead.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from dflash_moe.errors import DflashError
from dflash_moe.forward.block_hashes import BlockHashes
from dflash_moe.forward.forward import PackedForward, StepRows
from dflash_moe.forward.host_model import HostModel, open_host
from dflash_moe.forward.take_layers import _BoundRoute
from dflash_moe.integrations.expert_route import ExpertRoute
from dflash_moe.operators.layers.step_program import StepProgram
from tests.host_models import ORIGINAL_MAX, PROMPT_TOKENS, checkpoint, forward_part, logits_of, parts_of, prompt, start

pytestmark = pytest.mark.transformers

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "phimoe", "qwen2_moe", "granitemoe")
DTYPES = ("f32", "bf16")
CASES = [(arch, dtype) for arch in FAMILIES for dtype in DTYPES]
ADDRESSES = ("shared", "unix", "tcp")
NUM_LAYERS = 2


@dataclass
class Opened:
    """A host with its experts in this process and one thread, and the logits of the whole prompt
    alone.
    """

    arch: str
    dtype: str
    host: HostModel
    expected: torch.Tensor

    def assert_same(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Demands equal bits."""
        assert found.shape == expected.shape
        same = (found.view(torch.int32) == expected.view(torch.int32)).all(dim=-1)
        assert bool(same.all()), f"{what}: rows {(~same).nonzero().flatten().tolist()} have other bits"


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def opened(request):
    with start(*request.param) as runtime:
        host = open_host(checkpoint(*request.param), runtime)
        yield Opened(*request.param, host, logits_of(paged(host), prompt()))


def paged(host: HostModel) -> PackedForward:
    assert host.packed is not None, host.report.not_paged
    return host.packed


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (found.double() - expected.double()) / expected.double().std()
    assert float(difference.abs().max()) <= 1e-5 * max(1.0, NUM_LAYERS / 6)
    assert float(difference.square().mean().sqrt()) <= 2e-6 * max(1.0, NUM_LAYERS / 12)


def test_every_family_is_proven(opened):
    report = opened.host.report
    assert not report.not_paged
    assert not report.not_independent


def test_bits_do_not_depend_on_how_a_prompt_is_cut(opened):
    packed, chance = paged(opened.host), random.Random(5)
    cuts = [[PROMPT_TOKENS - 1], [1, 2, 3, 17], *(sorted(chance.sample(range(1, PROMPT_TOKENS), 4)) for _ in range(2))]
    for places in cuts:
        opened.assert_same(logits_of(packed, prompt(), places), opened.expected, f"cut at {places}")


def test_bits_do_not_depend_on_company(opened):
    packed, chance = paged(opened.host), random.Random(6)
    counts = [1, 1, 1, 1, 2, 3, 5, 7, 16, 17, 31, 33, 40, 64, 90, 120]
    others = [(packed.admit(300), prompt(count, seed=100 + count)) for count in counts]
    probed = packed.admit(PROMPT_TOKENS)
    found = []
    try:
        for part in parts_of(prompt(), [40, PROMPT_TOKENS - 1]):
            chance.shuffle(others)
            place = chance.randrange(len(others) + 1)
            rows = [StepRows(sequence, tokens, num_logits=0) for sequence, tokens in others]
            rows.insert(place, StepRows(probed, part, num_logits=len(part)))
            found.append(packed.forward(rows).clone())
            others = [(sequence, tokens[: 1 + len(tokens) // 3]) for sequence, tokens in others]
    finally:
        for sequence in (probed, *(sequence for sequence, _tokens in others)):
            sequence.release()
    assert packed.blocks.num_free == packed.blocks.num_blocks
    opened.assert_same(torch.cat(found), opened.expected, "beside 16 others")


def test_bits_do_not_depend_on_threads(opened):
    with start(opened.arch, opened.dtype, threads=2) as runtime:
        packed = paged(open_host(checkpoint(opened.arch, opened.dtype), runtime))
        assert packed.cache.pool.threads == 2
        opened.assert_same(logits_of(packed, prompt(), [60]), opened.expected, "two threads")


def bits_over(opened: Opened, address: str) -> None:
    with start(opened.arch, opened.dtype, address) as runtime:
        packed = paged(open_host(checkpoint(opened.arch, opened.dtype), runtime))
        before = runtime.stats()["totals"]["calls"]
        found = logits_of(packed, prompt(), [PROMPT_TOKENS - 2, PROMPT_TOKENS - 1])
        assert runtime.stats()["totals"]["calls"] > before
    opened.assert_same(found, opened.expected, address)


@pytest.mark.parametrize("further", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_bits_do_not_depend_on_the_transport(opened, further):
    """Every family and dtype meets one transport; the sweep has the two others."""
    bits_over(opened, ADDRESSES[(CASES.index((opened.arch, opened.dtype)) + further) % len(ADDRESSES)])


def test_forks_have_the_bits_of_sequences_alone(opened):
    packed = paged(opened.host)
    shared, tails = prompt()[:35], (prompt()[35:], prompt(20, seed=8))
    sequence = packed.admit(PROMPT_TOKENS)
    forward_part(packed, sequence, shared)
    forks = [sequence, sequence.fork(), sequence.fork(16)]
    try:
        # Both write into the block that holds tokens 32..34, in one step.
        rows = [StepRows(fork, tail, num_logits=len(tail)) for fork, tail in zip(forks, tails, strict=False)]
        found = packed.forward(rows).clone().split([len(tail) for tail in tails])
        again = forward_part(packed, forks[2], prompt()[16:])
    finally:
        for fork in forks:
            fork.release()
    other = logits_of(packed, [*shared, *tails[1]], max_tokens=PROMPT_TOKENS)
    opened.assert_same(found[0], opened.expected[35:], "forked")
    opened.assert_same(found[1], other[35:], "a fork with another end")
    opened.assert_same(again, opened.expected[16:], "a fork at a whole block")
    assert packed.blocks.num_free == packed.blocks.num_blocks


def test_an_adopted_prefix_has_the_bits_of_a_computed_one(opened):
    packed, hashes = paged(opened.host), BlockHashes(b"of this test")
    hashes.extend(prompt()[:-1])
    first, beside, later = (packed.admit(PROMPT_TOKENS) for _ in range(3))
    adopted = packed.blocks.num_adopted
    try:
        forward_part(packed, first, prompt()[:40])
        first.blocks.publish(hashes.hashes)
        beside.blocks.adopt_prefix(packed.blocks.match(hashes.hashes))
        shared = forward_part(packed, beside, prompt()[32:])
        beside.blocks.publish(hashes.hashes)
        first.release()
        beside.release()
        # All pages are free now, and others write into those that are not cached.
        logits_of(packed, prompt(20, seed=8))
        later.blocks.adopt_prefix(packed.blocks.match(hashes.hashes))
        stored = later.num_tokens
        found = forward_part(packed, later, prompt()[stored:])
    finally:
        for sequence in (first, beside, later):
            sequence.release()
    assert stored == 16 * len(hashes.hashes)
    assert packed.blocks.num_adopted - adopted == 2 + len(hashes.hashes)
    opened.assert_same(shared, opened.expected[32:], "behind a prefix that another sequence has")
    opened.assert_same(found, opened.expected[stored:], "behind a cached prefix")
    assert packed.blocks.num_free == packed.blocks.num_blocks


def test_a_step_that_failed_changes_nothing(opened, monkeypatch):
    packed = paged(opened.host)
    sequence = packed.admit(PROMPT_TOKENS)
    fork = None
    try:
        parts = parts_of(prompt(), [35, 70])
        found = [forward_part(packed, sequence, parts[0])]
        # The failed step would copy a shared block.
        fork = sequence.fork()
        free = packed.blocks.num_free
        for wrong in (parts[1], [257] * 9):
            with monkeypatch.context() as patch:
                # The core makes no call of its own then, and fails behind the keys that it stored.
                patch.setattr(StepProgram, "is_bound", lambda _program: False)
                patch.setattr(_BoundRoute, "bound", lambda _bound: None)
                patch.setattr(ExpertRoute, "call", _fails)
                pytest.raises(DflashError, forward_part, packed, sequence, wrong)
            assert (sequence.num_tokens, packed.blocks.num_free) == (35, free)
        found += [forward_part(packed, sequence, part) for part in parts[1:]]
    finally:
        sequence.release()
        if fork is not None:
            fork.release()
    opened.assert_same(torch.cat(found), opened.expected, "after failed steps")


def _fails(*_arguments: object) -> None:
    raise DflashError("the experts' call failed")


@pytest.mark.parametrize("opened", [("phimoe", dtype) for dtype in DTYPES], ids="-".join, indirect=True, scope="module")
def test_sequences_on_each_side_of_longrope_s_original_maximum_do_not_meet(opened):
    packed = paged(opened.host)
    short, long = prompt(ORIGINAL_MAX - 3), prompt()
    alone = logits_of(packed, short)
    sequences = [packed.admit(len(short)), packed.admit(len(long))]
    try:
        rows = [StepRows(sequence, tokens, len(tokens)) for sequence, tokens in zip(sequences, (short, long), strict=True)]
        found = packed.forward(rows).clone().split([len(short), len(long)])
    finally:
        for sequence in sequences:
            sequence.release()
    opened.assert_same(found[0], alone, "short beside long")
    opened.assert_same(found[1], opened.expected, "long beside short")
    # The same tokens have other logits where more were admitted.
    assert not torch.allclose(alone, logits_of(packed, short, max_tokens=PROMPT_TOKENS), rtol=1e-3)


# Logits of 16 bits are reported by `verify`, not judged.
@pytest.mark.parametrize("opened", [case for case in CASES if case[1] == "f32"], ids="-".join, indirect=True, scope="module")
def test_f32_logits_are_those_of_the_eager_model(opened):
    for count in (PROMPT_TOKENS, ORIGINAL_MAX - 3):
        with torch.inference_mode():
            expected = eager(opened.arch)(input_ids=torch.tensor([prompt(count)])).logits[0]
        assert_near(logits_of(paged(opened.host), prompt(count)), expected)


def eager(arch: str):
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.float32, "experts_implementation": "eager", "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(checkpoint(arch, "f32"), **options).eval()
