"""A program of the core: what runs in it has the bits and the errors of what is called at once, and
it is neither run twice at a time nor deaf to signals.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import gc
import signal
import threading
import weakref

import numpy as np
import pytest
import torch

from dflash_moe import _core
from dflash_moe.errors import ConfigError, WorkerError
from dflash_moe.operators.addresses import rows_of
from dflash_moe.operators.linear import memory_source
from dflash_moe.topology.numerics import DEFAULT_NUMERICS

ISA = next(name for name in _core.supported_isas() if name != "reference")
POOL = _core.HostPool(threads=2, isa=ISA)
ROWS, WIDTH = 5, 64


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(weight: torch.Tensor) -> _core.PackedLinear:
    return _core.PackedLinear(POOL, [(memory_source(weight), None, 0)], numerics=DEFAULT_NUMERICS)


def step(num_rows: int = ROWS, **addresses: int) -> _core.StepInputs:
    """The inputs of a step of one sequence."""
    table = np.arange(4, dtype=np.int32)
    return _core.StepInputs(_core.AttentionPlan([(table, 0, num_rows)]), 0, **addresses)


def run(program: _core.Program, inputs: _core.StepInputs | None = None) -> None:
    program.run(step() if inputs is None else inputs, 0, program.num_calls)


def test_operators_run_in_their_order_with_the_bits_of_calls_at_once() -> None:
    rows, weight, scale = normal(ROWS, WIDTH, seed=1), normal(WIDTH, WIDTH, seed=2), normal(WIDTH, seed=3)
    linear = packed(weight)
    outs = []
    program = _core.Program(ROWS)
    for target in (_core, program):
        normed, out = torch.empty(ROWS, WIDTH), torch.empty(ROWS, WIDTH)
        norm = (POOL, *rows_of(rows), WIDTH, *rows_of(normed)[:3], 1e-6, scale.data_ptr())
        product = (*rows_of(normed), *rows_of(out)[:3], *rows_of(rows)[:3])
        gate = (POOL, _core.GateForm(activation="silu"), *rows_of(out)[:3], *rows_of(normed), WIDTH, *rows_of(out)[:3])
        if target is _core:
            _core.rms_norm(*norm)
            linear.run(*product)
            _core.apply_gate(*gate)
        else:
            program.rms_norm(*norm)
            program.multiply(linear, *product)
            program.apply_gate(*gate)
            out.fill_(0.0)
        outs.append(out)
    assert not outs[1].any(), "nothing is computed before it runs"
    for _ in range(2):
        run(program)
        assert torch.equal(*outs)
        outs[1].fill_(0.0)


def test_rows_are_gathered_by_what_the_step_says() -> None:
    table, cos, sin = normal(9, WIDTH, seed=4), normal(20, 8, seed=5), normal(20, 8, seed=6)
    rows, turned = torch.zeros(ROWS, WIDTH), torch.zeros(2, ROWS, 8)
    copied = torch.zeros(ROWS, WIDTH + 3)
    program = _core.Program(ROWS)
    program.gather_rows(table.data_ptr(), 4 * WIDTH, 4 * WIDTH, 9, rows.data_ptr(), 4 * WIDTH)
    program.gather_tables(turned[0].data_ptr(), turned[1].data_ptr(), 8)
    program.copy_rows(rows.data_ptr(), 4 * WIDTH, 4 * WIDTH, ROWS, copied.data_ptr(), 4 * (WIDTH + 3))
    for seed in range(3):
        ids = torch.randint(0, 9, (ROWS,), generator=torch.Generator().manual_seed(seed))
        positions = torch.randint(0, 20, (ROWS,), generator=torch.Generator().manual_seed(50 + seed))
        tables = {"cos_address": cos.data_ptr(), "sin_address": sin.data_ptr(), "num_positions": 20, "table_width": 8}
        run(program, step(token_ids_address=ids.data_ptr(), positions_address=positions.data_ptr(), **tables))
        assert torch.equal(rows, table[ids])
        assert torch.equal(turned, torch.stack((cos[positions], sin[positions])))
        assert torch.equal(copied[:, :WIDTH], rows)
    assert not copied[:, WIDTH:].any()
    for outside in (-1, 9):
        ids[2] = outside
        with pytest.raises(ConfigError, match=f"token id {outside} is outside of 0..9 - 1"):
            run(program, step(token_ids_address=ids.data_ptr(), positions_address=positions.data_ptr(), **tables))


def test_an_error_is_that_of_the_call_at_once_and_ends_the_run() -> None:
    weight = torch.eye(WIDTH)
    rows = torch.full((ROWS, WIDTH), 1.0)
    rows[3, 7] = 1e6
    half, after = torch.empty(ROWS, WIDTH, dtype=torch.float16), torch.zeros(ROWS, WIDTH)
    linear, program = packed(weight), _core.Program(ROWS)
    product = (*rows_of(rows), *rows_of(half)[:3])
    program.copy_rows(0, 0, 0, 0, 0, 0)
    program.multiply(linear, *product)
    program.multiply(linear, *rows_of(rows), *rows_of(after)[:3])
    errors = []
    for call in (lambda: linear.run(*product), lambda: run(program)):
        with pytest.raises(WorkerError, match="row 3, column 7") as error:
            call()
        errors.append((type(error.value), str(error.value), error.value.fields()))
    assert errors[0] == errors[1]
    assert program.failed == 1
    assert not after.any(), "what follows is not computed"
    rows[3, 7] = 1.0
    run(program)
    assert program.failed is None
    assert after.all()


@pytest.mark.parametrize(("begin", "end", "num_rows"), [(0, 2, ROWS), (1, 0, ROWS), (0, 1, ROWS + 1)])
def test_other_calls_and_rows_than_a_program_has_are_refused(begin: int, end: int, num_rows: int) -> None:
    program = _core.Program(ROWS)
    program.copy_rows(0, 0, 0, 0, 0, 0)
    with pytest.raises(ConfigError, match="a program of 1 calls for 5 rows cannot run"):
        program.run(step(num_rows), begin, end)


def test_experts_that_nobody_has_bound_are_refused() -> None:
    program = _core.Program(ROWS)
    program.experts()
    program.wait_for_experts()
    for begin, text in ((0, "is not bound"), (1, "awaits experts that it has not called")):
        with pytest.raises(ConfigError, match=text):
            program.run(step(), begin, begin + 1)


def test_a_program_keeps_what_it_was_given() -> None:
    class Owner:
        pass

    owner, program = Owner(), _core.Program(ROWS)
    linear = packed(torch.eye(WIDTH))
    rows, out = normal(ROWS, WIDTH, seed=8), torch.empty(ROWS, WIDTH)
    seen = weakref.ref(owner)
    program.keep(owner)
    program.multiply(linear, *rows_of(rows), *rows_of(out)[:3])
    del owner, linear
    gc.collect()
    assert seen() is not None
    run(program)
    assert torch.allclose(out, rows)
    del program
    gc.collect()
    assert seen() is None


@pytest.fixture
def long() -> tuple[_core.Program, torch.Tensor]:
    """A program that runs for seconds, and where its last call writes."""
    linear = packed(normal(1024, 1024, seed=9))
    rows, out, last = normal(64, 1024, seed=10), torch.empty(64, 1024), torch.zeros(64, 1024)
    program = _core.Program(64)
    for target in [out] * 4000 + [last]:
        program.multiply(linear, *rows_of(rows), *rows_of(target)[:3])
    program.keep((rows, out, last))
    return program, last


class Interrupted(Exception):
    """What a signal raises."""


def test_a_signal_ends_a_run_between_two_calls(long: tuple[_core.Program, torch.Tensor]) -> None:
    program, last = long

    def interrupt(_number: int, _frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            run(program, step(64))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not last.any()
    program.run(step(64), program.num_calls - 1, program.num_calls)
    assert last.any(), "it may run again"


def test_one_thread_at_a_time_runs_a_program_and_others_go_on(long: tuple[_core.Program, torch.Tensor]) -> None:
    program, last = long
    begun, texts = threading.Event(), []

    def compute() -> None:
        while not last.any():
            try:
                begun.set()
                program.run(step(64), program.num_calls - 20, program.num_calls)
            except ConfigError as error:
                texts.append(str(error))

    thread = threading.Thread(target=compute)
    thread.start()
    begun.wait()
    while thread.is_alive() and not texts:
        try:
            program.run(step(64), 0, 0)
        except ConfigError as error:
            texts.append(str(error))
    thread.join()
    assert set(texts) == {"the program is running already"}
