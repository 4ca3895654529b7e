"""Workers that die or freeze, and layers that fail, while an engine computes many requests: each of
them ends typed and by name, all blocks come back, and the engine goes on.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import dflash_moe as dm
from dflash_moe.engine.delivery import TokenStream
from dflash_moe.engine.generation import generate_tokens
from dflash_moe.engine.llm import LLM
from dflash_moe.errors import WorkerLost, WorkerTimeout
from tests.fault.conftest import FAR, freeze, is_gone
from tests.fault.conftest import pids as pids_of
from tests.host_models import checkpoint, prompt, topology
from tests.token_forward import PATIENCE_S, end_of, plain, rest_of, tokens_of

pytestmark = pytest.mark.transformers

ENDLESS = plain(1500, ignore_eos=True)
SHORT = plain(6, ignore_eos=True)
# Its attention is indexed and not paged.
ONE_SEQUENCE = "deepseek_v32"
PROMPTS = [prompt(3 + 2 * place, seed=place) for place in range(8)]


def start(address: str, arch: str = "qwen3_moe", **overrides: Any) -> LLM:
    # Lost workers do not come back, so that requests end: this is about how.
    return dm.LLM(checkpoint(arch, "f32"), topology(address), kv_memory="16MiB", **{"restart": False, **overrides})


def pids(llm: LLM) -> dict[str, int]:
    return pids_of(llm.runtime)


def expected_of(llm: LLM, count: int, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """The first tokens of the plain loop."""
    return [[step.token_id for step in generate_tokens(llm.host, ids, max_new_tokens=count)] for ids in prompts]


def begin(llm: LLM, params: dm.SamplingParams = ENDLESS) -> list[TokenStream]:
    """Submits eight requests, by default for ever, and returns once each of them decodes."""
    streams = [llm.submit(token_ids, params) for token_ids in PROMPTS]
    for stream in streams:
        assert stream.take(PATIENCE_S)
    return streams


def check_all_lost(llm: LLM, streams: list[TokenStream], kinds: tuple[type[Exception], ...]) -> None:
    for stream in streams:
        end = end_of(rest_of(stream))
        assert end.finish_reason == "error"
        assert isinstance(end.error, kinds)
        assert (end.error.worker, end.error.layer is not None) == ("w1", True)
        assert str(end.error).startswith(f"request {stream.request_id}: ")
    check_idle(llm)
    assert llm.engine._thread.is_alive()


def check_idle(llm: LLM) -> None:
    llm.engine.check_integrity(PATIENCE_S)
    stats = llm.stats()["engine"]
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["blocks"]["free"] == stats["blocks"]["total"]


def check_later_requests_are_lost(llm: LLM, kinds: tuple[type[Exception], ...]) -> None:
    for _ in range(2):
        streams = [llm.submit(token_ids, SHORT) for token_ids in PROMPTS[:3]]
        check_all_lost(llm, streams, kinds)
    with pytest.raises(kinds, match=r"^request \d+: "):
        llm.generate(PROMPTS, SHORT)
    outcomes = list(llm.generate_each(PROMPTS, SHORT))
    assert all(isinstance(outcome, kinds) for outcome in outcomes)
    assert len({str(outcome).partition(":")[0] for outcome in outcomes}) == len(PROMPTS)
    check_idle(llm)


@pytest.mark.parametrize("address", ["unix", "tcp"])
def test_a_worker_that_is_killed_ends_all_requests_and_later_ones_typed(address: str) -> None:
    with start(address, **FAR) as llm:
        victims = pids(llm)
        streams = begin(llm)
        assert llm.unready_reason() == ""
        os.kill(victims["w1"], signal.SIGKILL)
        check_all_lost(llm, streams, (WorkerLost,))
        check_later_requests_are_lost(llm, (WorkerLost,))
        assert "worker w1 is lost (" in llm.unready_reason()
    assert all(is_gone(pid) for pid in victims.values())


def test_a_worker_that_is_killed_within_a_step_leaves_no_partial_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies when the first layer is done and the second not begun."""
    with start("unix", **FAR) as llm:
        expected = expected_of(llm, 12)
        victims = pids(llm)
        streams = [llm.submit(token_ids, ENDLESS) for token_ids in PROMPTS]
        steps = iter(range(1 << 30))

        def kill() -> None:
            if next(steps) == 10:
                os.kill(victims["w1"], signal.SIGKILL)

        monkeypatch.setattr(llm.host.packed, "residuals", BeforeLayer(1, kill))
        for stream, tokens in zip(streams, expected, strict=True):
            deltas = rest_of(stream)
            assert isinstance(end_of(deltas).error, WorkerLost)
            assert tokens_of(deltas)[:12] == tokens[: len(tokens_of(deltas))]
        check_idle(llm)
        assert llm.stats()["engine"]["failed_steps"] == 1


def test_a_worker_that_comes_back_costs_requests_nothing_but_the_pause() -> None:
    with start("unix", restart=True, park_s=90.0, **FAR) as llm:
        expected = expected_of(llm, 40)
        victims = pids(llm)
        streams = begin(llm, plain(40, ignore_eos=True))
        for pid in victims.values():
            os.kill(pid, signal.SIGKILL)
        for stream, tokens in zip(streams, expected, strict=True):
            deltas = rest_of(stream)
            assert end_of(deltas).finish_reason == "length"
            assert tokens_of(deltas) == tokens[-len(tokens_of(deltas)) :]
        check_idle(llm)
        assert llm.stats()["engine"]["failed_steps"] == 0
        assert llm.unready_reason() == ""
        assert set(pids(llm).values()).isdisjoint(victims.values())


def test_a_worker_that_is_frozen_ends_all_requests_in_time() -> None:
    with start("unix", stall_timeout_s=2.0, call_timeout_s=90.0) as llm:
        victims = pids(llm)
        streams = begin(llm)
        freeze(victims["w1"])
        check_all_lost(llm, streams, (WorkerLost,))
        check_later_requests_are_lost(llm, (WorkerLost,))
    assert all(is_gone(pid) for pid in victims.values())


def test_a_call_that_passes_its_deadline_ends_its_requests_and_leaving_still_works() -> None:
    with start("unix", stall_timeout_s=90.0, call_timeout_s=3.0) as llm:
        victims = pids(llm)
        streams = begin(llm)
        freeze(victims["w1"])
        check_all_lost(llm, streams, (WorkerLost, WorkerTimeout))
        os.kill(victims["w1"], signal.SIGCONT)
    assert all(is_gone(pid) for pid in victims.values())


def test_closing_while_a_worker_is_frozen_ends_all_who_wait() -> None:
    llm = start("unix", stall_timeout_s=2.0, call_timeout_s=90.0)
    victims = pids(llm)
    streams = begin(llm)
    freeze(victims["w1"])
    closing = threading.Thread(target=llm.close)
    closing.start()
    for stream in streams:
        end = end_of(rest_of(stream))
        assert isinstance(end.error, WorkerLost | dm.RequestCancelled)
        assert str(end.error).startswith(f"request {stream.request_id}: ")
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert all(is_gone(pid) for pid in victims.values())


class BeforeLayer:
    """Calls `function` before a layer of each step, as whoever is shown the layers' rows."""

    def __init__(self, place: int, function: Callable[[], None]) -> None:
        self._place, self._function = place, function

    def begin(self, first: int) -> None:
        pass

    def see(self, layer: int, positions: Any, hidden_states: Any) -> None:
        if layer == self._place - 1:
            self._function()


@pytest.fixture(scope="module", params=["1", "2"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """One batch or two halves a step, of which the one that fails stops the other."""
    with start("loopback", max_batch_tokens=32, micro_batches=request.param) as made:
        yield made


@pytest.mark.parametrize(
    "error", [MemoryError("no memory"), RuntimeError("a kernel failed"), dm.ConfigError("a value is wrong")]
)
@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_layer_that_fails_once_ends_the_requests_of_its_step_and_others_are_exact(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: Exception, at: int
) -> None:
    """What was stored in the step that failed is computed again by whoever has the same prompt."""
    expected = expected_of(llm, 6)
    llm.engine.drop_prefix_cache()
    steps = iter(range(1 << 30))

    def fail() -> None:
        if next(steps) == at:
            raise type(error)(*error.args)

    monkeypatch.setattr(llm.host.packed, "residuals", BeforeLayer(1, fail))
    streams = [llm.submit(token_ids, SHORT) for token_ids in PROMPTS]
    num_failed = 0
    for stream, tokens in zip(streams, expected, strict=True):
        deltas = rest_of(stream)
        end = end_of(deltas)
        if end.finish_reason == "error":
            num_failed += 1
            assert str(end.error).startswith(f"request {stream.request_id}: ")
            assert str(error) in str(end.error)
            assert tokens_of(deltas) == tokens[: len(tokens_of(deltas))]
        else:
            assert tokens_of(deltas) == tokens
    assert num_failed > 0
    check_idle(llm)
    found = llm.generate(PROMPTS, SHORT)
    assert [list(one.token_ids) for one in found] == expected
    check_idle(llm)


def test_a_sequence_with_a_cache_of_its_own_begins_again_after_a_step_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with start("loopback", ONE_SEQUENCE) as llm:
        assert not llm.engine._forward.cuts_prompts
        expected = expected_of(llm, 6, PROMPTS[:3])
        model, steps = llm.host.model, iter(range(1 << 30))
        forward = model.forward

        def fail(*arguments: Any, **named: Any) -> Any:
            found = forward(*arguments, **named)
            if next(steps) == 7:
                raise RuntimeError("a kernel failed")
            return found

        monkeypatch.setattr(model, "forward", fail)
        streams = [llm.submit(token_ids, SHORT) for token_ids in PROMPTS[:3]]
        ends = [end_of(rest_of(stream)) for stream in streams]
        assert any(end.finish_reason == "error" for end in ends)
        assert all("a kernel failed" in str(end.error) for end in ends if end.error is not None)
        check_idle(llm)
        assert [list(one.token_ids) for one in llm.generate(PROMPTS[:3], SHORT)] == expected
        check_idle(llm)
