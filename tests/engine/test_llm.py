"""`dm.LLM` as programs use it: whole, streamed and awaited completions have the tokens of the plain
loop whoever else asks, and every request ends, with its tokens or typed.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import dflash_moe as dm
from dflash_moe.engine.delivery import Cancel
from dflash_moe.engine.generation import generate_tokens
from dflash_moe.engine.llm import LLM
from dflash_moe.engine.text import Completion
from dflash_moe.experts.snapshot import COUNTED
from dflash_moe.server.snapshot import snapshot
from tests.host_models import checkpoint, prompt, topology

PROMPTS = [prompt(count, seed=count) for count in (5, 40, 17, 23, 1, 33)]
NEW_TOKENS = 12
# The tiny model's last token is like any other.
GREEDY = dm.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0, seed=7)


def start(**overrides: Any) -> LLM:
    return dm.LLM(checkpoint("qwen3_moe", "f32"), topology("loopback"), kv_memory="16MiB", **overrides)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with start(max_batch_tokens=32) as made:
        yield made


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    """The tokens of the plain loop, one prompt after another."""
    return [plain_tokens(llm, token_ids) for token_ids in PROMPTS]


def plain_tokens(llm: LLM, token_ids: list[int]) -> list[int]:
    return [step.token_id for step in generate_tokens(llm.host, token_ids, max_new_tokens=NEW_TOKENS)]


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Iterator[None]:
    """After each test no request runs, and every block is accounted for."""
    yield
    check_idle(llm)


def check_idle(llm: LLM) -> None:
    llm.engine.check_integrity()
    stats = llm.stats()["engine"]
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["blocks"]["free"] == stats["blocks"]["total"]


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]


def test_prompts_together_get_the_tokens_of_the_plain_loop(llm, plain):
    found = llm.generate(PROMPTS, GREEDY)
    assert tokens_of(found) == plain
    assert [(one.prompt, one.choice, one.finish_reason) for one in found] == [(at, 0, "length") for at in range(len(PROMPTS))]
    assert [one.prompt_tokens for one in found] == [len(token_ids) for token_ids in PROMPTS]
    assert all(one.ttft_s > 0 and one.tpot_s > 0 for one in found)


def test_one_prompt_is_a_text_or_token_ids(llm):
    text = "A list"
    (found,) = llm.generate(text, GREEDY)
    assert [found] == llm.generate(llm.token_ids(text), GREEDY) == llm.generate([text], GREEDY)
    assert found.text == llm.tokenizer.decode(found.token_ids, skip_special_tokens=True)


def test_streams_have_what_generate_has(llm, plain):
    (whole,) = llm.generate(PROMPTS[1], GREEDY)
    chunks = list(llm.stream(PROMPTS[1], GREEDY))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == plain[1]
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) == NEW_TOKENS
    assert sorted(chunk.time_s for chunk in chunks) == [chunk.time_s for chunk in chunks]


def test_threads_and_an_event_loop_share_one_engine_and_get_their_own_tokens(llm, plain):
    places = [at % len(PROMPTS) for at in range(12)]

    def whole(place: int) -> list[int]:
        return list(llm.generate(PROMPTS[place], GREEDY)[0].token_ids)

    async def streamed(place: int) -> list[int]:
        return [token async for chunk in llm.astream(PROMPTS[place], GREEDY) for token in chunk.token_ids]

    async def all_streamed() -> list[list[int]]:
        return await asyncio.gather(*map(streamed, places))

    before = threading.active_count()
    with ThreadPoolExecutor(6) as callers:
        awaited = callers.submit(asyncio.run, all_streamed())
        threaded = list(callers.map(whole, places))
        assert awaited.result(60) == threaded == [plain[place] for place in places]
    assert threading.active_count() <= before  # fewer, where a thread of an earlier test ended


def test_a_stop_string_ends_a_choice_early_and_gives_its_blocks_back(llm, plain):
    (whole,) = llm.generate(PROMPTS[1], GREEDY)
    stop = whole.text[3:5]
    before = llm.stats()["engine"]["finished"].get("cancelled", 0)
    stopping = dataclasses.replace(GREEDY, stop=[stop, "never said"], max_tokens=200)
    (found,) = llm.generate(PROMPTS[1], stopping)
    assert (found.text, found.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    assert list(found.token_ids) == plain[1][: len(found.token_ids)]
    assert len(found.token_ids) < NEW_TOKENS
    assert llm.stats()["engine"]["finished"]["cancelled"] == before + 1
    assert "".join(chunk.text for chunk in llm.stream(PROMPTS[1], stopping)) == found.text


def test_a_stop_token_ends_a_choice_and_is_its_last_token(llm, plain):
    (found,) = llm.generate(PROMPTS[0], dataclasses.replace(GREEDY, stop_token_ids=[plain[0][4]]))
    expected = plain[0][: plain[0].index(plain[0][4]) + 1]
    assert (list(found.token_ids), found.finish_reason) == (expected, "stop")


def test_choices_of_a_prompt_are_unlike_and_the_same_each_time(llm):
    params = dataclasses.replace(SAMPLED, n=3)
    found = llm.generate(PROMPTS[:2], params)
    assert [(one.prompt, one.choice) for one in found] == [(at, choice) for at in range(2) for choice in range(3)]
    assert len({one.token_ids for one in found}) == 6
    assert llm.generate(PROMPTS[:2], params) == found
    by_choice: dict[int, list[int]] = {}
    for chunk in llm.stream(PROMPTS[1], params):
        by_choice.setdefault(chunk.choice, []).extend(chunk.token_ids)
    assert [by_choice[choice] for choice in range(3)] == tokens_of(found[3:])


def test_a_stop_string_ends_one_choice_and_not_its_siblings(llm):
    params = dataclasses.replace(SAMPLED, n=2)
    first, second = llm.generate(PROMPTS[3], params)
    only_first = next(sign for sign in first.text if sign not in second.text)
    found = llm.generate(PROMPTS[3], dataclasses.replace(params, stop=only_first))
    assert [one.finish_reason for one in found] == ["stop", "length"]
    assert found[0].text == first.text[: first.text.index(only_first)]
    assert found[1] == second


def test_logprobs_come_with_their_tokens(llm):
    (found,) = llm.generate(PROMPTS[2], dataclasses.replace(GREEDY, logprobs=3))
    assert tuple(one.token_id for one in found.logprobs) == found.token_ids
    for one in found.logprobs:
        assert (one.rank, len(one.best), one.best[0]) == (1, 3, (one.token_id, one.logprob))
        assert one.logprob < 0
    streamed = [one for chunk in llm.stream(PROMPTS[2], dataclasses.replace(GREEDY, logprobs=3)) for one in chunk.logprobs]
    assert tuple(streamed) == found.logprobs
    assert llm.generate(PROMPTS[2], GREEDY)[0].logprobs is None


def test_who_stops_reading_a_stream_cancels_the_request(llm):
    endless = dataclasses.replace(GREEDY, max_tokens=1500)
    before = llm.stats()["engine"]["finished"].get("cancelled", 0)
    for _ in llm.stream(PROMPTS[0], endless):
        break

    async def first() -> None:
        chunks = llm.astream(PROMPTS[0], endless)
        await anext(chunks)
        await chunks.aclose()

    asyncio.run(first())
    outcomes = llm.generate_each(PROMPTS[:3], [GREEDY, endless, endless])
    assert len(next(outcomes)[0].token_ids) == NEW_TOKENS
    outcomes.close()
    check_idle(llm)
    assert llm.stats()["engine"]["finished"]["cancelled"] == before + 4


def test_each_prompt_has_its_own_parameters(llm, plain):
    short = dataclasses.replace(GREEDY, max_tokens=3)
    found = llm.generate(PROMPTS[:2], [short, GREEDY])
    assert tokens_of(found) == [plain[0][:3], plain[1]]
    with pytest.raises(dm.ConfigError, match="params: 1 were given for 2 prompts"):
        llm.generate(PROMPTS[:2], [short])


def test_chunks_name_the_place_of_their_prompt(llm, plain):
    found: dict[int, list[int]] = {}
    llm.generate(PROMPTS[:3], GREEDY, on_chunk=lambda place, chunk: found.setdefault(place, []).extend(chunk.token_ids))
    assert [found[place] for place in range(3)] == plain[:3]


def test_prompts_that_have_met_their_stop_string_are_computed_no_further_while_the_first_one_is(llm, monkeypatch):
    (whole,) = llm.generate(PROMPTS[1], GREEDY)
    stopping = dataclasses.replace(GREEDY, stop=[whole.text[3:5]], max_tokens=200)
    num_stopping, begin = 7, llm.forward.begin
    before = llm.stats()["engine"]
    counts = iter(range(1_000_000))
    deadline = time.monotonic() + 60

    def hold(rows: Any) -> Any:
        # Once all have met it the engine waits until it was told so, while the first goes on.
        if next(counts) >= NEW_TOKENS + 8:
            while cancelled() < num_stopping and time.monotonic() < deadline:
                time.sleep(0.001)
        return begin(rows)

    def cancelled() -> int:
        asked = sum(isinstance(one, Cancel) for one in list(llm.engine._door._commands))
        return asked + llm.engine._stats.report()["finished"].get("cancelled", 0) - before["finished"].get("cancelled", 0)

    monkeypatch.setattr(llm.forward, "begin", hold)
    long = dataclasses.replace(GREEDY, max_tokens=60)
    found = llm.generate([PROMPTS[0], *[PROMPTS[1]] * num_stopping], [long, *[stopping] * num_stopping])
    assert [one.finish_reason for one in found] == ["length", *["stop"] * num_stopping]
    assert len({one.text for one in found[1:]}) == 1
    computed = llm.stats()["engine"]["generated_tokens"] - before["generated_tokens"]
    assert computed <= 60 + num_stopping * (NEW_TOKENS + 8 + 2)


def test_what_a_caller_raises_over_a_chunk_is_no_outcome_and_ends_all(llm):
    endless = dataclasses.replace(GREEDY, max_tokens=1500)
    mine = dm.ConfigError("the caller's own")

    def on_chunk(place: int, _chunk: Any) -> None:
        if place == 0:
            raise mine

    with pytest.raises(dm.ConfigError) as caught:
        next(llm.generate_each(PROMPTS[:3], endless, on_chunk=on_chunk))
    assert caught.value is mine
    llm.engine.settle()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("", "prompt 1 has no tokens"),
        ([], "prompt 1 has no tokens"),
        (7, "prompt 7: expected a text, a sequence of token ids, or a list of messages"),
        (b"bytes", "expected a text, a sequence of token ids, or a list of messages"),
    ],
)
def test_a_prompt_that_is_none_is_refused_before_any_is_submitted(llm, wrong, said):
    before = llm.stats()["engine"]["generated_tokens"]
    with pytest.raises(dm.ConfigError, match=said):
        llm.generate([PROMPTS[0], wrong], GREEDY)
    assert llm.stats()["engine"]["generated_tokens"] == before


def test_a_prompt_that_fails_leaves_the_others_their_tokens(llm, plain):
    wrong = [10**6]
    outcomes = list(llm.generate_each([PROMPTS[0], wrong, PROMPTS[1]], GREEDY))
    assert [tokens_of(one) for one in (outcomes[0], outcomes[2])] == [[plain[0]], [plain[1]]]
    assert isinstance(outcomes[1], dm.ConfigError)
    assert "token id 1000000 is not allowed" in str(outcomes[1])
    with pytest.raises(dm.ConfigError, match="token id 1000000 is not allowed"):
        llm.generate([PROMPTS[0], wrong, PROMPTS[1]], GREEDY)


def test_stats_have_what_engine_and_runtime_counted(llm):
    before = llm.stats()
    llm.generate(PROMPTS, GREEDY)
    after = llm.stats()
    engine = after["engine"]
    assert engine["generated_tokens"] - before["engine"]["generated_tokens"] == len(PROMPTS) * NEW_TOKENS
    assert engine["finished"]["length"] - before["engine"]["finished"].get("length", 0) == len(PROMPTS)
    assert engine["steps"] == sum(engine["batch_sizes"].values())
    assert max(engine["batch_sizes"]) > 1
    for name in ("ttft_s", "tpot_s", "queue_s"):
        assert 0 < engine[name]["p50"] <= engine[name]["p95"] <= engine[name]["p99"]
    assert after["calls"] > before["calls"]
    assert {"workers", "layers", "mode", "floor_bytes"} <= after.keys()


def test_a_full_queue_is_waited_for_by_generate_and_refused_to_others(plain):
    with start(max_requests=1, max_queue=2) as small:
        assert tokens_of(small.generate(PROMPTS, GREEDY)) == plain
        endless = dataclasses.replace(GREEDY, max_tokens=1500)
        assert small.submit(PROMPTS[0], endless).take(), "one runs now"
        for _ in range(2):
            small.submit(PROMPTS[0], endless)
        with pytest.raises(dm.QueueFull, match=r"engine\.max_queue") as refused:
            small.submit(PROMPTS[0], endless)
        assert refused.value.retry_after_s >= 1.0
        # Others fill it, so that there is nothing of its own to wait for.
        (outcome,) = small.generate_each(PROMPTS[0], GREEDY)
        assert isinstance(outcome, dm.QueueFull)


def test_more_choices_than_the_queue_has_room_for_are_refused(plain):
    with start(max_requests=1, max_queue=2) as small:
        outcomes = list(small.generate_each(PROMPTS[:2], [dataclasses.replace(GREEDY, n=3), GREEDY]))
        assert isinstance(outcomes[0], dm.ConfigError)
        assert tokens_of(outcomes[1]) == [plain[1]]
        check_idle(small)


def test_closing_ends_a_stream_typed_and_later_calls_too():
    llm = start()
    endless = dataclasses.replace(GREEDY, max_tokens=1500)
    stream = llm.stream(PROMPTS[0], endless)
    next(stream)
    awaited = llm.astream(PROMPTS[0], endless)

    async def read() -> None:
        await anext(awaited)
        llm.close()
        async for _ in awaited:
            pass

    with pytest.raises(dm.RequestCancelled, match="closed before the request had ended"):
        asyncio.run(read())
    with pytest.raises(dm.RequestCancelled, match="closed before the request had ended"):
        list(stream)
    for late in (lambda: llm.generate("a"), lambda: next(llm.stream("a")), lambda: llm.submit("a")):
        with pytest.raises(dm.RequestCancelled, match="the engine is closed"):
            late()
    llm.close()
    assert llm.stats()["engine"]["running"] == 0


def test_a_model_without_pages_runs_one_sequence_at_a_time_with_the_tokens_of_the_plain_loop():
    # Its attention looks tokens up by an index.
    with dm.LLM(checkpoint("deepseek_v32", "f32"), topology("loopback"), kv_memory="16MiB") as llm:
        assert llm.host.report.not_paged
        expected = [plain_tokens(llm, token_ids) for token_ids in PROMPTS[:3]]
        assert tokens_of(llm.generate(PROMPTS[:3], GREEDY)) == expected
        params = dataclasses.replace(SAMPLED, n=2)
        assert llm.generate(PROMPTS[:2], params) == llm.generate(PROMPTS[:2], params)
        check_idle(llm)


def test_operators_of_torch_give_the_tokens_of_the_plain_loop_too():
    with start(host_operators="torch") as llm:
        (found,) = llm.generate(PROMPTS[1], GREEDY)
        assert list(found.token_ids) == plain_tokens(llm, PROMPTS[1])


def test_a_tokenizer_of_ones_own_stands_in_for_the_checkpoints():
    class Reversed:
        all_special_ids = ()
        eos_token_id = None

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [*text.encode()][::-1]}

        def decode(self, token_ids: list[int], **_options: Any) -> str:
            return "".join(f"<{token}>" for token in token_ids)

    with start(tokenizer=Reversed()) as llm:
        (found,) = llm.generate("ab", GREEDY)
        assert found == llm.generate([98, 97], GREEDY)[0]
        assert found.text == "".join(f"<{token}>" for token in found.token_ids)


def test_a_snapshot_tells_of_the_engine_as_long_as_there_is_one(llm: LLM) -> None:
    llm.generate(PROMPTS[0], GREEDY)
    found, counted = llm.runtime.snapshot()["engine"], llm.stats()["engine"]
    assert found["generated_tokens"] == counted["generated_tokens"] > 0
    assert found["blocks"]["total"] == counted["blocks"]["total"]
    assert (found["running"], found["waiting"]) == (0, 0)


def test_the_snapshot_of_a_server_has_what_stats_counts(llm: LLM) -> None:
    llm.generate(PROMPTS[0], GREEDY)
    found, counted = snapshot(llm), llm.stats()
    assert found["workers"].keys() == counted["workers"].keys()
    for name, worker in found["workers"].items():
        assert worker.items() >= {key: counted["workers"][name][key] for key in (*COUNTED, "state", "transport")}.items()
        assert worker["rows"] > 0
    assert found["engine"]["histograms"] == counted["engine"]["histograms"]
    assert (found["mode"], found["mode_reason"]) == (counted["mode"], counted["mode_reason"])
    assert (found["fallback_calls"], found["unready"]) == (0, "")
    # The front refuses messages that have keys other than texts.
    assert msgpack.unpackb(msgpack.packb(found)).keys() == found.keys()
