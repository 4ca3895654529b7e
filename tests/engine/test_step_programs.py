"""A step of host layers is one program of the core, and has the bits of every other way on which
its rows may go: the model's own forward pass with a layer at a time, modules where somebody hooks
them, two halves, and layer after layer for whoever is shown the residual stream.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from dflash_moe import _core
from dflash_moe.errors import ConfigError, DflashError, WorkerLost
from dflash_moe.forward.forward import PackedForward, StepRows
from dflash_moe.forward.host_model import open_host
from dflash_moe.forward.residuals import residuals_shown
from dflash_moe.integrations.transformers import expert_calls, experts_watched, without_experts
from dflash_moe.operators.layers.step_program import StepProgram
from tests.host_models import checkpoint, prompt, start

pytestmark = pytest.mark.transformers

# Grouped queries, sinks and windows, latents beside shared experts, tables that depend on the
# length of a sequence, and shared experts with a gate for each row.
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "phimoe", "qwen2_moe")
CASES = [(arch, dtype, "loopback") for arch in FAMILIES for dtype in ("f32", "bf16")]
CASES += [(arch, "bf16", "shared") for arch in FAMILIES]
# So many tokens of each sequence of a step, and of what it stores already.
STEPS = {
    "one prompt": ([83], [0]),
    "a chunk beside decodes": ([1, 70, 1], [30, 16, 70]),
    "one decode": ([1], [40]),
    "decodes": ([1, 1, 1, 1], [5, 40, 17, 64]),
}


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def packed(request: pytest.FixtureRequest) -> Iterator[PackedForward]:
    arch, dtype, address = request.param
    with start(arch, dtype, address) as runtime:
        host = open_host(checkpoint(arch, dtype), runtime)
        assert host.packed is not None, host.report.lines()
        assert host.packed.loop is not None, "all layers are ours"
        assert host.packed.micro_batches is not None
        host.packed.micro_batches.asked = "1"
        yield host.packed
        host.packed.close()


def logits(
    packed: PackedForward,
    counts: Sequence[int],
    stored: Sequence[int],
    *,
    num_logits: int = 10**6,
) -> torch.Tensor:
    """The logits of the last tokens of each sequence of a step."""
    sequences = [packed.admit(before + count) for before, count in zip(stored, counts, strict=True)]
    try:
        for place, (sequence, before) in enumerate(zip(sequences, stored, strict=True)):
            if before:
                packed.forward([StepRows(sequence, prompt(before, seed=place))])
        rows = [
            StepRows(sequence, prompt(count, seed=100 + place), num_logits=min(count, num_logits))
            for place, (sequence, count) in enumerate(zip(sequences, counts, strict=True))
        ]
        return packed.forward(rows).clone()
    finally:
        for sequence in sequences:
            sequence.release()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


class Runs:
    """Notes which programs the core runs, and of how many calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, int]] = []
        run = StepProgram.run

        def noted(program: StepProgram, step: Any, begin: int = 0, end: int | None = None, inputs: Any = None) -> None:
            self.seen.append((begin, len(program) if end is None else end))
            run(program, step, begin, end, inputs)

        monkeypatch.setattr(StepProgram, "run", noted)


class Reader:
    """A reader of the residual stream that only counts."""

    def __init__(self) -> None:
        self.num_seen = 0

    def begin(self, first: int) -> None:
        pass

    def see(self, layer: int, positions: Any, hidden_states: torch.Tensor) -> None:
        self.num_seen += 1


@pytest.mark.parametrize("name", STEPS)
def test_one_program_has_the_bits_of_every_other_way(
    packed: PackedForward,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, batches = packed.loop, packed.micro_batches
    assert loop is not None
    assert batches is not None
    expected = logits(packed, *STEPS[name])
    assert same(logits(packed, *STEPS[name]), expected)
    with monkeypatch.context() as patch:
        patch.setattr(packed, "loop", None)
        assert same(logits(packed, *STEPS[name]), expected), "the model's own code calls each layer"
    reader = Reader()
    with residuals_shown(packed, reader):
        assert same(logits(packed, *STEPS[name]), expected), "layer after layer"
    assert reader.num_seen % (len(loop.layers) + 1) == 0
    outer = (loop._embedding, loop._norm, loop._head)
    hooks = [module.register_forward_hook(lambda *_: None) for module in outer]
    assert same(logits(packed, *STEPS[name]), expected), "modules before and behind the layers"
    for hook in hooks:
        hook.remove()
    monkeypatch.setattr(batches, "asked", "2")
    assert same(logits(packed, *STEPS[name]), expected), "two halves"


def test_some_rows_of_a_step_are_those_of_all(packed: PackedForward) -> None:
    """Norm and head are outside the program where not all rows are wanted."""
    counts, stored = STEPS["a chunk beside decodes"]
    whole, last = logits(packed, counts, stored), logits(packed, counts, stored, num_logits=1)
    assert same(last, whole[[0, 70, 71]])


def test_a_step_is_one_call_of_the_core(packed: PackedForward, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch)
    sequence = packed.admit(8)
    packed.forward([StepRows(sequence, prompt(3))])
    runs.seen.clear()
    packed.forward([StepRows(sequence, [7])])
    sequence.release()
    programs = packed.buffers.of(1).programs if packed.buffers is not None else {}
    program = programs[packed.loop]
    expected = [(0, len(program.calls))]
    if packed.rotary[0].depends_on_length:
        # These tables are not all in one place, so that the embedding comes first and alone.
        expected = [(0, program.tables), (program.layers[0], len(program.calls))]
    assert runs.seen == expected


# The most likely token, and draws with and without filters.
DRAWS = [(0.0, 0, 1.0, 0.0, 0.0), (1.0, 0, 1.0, 0.0, 0.37), (0.7, 5, 0.9, 0.0, 0.81), (2.0, 0, 1.0, 0.05, 0.55)]


@pytest.mark.parametrize("counts", [[1], [1, 1, 1, 1], [3, 1, 9]], ids=str)
def test_tokens_are_chosen_in_the_call_that_computes_their_logits(packed: PackedForward, counts: list[int]) -> None:
    """They are those of the logits that a step returns, over sequences that share a block that is
    copied; what refuses or fails leaves all as before.
    """
    loop = packed.loop
    assert loop is not None
    chooses = not packed.rotary[0].depends_on_length
    leader = packed.admit(60)
    packed.forward([StepRows(leader, prompt(21))])
    for draw in DRAWS:
        found = []
        for is_chosen in (True, False):
            sequences = [leader.fork() for _ in counts]
            rows = [StepRows(one, prompt(n, seed=n), num_logits=n) for one, n in zip(sequences, counts, strict=True)]
            draws = [draw] * sum(counts)
            with packed.begin(rows) as step:
                tokens = step.choose(draws) if is_chosen else None
                assert (tokens is not None) == (is_chosen and chooses)
                if tokens is None:
                    values = step.run().contiguous()
                    fields = [(row, *one) for row, one in enumerate(draws)]
                    tokens = _core.draw_tokens(values.data_ptr(), 4 * values.shape[1], "f32", values.shape[1], fields)
            assert [one.num_tokens for one in sequences] == [21 + count for count in counts]
            found.append(tokens)
            for one in sequences:
                one.release()
        assert found[0] == found[1]
    before = expert_calls(packed.model)
    with pytest.raises(ConfigError, match="outside the vocabulary"), packed.begin([StepRows(leader, [10**6])]) as step:
        step.most_likely(1)
    with without_experts(packed.model), packed.begin([StepRows(leader, [1])]) as step:
        assert step.choose(DRAWS[:1]) is None
        step.run()
        step.keep([0])
    assert (leader.num_tokens, expert_calls(packed.model)) == (21, before)
    with packed.begin([StepRows(leader, [1])]) as step:
        step.most_likely(1)
    assert {now - then for now, then in zip(expert_calls(packed.model).values(), before.values(), strict=True)} == {1}
    leader.release()
    packed.blocks.check_integrity([])


def test_whoever_stands_in_for_the_experts_is_asked(packed: PackedForward) -> None:
    """Routes that are replaced for a while take the place of the core's own calls, and only for as
    long.
    """
    counts, stored = STEPS["decodes"]
    expected, before = logits(packed, counts, stored), expert_calls(packed.model)
    with without_experts(packed.model):
        assert not same(logits(packed, counts, stored), expected)
    assert expert_calls(packed.model) == before
    seen: list[int] = []
    with experts_watched(packed.model, lambda layer, _ids: seen.append(layer)):
        assert same(logits(packed, counts, stored), expected)
    num_steps = 1 + sum(1 for count in stored if count)
    assert len(seen) == num_steps * len(before)
    assert same(logits(packed, counts, stored), expected)
    assert {after - before[name] for name, after in expert_calls(packed.model).items()} == {2 * num_steps}


def test_a_token_that_is_none_fails_its_step_alone(packed: PackedForward) -> None:
    expected, sequence = logits(packed, *STEPS["one decode"]), packed.admit(8)
    for token in (-1, packed.vocab_size):
        with pytest.raises(ConfigError, match="a token id is outside the vocabulary of"):
            packed.forward([StepRows(sequence, [token])])
    sequence.release()
    assert same(logits(packed, *STEPS["one decode"]), expected)


@pytest.mark.parametrize("arch", ["qwen3_moe", "deepseek_v3"])
def test_a_lost_worker_is_explained_and_the_step_undone(arch: str) -> None:
    """Routed experts are awaited at once, and behind shared ones."""
    with start(arch, "bf16", "shared", restart=False, host_fallback="none") as runtime:
        packed = open_host(checkpoint(arch, "bf16"), runtime).packed
        assert packed is not None
        logits(packed, *STEPS["one decode"])
        free = packed.blocks.num_free
        os.kill(runtime.worker_processes()[0].pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"killed by SIGKILL") as lost:
            logits(packed, *STEPS["one decode"])
        assert lost.value.worker == "w0"
        assert packed.blocks.num_free == free
        packed.close()


def test_a_closed_runtime_is_named() -> None:
    with start("qwen3_moe", "bf16") as runtime:
        packed = open_host(checkpoint("qwen3_moe", "bf16"), runtime).packed
        assert packed is not None
        logits(packed, *STEPS["one decode"])
    with pytest.raises(DflashError, match="closed"):
        logits(packed, *STEPS["one decode"])
    packed.close()


def test_buffers_of_a_large_step_go_with_it(packed: PackedForward) -> None:
    """Their program must not keep them, because no collector of cycles would run in time."""
    import gc
    import weakref

    assert packed.buffers is not None
    made: list[weakref.ref[Any]] = []
    of = packed.buffers.of

    def noted(num_rows: int, half: int = 0) -> Any:
        buffers = of(num_rows, half)
        made.append(weakref.ref(buffers.normed))
        return buffers

    packed.buffers.of = noted  # type: ignore[method-assign]
    gc.disable()
    try:
        logits(packed, [83], [0])
        assert [reference() for reference in made] == [None] * len(made)
        assert made
    finally:
        gc.enable()
        del packed.buffers.of
