"""What bad input gets from `dm.LLM`: a typed error that names request, field and value, and nothing
for the requests beside it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

import dflash_moe as dm
from dflash_moe.engine.generation import generate_tokens
from dflash_moe.engine.llm import LLM
from tests.host_models import checkpoint, prompt, topology
from tests.token_forward import PATIENCE_S, Held, plain, rest_of, tokens_of

NEW_TOKENS = 6
GREEDY = plain(NEW_TOKENS, ignore_eos=True)
GOOD = [prompt(count, seed=count) for count in (5, 40, 17)]
# 24 blocks of 16 tokens, which is less than the model has positions for.
ROOM = 384


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with dm.LLM(checkpoint("qwen3_moe", "f32"), topology("loopback"), kv_memory=f"{ROOM * 768}", max_batch_tokens=32) as made:
        yield made


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return [[step.token_id for step in generate_tokens(llm.host, ids, max_new_tokens=NEW_TOKENS)] for ids in GOOD]


@pytest.fixture(autouse=True)
def others_go_on(llm: LLM, expected: list[list[int]]) -> Iterator[None]:
    """While each test runs three requests do, whose tokens nothing may change."""
    streams = [llm.submit(ids, GREEDY) for ids in GOOD]
    yield
    assert [tokens_of(rest_of(stream)) for stream in streams] == expected
    llm.engine.check_integrity()
    stats = llm.stats()["engine"]
    assert (stats["running"], stats["waiting"], stats["failed_steps"]) == (0, 0, 0)
    assert stats["blocks"]["free"] == stats["blocks"]["total"]


def vocab_size(llm: LLM) -> int:
    return int(llm.host.model.config.vocab_size)


WRONG_PROMPTS: list[tuple[Any, str]] = [
    ([], r"the prompt has no tokens"),
    (np.array([], np.int64), r"the prompt has no tokens"),
    ([1, -1], r"token id -1 is not allowed; the model has the ids 0\.\."),
    ([1, 1 << 40], rf"token id {1 << 40} is not allowed; the model has the ids 0\.\."),
    ([1, 10**5000], r"token id an integer of 16610 bits is not allowed"),
    ([1.0], r"token id 1\.0 is not allowed"),
    ([True], r"token id True is not allowed"),
    ([None], r"token id None is not allowed"),
    (["a"], r"token id 'a' is not allowed"),
    ([[1, 2]], r"token id \[1, 2\] is not allowed"),
    (torch.tensor([[1, 2]]), r"token id tensor\(\[1, 2\]\) is not allowed"),
    (torch.tensor([1.5]), r"token id tensor\(1\.5000\) is not allowed"),
    (np.array([1.5]), r"token id (np\.float64\()?1\.5\)? is not allowed"),
    ([1] * (ROOM + 1), rf"prompt of {ROOM + 1} tokens and max_tokens 6: .* the KV cache has room for {ROOM}"),
    ([1] * (ROOM - 5), rf"prompt of {ROOM - 5} tokens and max_tokens 6: .* the KV cache has room for {ROOM}"),
    ([1] * 100_000, r"prompt of 100000 tokens and max_tokens 6: .* the model has positions for 1\.\."),
]


@pytest.mark.parametrize(("token_ids", "text"), WRONG_PROMPTS, ids=[text[:40] for _, text in WRONG_PROMPTS])
def test_a_prompt_that_cannot_be_computed_is_refused_by_request_and_value(llm: LLM, token_ids: Any, text: str) -> None:
    with pytest.raises(dm.ConfigError, match=rf"^request \d+: {text}"):
        llm.engine.submit(token_ids, GREEDY)
    (outcome,) = llm.generate_each([token_ids], GREEDY) if len(token_ids) else (dm.ConfigError(),)
    assert isinstance(outcome, dm.ConfigError)


@pytest.mark.parametrize("wrong", [None, 7, "text", b"bytes", object()])
def test_what_is_no_sequence_of_token_ids_is_refused(llm: LLM, wrong: Any) -> None:
    with pytest.raises(dm.ConfigError, match=r"^request \d+: the prompt .* is not allowed; allowed: a sequence of token ids"):
        llm.engine.submit(wrong, GREEDY)
    if not isinstance(wrong, str):
        with pytest.raises(dm.ConfigError, match=r"^prompts? "):
            llm.generate(wrong, GREEDY)
        with pytest.raises(dm.ConfigError, match=r"^prompt "):
            llm.submit(wrong, GREEDY)


def test_the_first_id_that_the_model_lacks_is_refused_and_the_last_that_it_has_is_not(llm: LLM) -> None:
    size = vocab_size(llm)
    with pytest.raises(dm.ConfigError, match=rf"token id {size} is not allowed; the model has the ids 0\.\.{size - 1}"):
        llm.submit([size], GREEDY)
    assert len(tokens_of(rest_of(llm.submit([size - 1], GREEDY)))) == NEW_TOKENS


def test_arrays_and_tensors_of_ids_are_prompts_like_lists(llm: LLM, expected: list[list[int]]) -> None:
    for token_ids in (np.array(GOOD[0], np.int32), torch.tensor(GOOD[0]), tuple(GOOD[0]), iter(GOOD[0])):
        (found,) = llm.generate(token_ids, GREEDY)
        assert list(found.token_ids) == expected[0]


@pytest.mark.parametrize("wrong", [{}, {"max_tokens": 3}, 0, "greedy", dm.SamplingParams])
def test_parameters_that_are_none_are_refused(llm: LLM, wrong: Any) -> None:
    with pytest.raises(dm.ConfigError, match=r"^request \d+: params .* are not allowed; pass a SamplingParams"):
        llm.submit(GOOD[0], wrong)
    if not isinstance(wrong, str):
        with pytest.raises(dm.ConfigError, match="params .* are not allowed"):
            llm.generate([GOOD[0]], wrong)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 1 << 31}, {"max_tokens": 2.5}, {"temperature": -0.1},
        {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1},
        {"min_p": 1.0}, {"n": 0}, {"n": 65}, {"seed": -1}, {"logprobs": 21}, {"presence_penalty": 3.0},
        {"frequency_penalty": float("nan")}, {"repetition_penalty": 0.0}, {"stop": [""]}, {"stop": 5},
        {"logit_bias": {1: float("inf")}}, {"stop_token_ids": [-1]}, {"token_mask": 5},
    ],
    ids=str,
)  # fmt: skip
def test_sampling_values_out_of_range_name_field_and_value(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(dm.ConfigError, match=rf"{name}.* is not allowed; allowed: "):
        dm.SamplingParams(**fields)


@pytest.mark.parametrize("fields", [{"stop_token_ids": [10**6]}, {"logit_bias": {10**6: 1.0}}], ids=str)
def test_token_ids_of_parameters_that_the_model_lacks_name_request_field_and_id(llm: LLM, fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(dm.ConfigError, match=rf"^request \d+: .*{name}: token id 1000000 is not allowed; allowed: 0\.\."):
        llm.submit(GOOD[0], plain(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e4}, {"temperature": 1e-300}, {"top_p": 1e-300}, {"top_k": (1 << 31) - 1}, {"min_p": 0.999},
        {"repetition_penalty": 1e-300}, {"seed": (1 << 64) - 1}, {"presence_penalty": -2, "frequency_penalty": -2},
        {"logit_bias": dict.fromkeys(range(200), -100.0)}, {"logprobs": 20},
    ],
    ids=lambda fields: str(fields)[:40],
)  # fmt: skip
def test_extreme_values_that_are_allowed_give_tokens(llm: LLM, fields: dict[str, Any]) -> None:
    params = dm.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, **{"seed": 3, **fields})
    (found,) = llm.generate([GOOD[0]], params)
    assert len(found.token_ids) == NEW_TOKENS
    assert all(0 <= token < vocab_size(llm) for token in found.token_ids)


def test_a_request_that_fills_the_cache_to_its_last_token_is_computed(llm: LLM) -> None:
    (found,) = llm.generate([[1] * (ROOM - NEW_TOKENS)], GREEDY)
    assert (len(found.token_ids), found.finish_reason) == (NEW_TOKENS, "length")


def test_a_stop_string_that_never_comes_changes_nothing(llm: LLM, expected: list[list[int]]) -> None:
    never = plain(NEW_TOKENS, ignore_eos=True, stop=["\0" * 1024, "never said"], stop_token_ids=[])
    (found,) = llm.generate([GOOD[0]], never)
    (whole,) = llm.generate([GOOD[0]], GREEDY)
    assert (list(found.token_ids), found.text, found.finish_reason) == (expected[0], whole.text, "length")


def test_a_bad_prompt_among_good_ones_is_one_outcome(llm: LLM, expected: list[list[int]]) -> None:
    outcomes = list(llm.generate_each([GOOD[0], [-1], GOOD[1], [1] * 100_000, GOOD[2]], GREEDY))
    assert [isinstance(outcome, dm.ConfigError) for outcome in outcomes] == [False, True, False, True, False]
    assert [list(outcome[0].token_ids) for outcome in outcomes[::2] if isinstance(outcome, list)] == expected


def held_in_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Held:
    """Holds the engine thread within its next step."""
    held, begin = Held(), llm.engine._steps.begin

    def held_begin(*arguments: Any) -> Any:
        held(())
        return begin(*arguments)

    monkeypatch.setattr(llm.engine._steps, "begin", held_begin)
    return held


WAITS: dict[str, Callable[[LLM, dm.SamplingParams], object]] = {
    "generate": lambda llm, params: llm.generate([GOOD[0], GOOD[1]], params),
    "stream": lambda llm, params: list(llm.stream(GOOD[0], params)),
    "take": lambda llm, params: llm.submit(GOOD[0], params).take(PATIENCE_S),
}


@pytest.mark.parametrize("way", WAITS)
def test_ctrl_c_cancels_what_the_caller_waits_for_and_nothing_else(llm: LLM, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    cancelled = llm.stats()["engine"]["finished"].get("cancelled", 0)
    held = held_in_a_step(llm, monkeypatch)
    endless = plain(200, ignore_eos=True)
    beside = llm.submit(GOOD[0], GREEDY)
    held.wait()
    streams: list[Any] = []
    submit = llm.engine.submit
    monkeypatch.setattr(
        llm.engine, "submit", lambda *arguments, **more: streams.append(submit(*arguments, **more)) or streams[-1]
    )

    num_streams = 2 if way == "generate" else 1

    def interrupt() -> None:
        # Each of them is waited for alone, or with the others.
        while len(streams) < num_streams or not all(stream.bells or stream.group for stream in streams):
            if is_over.wait(0.001):
                return
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    is_over = threading.Event()
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            WAITS[way](llm, endless)
    finally:
        is_over.set()
        thread.join(PATIENCE_S)
        held.may_go.set()
    if way == "take":
        # Its caller still has it, and may go on.
        streams[0].cancel()
    for stream in streams:
        rest_of(stream)
    assert len(tokens_of(rest_of(beside))) == NEW_TOKENS
    llm.engine.check_integrity()
    assert llm.stats()["engine"]["finished"]["cancelled"] == cancelled + len(streams)


def test_a_task_that_is_cancelled_cancels_its_request(llm: LLM) -> None:
    cancelled = llm.stats()["engine"]["finished"].get("cancelled", 0)

    async def read() -> None:
        async for _ in llm.astream(GOOD[0], plain(200, ignore_eos=True)):
            has_begun.set()

    async def caller() -> None:
        task = asyncio.create_task(read())
        await asyncio.wait_for(has_begun.wait(), PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    has_begun = asyncio.Event()
    asyncio.run(caller())
    llm.engine.check_integrity()
    assert llm.stats()["engine"]["finished"]["cancelled"] == cancelled + 1


def test_a_closed_model_refuses_by_name() -> None:
    with dm.LLM(checkpoint("qwen3_moe", "f32"), topology("loopback"), kv_memory="16MiB") as closed:
        pass
    for late in (
        lambda: closed.generate([GOOD[0]], GREEDY),
        lambda: list(closed.stream(GOOD[0])),
        lambda: closed.submit([1]),
    ):
        with pytest.raises(dm.RequestCancelled, match=r"^request \d+: the engine is closed; open another one"):
            late()
    closed.close()
