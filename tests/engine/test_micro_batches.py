"""Steps in two micro-batches give the bits of one batch, wherever they are cut, and where a half
fails the other one has ended, the step is undone, and the next one is computed.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from dflash_moe.errors import DflashError, EngineError, WorkerLost
from dflash_moe.experts.expert_call import BoundExperts
from dflash_moe.forward.forward import PackedForward, StepRows
from dflash_moe.forward.halves import micro_batches
from dflash_moe.forward.halves.half_steps import Cut
from dflash_moe.forward.halves.half_turns import HalfTurns
from dflash_moe.forward.host_model import open_host
from dflash_moe.integrations.expert_route import ExpertRoute
from dflash_moe.model.architecture import find_experts
from tests.host_models import checkpoint, prompt, start

pytestmark = pytest.mark.transformers

# Grouped queries, sinks and windows, latents and shared experts, tables that depend on the length,
# and a family whose layers run their own code.
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "phimoe", "qwen2_moe", "cohere2_moe")
CASES = [(arch, dtype, "loopback") for arch in FAMILIES for dtype in ("f32", "bf16")]
CASES += [(arch, "bf16", "shared") for arch in FAMILIES]
# So many tokens of each sequence of a step, and of what it stores already.
STEPS = {
    "two prompts": ([40, 43], [0, 0]),
    "one prompt": ([83], [0]),
    "a chunk of one prompt": ([64], [37]),
    "a chunk beside decodes": ([1, 1, 70, 1], [30, 9, 16, 70]),
    "decodes": ([1, 1, 1, 1], [5, 40, 17, 64]),
}


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def packed(request) -> Iterator[PackedForward]:
    arch, dtype, address = request.param
    with start(arch, dtype, address) as runtime:
        host = open_host(checkpoint(arch, dtype), runtime)
        assert host.packed is not None, host.report.lines()
        yield host.packed
        host.packed.micro_batches.close()


def logits(packed: PackedForward, asked: str, counts: Sequence[int], stored: Sequence[int]) -> torch.Tensor:
    """The logits of the step's tokens, and of the token that follows each sequence: that reads all
    keys which the step has stored.
    """
    sequences = [packed.admit(before + count + 1) for before, count in zip(stored, counts, strict=True)]
    try:
        packed.micro_batches.asked = "1"
        for place, (sequence, before) in enumerate(zip(sequences, stored, strict=True)):
            if before:
                packed.forward([StepRows(sequence, prompt(before, seed=place))])
        packed.micro_batches.asked = asked
        rows = [
            StepRows(sequence, prompt(count, seed=100 + place), num_logits=min(count, place + 1))
            for place, (sequence, count) in enumerate(zip(sequences, counts, strict=True))
        ]
        found = packed.forward(rows).clone()
        packed.micro_batches.asked = "1"
        return torch.cat((found, packed.forward([StepRows(sequence, [7]) for sequence in sequences])))
    finally:
        for sequence in sequences:
            sequence.release()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("name", STEPS)
def test_two_micro_batches_have_the_bits_of_one(packed, name):
    expected = logits(packed, "1", *STEPS[name])
    before = packed.micro_batches.stats()["split_steps"]
    assert same(logits(packed, "2", *STEPS[name]), expected)
    assert packed.micro_batches.stats()["split_steps"] == before + 1


def test_wherever_a_step_is_cut(packed, monkeypatch):
    rng = random.Random(11)
    counts, stored = STEPS["a chunk beside decodes"]
    expected = logits(packed, "1", counts, stored)
    edges = {1, 2, 72}
    for row in (1, 2, 72, *(rng.randrange(3, 72) for _ in range(6))):
        monkeypatch.setattr(micro_batches, "choose_cut", lambda step, row=row: Cut(row, row not in edges))
        assert same(logits(packed, "2", counts, stored), expected), row


class Failure(DflashError):
    """What a half raises in these tests."""


def is_second() -> bool:
    return threading.current_thread().name == "dflash-moe-half"


def fail_experts(monkeypatch: pytest.MonkeyPatch, num_layers: int, *, second: bool) -> None:
    """Has the experts of one half raise in the last layer, whatever calls them."""
    calls = {False: 0, True: 0}

    def failing(right):
        def call(self, *arguments):
            calls[is_second()] += 1
            if is_second() == second and calls[second] == num_layers:
                raise Failure("injected")
            return right(self, *arguments)

        return call

    for owner, name in ((ExpertRoute, "call"), (BoundExperts, "run"), (BoundExperts, "submit")):
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("name", ["two prompts", "one prompt"])
def test_a_failing_half_stops_the_other_and_undoes_the_step(packed, name, second, monkeypatch):
    counts, stored = STEPS[name]
    expected, free = logits(packed, "1", counts, stored), packed.blocks.num_free
    with monkeypatch.context() as patch:
        fail_experts(patch, len(find_experts(packed.model)), second=second)
        with pytest.raises(Failure, match="injected"):
            logits(packed, "2", counts, stored)
    assert packed.blocks.num_free == free
    packed.blocks.check_integrity([])
    assert same(logits(packed, "2", counts, stored), expected)


@pytest.mark.parametrize("name", ["two prompts", "one prompt"])
def test_a_worker_that_is_killed_ends_both_halves_and_undoes_the_step(name, monkeypatch):
    with start("qwen3_moe", "bf16", "shared", restart=False, host_fallback="none") as runtime:
        packed = open_host(checkpoint("qwen3_moe", "bf16"), runtime).packed
        free, right, killed = packed.blocks.num_free, BoundExperts.run, []

        def run(self):
            if is_second() and not killed:
                killed.append(runtime.worker_processes()[0].pid)
                os.kill(killed[0], signal.SIGKILL)
            right(self)

        monkeypatch.setattr(BoundExperts, "run", run)
        for _ in range(2):
            with pytest.raises(WorkerLost):
                logits(packed, "2", *STEPS[name])
            assert packed.blocks.num_free == free
        packed.micro_batches.close()


def test_a_half_that_never_stores_its_keys_is_awaited_for_the_limit_only(packed, monkeypatch):
    monkeypatch.setattr(HalfTurns, "keys_stored", lambda *_: None)
    await_keys = HalfTurns.await_keys

    def await_briefly(turns: HalfTurns, layer: int) -> None:
        turns._limit_s = 0.2  # not before: the other half may compute for longer on a busy machine
        await_keys(turns, layer)

    monkeypatch.setattr(HalfTurns, "await_keys", await_briefly)
    with pytest.raises(EngineError, match=r"layer 0: the first half .* limit of 0.2 s"):
        logits(packed, "2", *STEPS["one prompt"])
    monkeypatch.undo()
    assert same(logits(packed, "2", *STEPS["one prompt"]), logits(packed, "1", *STEPS["one prompt"]))
