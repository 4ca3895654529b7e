"""Fields of requests: what is honoured becomes parameters, what would change the answer is refused
by name, a slip gets a hint, and all else is ignored and named.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_moe.server.front import request_fields
from dflash_moe.server.front.api_error import ApiError
from dflash_moe.server.front.sampling_fields import sampling_params


def params(body, *, is_chat=True, **defaults):
    return sampling_params(body, {"temperature": 0.0, **defaults}, max_tokens=50, is_chat=is_chat)


def refusal(function, *arguments, **given):
    with pytest.raises(ApiError) as caught:
        function(*arguments, **given)
    assert caught.value.status == 400
    return caught.value


def test_fields_of_sampling_have_the_names_of_vllm():
    body = {
        "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1, "logit_bias": {"7": 2},
        "seed": 9, "n": 2, "stop": ["a"], "stop_token_ids": [4], "ignore_eos": True,
        "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    found = params(body)
    assert all(
        getattr(found, name) == body[name]
        for name in ("max_tokens", "temperature", "min_p", "top_k", "seed", "n", "ignore_eos")
    )
    assert (found.logit_bias, found.stop, found.stop_token_ids, found.logprobs) == ({7: 2.0}, ("a",), (4,), 3)


def test_what_is_absent_or_null_is_what_the_checkpoint_recommends():
    found = params({"temperature": None, "stop": None, "seed": None}, top_p=0.8)
    assert (found.temperature, found.top_p, found.seed, found.max_tokens, found.logprobs) == (0.0, 0.8, None, 50, None)
    assert params({"max_completion_tokens": 4, "max_tokens": 9}).max_tokens == 4
    assert params({"top_k": -1}, top_k=20).top_k == 0
    assert params({"stop": []}).stop == ()
    assert params({"logprobs": True}).logprobs == 0
    assert params({"logprobs": 2}, is_chat=False).logprobs == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": "hot"}, "temperature"), ({"temperature": float("nan")}, "temperature"), ({"max_tokens": 0},
        "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"), ({"n": 65}, "n"), ({"stop": ["x"] * 10_000}, "stop"), ({"stop": [""]}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"), ({"logit_bias": [1]}, "logit_bias"), ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 99}, "logprobs"), ({"seed": -1}, "seed"),
        ({"ignore_eos": 1}, "ignore_eos"), ({"top_p": []}, "top_p"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_the_name_of_its_field(body, param):
    assert refusal(params, body).param == param


@pytest.mark.parametrize(
    "field",
    [
        {"functions": [{"name": "f"}]}, {"min_tokens": 3}, {"previous_response_id": "x"},
        {"suffix": "x"}, {"chat_template": "{{ x }}"}, {"truncate_prompt_tokens": 5}, {"text_format": {}}, {"best_of": 3},
        {"repeat_penalty": 1.2}, {"skip_special_tokens": False}, {"min_tokens": False},
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(field):
    (name,) = field
    found = refusal(request_fields.check, field, "chat")
    assert (found.param, found.code) == (name, "unsupported_parameter")
    assert name in str(found)


@pytest.mark.parametrize(
    ("route", "name", "value", "harmless"),
    [
        ("chat", "max_output_tokens", 3, None), ("chat", "echo", True, False), ("chat", "stop_sequences", ["x"], []),
        ("completions", "messages", [{}], None), ("messages", "n", 2, 1), ("messages", "stop", "x", []),
        ("messages", "logprobs", True, False), ("responses", "max_tokens", 3, None), ("responses", "stop", ["x"], []),
        ("responses", "stop_sequences", ["x"], []),
    ],
)  # fmt: skip
def test_what_another_route_honours_is_refused_by_name(route, name, value, harmless):
    assert refusal(request_fields.check, {name: value}, route).param == name
    assert request_fields.check({name: harmless}, route) == ([] if harmless is None else [name])


def test_what_only_answers_have_is_ignored_where_tokens_are_counted():
    assert request_fields.check({"max_tokens": 3, "stop": ["x"]}, "count_tokens") == ["max_tokens", "stop"]


def test_what_is_ignored_within_a_field_is_named():
    body = {"thinking": {"type": "enabled", "budget_tokens": 5, "display": None}, "reasoning": {"summary": "auto"}}
    assert request_fields.check(body, "messages") == ["thinking.budget_tokens", "reasoning"]
    assert request_fields.check({"reasoning": {"summary": "auto"}}, "responses") == ["reasoning.summary"]


def test_harmless_and_foreign_fields_are_ignored_and_named():
    body = {
        "messages": [],
        "user": "me",
        "store": True,
        "functions": [],
        "min_tokens": 0,
        "text_format": None,
        "zzz": 1,
    }
    assert request_fields.check(body, "chat") == ["user", "store", "functions", "min_tokens", "zzz"]
    assert request_fields.check({"tools": None, "messages": []}, "chat") == []
    assert request_fields.named(["a b\r\nx: y", "ok"]) == "a?b??x:?y".replace(":", "?") + ", ok"


@pytest.mark.parametrize(
    ("slip", "meant"), [("temprature", "temperature"), ("max_token", "max_tokens"), ("Top_P", "top_p"), ("message", "messages")]
)
def test_a_slip_gets_a_hint(slip, meant):
    assert f"did you mean {meant}" in str(refusal(request_fields.check, {slip: 1}, "chat"))


def test_only_the_first_unknown_names_are_compared_with_all_known_ones():
    strange = {f"{number}zzz": 1 for number in range(8)}
    refusal(request_fields.check, {"0zzz": 1, "temprature": 1}, "chat")
    assert request_fields.check({**strange, "temprature": 1}, "chat") == [*strange, "temprature"]


def test_many_fields_are_no_request():
    refusal(request_fields.check, {f"field{number}": 1 for number in range(10_000)}, "chat")


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1]", b"5", b"\xff", b"[" * 100_000, b'{"a": ' * 1500 + b"1" + b"}" * 1500, b'{"a": 1e999}x']
)
def test_what_is_no_json_object_is_refused(raw):
    refusal(request_fields.parsed, raw)


@given(
    st.dictionaries(
        st.text(max_size=20), st.none() | st.booleans() | st.floats() | st.text(max_size=9) | st.lists(st.integers())
    )
)
def test_whatever_stands_in_a_body_is_answered_or_refused(body):
    try:
        parsed = request_fields.parsed(json.dumps(body).encode())
        request_fields.named(request_fields.check(parsed, "chat"))
        params(parsed)
    except ApiError as error:
        json.dumps(error.body())
