"""Every way a call can fail from Python: the right class, and a message that names worker, layer or
argument.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_moe import _core, errors
from tests.unit.core.toy_runtime import LAYER, LAYER_NAME, NUM_EXPERTS, Batch, Experts, ToyRuntime

EXPERTS = Experts.make(seed=1)
TWO_WORKERS = [(0, range(6)), (1, range(6, NUM_EXPERTS))]
ON_SECOND = {"kind": "drop", "point": "publish", "nth": 1}


def batch_for(worker: int) -> Batch:
    """A batch whose experts all live on one worker of TWO_WORKERS."""
    batch = Batch.make(num_tokens=6, top_k=2, seed=worker)
    batch.topk_ids[:] = batch.topk_ids % 6 + 6 * worker
    return batch


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"kind": "fail", "point": "publish", "nth": 1}, errors.WorkerLost),
        ({"kind": "fail", "point": "poll", "nth": 1}, errors.WorkerLost),
        ({"kind": "corrupt", "point": "poll", "nth": 1}, errors.ProtocolError),
        ({"kind": "truncate", "point": "poll", "nth": 1}, errors.ProtocolError),
        ({"kind": "drop", "point": "poll", "nth": 1}, errors.WorkerTimeout),
        ({"kind": "drop", "point": "publish", "nth": 1}, errors.WorkerTimeout),
    ],
)
def test_a_faulty_channel_ends_the_call_with_its_class_and_spares_the_other_worker(
    tmp_path: Path, fault: dict[str, Any], expected: type[Exception]
) -> None:
    with ToyRuntime(tmp_path, TWO_WORKERS, EXPERTS, call_timeout_s=2.0, faults={1: fault}) as runtime:
        with pytest.raises(expected, match=rf"w1.*{LAYER_NAME}"):
            runtime.run(batch_for(1))
        good = batch_for(0)
        np.testing.assert_array_equal(runtime.run(good), runtime.expected(good))


def test_a_worker_error_names_worker_and_layer(tmp_path: Path) -> None:
    batch = batch_for(1)
    batch.topk_weights[:] = 1e30
    with ToyRuntime(tmp_path, TWO_WORKERS, EXPERTS, reply_dtype="f16") as runtime:
        with pytest.raises(errors.WorkerError, match=rf"w1.*{LAYER_NAME}"):
            runtime.run(batch)
        good = batch_for(1)
        # an error does not cost the worker
        np.testing.assert_array_equal(runtime.run(good), runtime.expected(good))


def test_a_hidden_state_that_the_wire_cannot_hold_fails_the_call_naming_layer_and_token(tmp_path: Path) -> None:
    batch = batch_for(0)
    batch.hidden_states[4, 7] = 1e6
    with ToyRuntime(tmp_path, TWO_WORKERS, EXPERTS, request_dtype="f16") as runtime:
        with pytest.raises(errors.WorkerError, match=rf"{LAYER_NAME}, token 4"):
            runtime.run(batch)
        # infinity is a value like any other and stays in its row
        batch.hidden_states[4, 7] = np.inf
        output = runtime.run(batch)
        assert not np.isfinite(output[4]).any()
        assert np.isfinite(np.delete(output, 4, axis=0)).all()


def test_a_sum_that_the_model_dtype_cannot_hold_fails_the_call(tmp_path: Path) -> None:
    batch = batch_for(0)
    batch.topk_weights[:] = 1e8
    with (
        ToyRuntime(tmp_path, TWO_WORKERS, EXPERTS) as runtime,
        pytest.raises(errors.WorkerError, match=rf"{LAYER_NAME}, token \d+: the sum"),
    ):
        runtime.run(batch, "f16")


def test_arguments_are_checked_by_name(tmp_path: Path) -> None:
    batch = batch_for(0)
    with ToyRuntime(tmp_path, TWO_WORKERS, EXPERTS) as runtime:
        batch.topk_ids[3, 1] = -1
        with pytest.raises(errors.ConfigError, match=r"topk_ids\[3, 1\] is -1"):
            runtime.run(batch)
        tokens, _ = runtime.tokens(batch_for(0), "f32")
        with pytest.raises(errors.ConfigError, match="layer 7"):
            runtime.client.run(7, tokens)
        with pytest.raises(errors.ConfigError, match="dtype 'f64'"):
            runtime.tokens(batch_for(0), "f32", dtype="f64")
        with pytest.raises(errors.ConfigError, match="top_k is 0"):
            runtime.client.run(LAYER, runtime.tokens(batch_for(0), "f32", top_k=0)[0])


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_timeouts_must_be_positive_and_finite(seconds: float) -> None:
    with pytest.raises(errors.ConfigError, match="call_timeout_s"):
        _core.Client(spin_ns=0, call_timeout_s=seconds, stall_timeout_s=2.0)


def test_a_worker_marked_lost_ends_its_calls_at_once(tmp_path: Path) -> None:
    batch = batch_for(1)
    with ToyRuntime(tmp_path, TWO_WORKERS, EXPERTS, faults={1: ON_SECOND}) as runtime:
        tokens, _ = runtime.tokens(batch, "f32")
        call = runtime.submit(tokens)
        waiting = threading.Event()
        outcome: list[bool] = []

        def wait() -> None:
            waiting.set()
            outcome.append(call.wait(60.0))

        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait(60.0)
        runtime.client.mark_lost(1, "its process ended with code 9")
        thread.join(10.0)
        assert outcome == [True]
        with pytest.raises(errors.WorkerLost, match="w1 was lost: its process ended with code 9"):
            call.result()
        with pytest.raises(errors.WorkerLost, match="w1"):
            runtime.run(batch)
        reports = runtime.client.workers()
    assert [report["state"] for report in reports] == ["ready", "lost"]
    assert reports[1]["reason"] == "its process ended with code 9"


def test_a_timed_out_slot_is_quarantined_until_the_path_is_renewed(tmp_path: Path) -> None:
    batch = batch_for(1)
    faults = {1: {"kind": "drop", "point": "publish", "nth": 1}}
    with ToyRuntime(tmp_path, TWO_WORKERS, EXPERTS, call_timeout_s=2.0, faults=faults) as runtime:
        with pytest.raises(errors.WorkerTimeout):
            runtime.run(batch)
        assert runtime.client.workers()[1]["quarantined_slots"] == 1
        # another slot still works
        np.testing.assert_array_equal(runtime.run(batch), runtime.expected(batch))
        host, remote = _core.make_loopback(_core.Geometry(2, 1 << 16, 1 << 16))
        runtime.client.renew_path(1, host, 2)
        report = runtime.client.workers()[1]
        assert (report["quarantined_slots"], report["generation"]) == (0, 2)
        del remote


def test_an_abandoned_call_writes_nothing_and_releases_what_it_kept(tmp_path: Path) -> None:
    batch = batch_for(1)
    with ToyRuntime(tmp_path, TWO_WORKERS, EXPERTS, slice_tokens=1, window=1) as runtime:
        kept = object()
        references = sys.getrefcount(kept)
        tokens, output = runtime.tokens(batch, "f32", owners=kept)
        call = runtime.submit(tokens)
        del tokens
        assert sys.getrefcount(kept) == references + 1
        call.abandon()
        assert sys.getrefcount(kept) == references
        before = output.copy()
        assert call.wait(0.0)
        with pytest.raises(errors.DflashError, match="abandoned"):
            call.result()
        np.testing.assert_array_equal(runtime.run(batch), runtime.expected(batch))
        np.testing.assert_array_equal(output, before)
        assert runtime.client.workers()[1]["stale_replies"] <= 1


def test_dropping_a_call_abandons_it(tmp_path: Path) -> None:
    batch = batch_for(1)
    with ToyRuntime(tmp_path, TWO_WORKERS, EXPERTS, slice_tokens=1, window=1) as runtime:
        tokens, output = runtime.tokens(batch, "f32")
        call = runtime.submit(tokens)
        del call
        before = output.copy()
        np.testing.assert_array_equal(runtime.run(batch), runtime.expected(batch))
        np.testing.assert_array_equal(output, before)


def test_a_result_asked_too_early_is_an_error(tmp_path: Path) -> None:
    batch = batch_for(1)
    with ToyRuntime(tmp_path, TWO_WORKERS, EXPERTS, faults={1: ON_SECOND}) as runtime:
        tokens, _ = runtime.tokens(batch, "f32")
        call = runtime.submit(tokens)
        assert not call.wait(0.01)
        with pytest.raises(errors.ConfigError, match="not done"):
            call.result()
        call.abandon()


def test_a_signal_interrupts_a_wait(tmp_path: Path) -> None:
    class Interrupted(Exception):  # noqa: N818 - not an error
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    batch = batch_for(1)
    former = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with ToyRuntime(tmp_path, TWO_WORKERS, EXPERTS, faults={1: ON_SECOND}) as runtime:
            timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            with pytest.raises(Interrupted):
                runtime.run(batch)
            timer.join()
            np.testing.assert_array_equal(runtime.run(batch), runtime.expected(batch))
    finally:
        signal.signal(signal.SIGUSR1, former)


def test_a_forked_child_gets_an_error_instead_of_its_parents_connections(tmp_path: Path) -> None:
    batch = batch_for(0)
    with ToyRuntime(tmp_path, TWO_WORKERS, EXPERTS) as runtime:
        child = os.fork()
        if child == 0:
            try:
                runtime.run(batch)
            except errors.DflashError as error:
                os._exit(0 if "fork" in str(error) else 3)
            os._exit(4)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        np.testing.assert_array_equal(runtime.run(batch), runtime.expected(batch))


def test_a_forked_child_can_drop_a_worker_whose_threads_it_does_not_have() -> None:
    store = _core.ShardStore(isa="scalar", num_threads=3)
    worker = _core.Worker(name="w0")
    ours, theirs = socket.socketpair()
    worker.start_pulse(theirs.detach())
    child = os.fork()
    if child == 0:
        del worker, store
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ours.recv(16)[:4] == b"PULS"
    ours.close()


def test_more_calls_than_the_bound_are_refused(tmp_path: Path) -> None:
    with ToyRuntime(tmp_path, TWO_WORKERS, EXPERTS) as runtime:
        client = _core.Client(spin_ns=0, call_timeout_s=30, stall_timeout_s=2, max_calls=1)
        host, remote = _core.make_loopback(_core.Geometry(2, 1 << 16, 1 << 16))
        client.add_worker(
            name="silent", channel=host, generation=1, pulse_fd=-1, slice_tokens=64, window=1, request_dtype="f32",
            reply_dtype="f32",
        )  # fmt: skip
        client.define_layer(
            layer=2, name=LAYER_NAME, in_size=48, out_size=56, num_experts=12, shards=[(0, 0, 1, list(range(12)))]
        )
        tokens, _ = runtime.tokens(batch_for(0), "f32")
        call = _core.Call(client, LAYER, tokens)
        with pytest.raises(errors.ConfigError, match="take results"):
            _core.Call(client, LAYER, tokens)
        call.abandon()
        _core.Call(client, LAYER, tokens).abandon()
        del remote


def test_the_table_of_error_codes_is_complete() -> None:
    codes = _core.error_codes()
    assert [value for value, _ in codes.values()] == list(range(1, len(codes) + 1))
    for name, (_, python_class) in codes.items():
        assert issubclass(python_class, errors.DflashError), name
        assert getattr(errors, python_class.__name__) is python_class
    header = (Path(__file__).parents[3] / "csrc" / "base" / "error_code.h").read_text()
    in_header = [line.split("=")[0].strip() for line in header.splitlines() if line.strip().startswith("k") and " = " in line]
    assert ["k" + name.title().replace("_", "") for name in codes] == in_header
