"""Frames between engine and front: what is sent comes back, in whatever pieces; lengths are bounded
before anything is read, and what is no message is refused.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_moe.engine.request import ERROR, STOP, TokenDelta
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.engine.sampling.token_logprobs import TokenLogprobs
from dflash_moe.errors import ProtocolError, QueueFull, WorkerLost
from dflash_moe.server.front import frames


@given(st.lists(st.tuples(st.text(max_size=9), st.integers(0, 9), st.binary(max_size=30)), max_size=5), st.integers(1, 40))
def test_messages_come_back_in_whatever_pieces(messages, size):
    sent = b"".join(frames.packed(*message) for message in messages)
    buffer = frames.FrameBuffer(1 << 20)
    found = [one for at in range(0, len(sent), size) for one in buffer.feed(sent[at : at + size])]
    assert found == [list(message) for message in messages]


@pytest.mark.parametrize(
    "sent",
    [
        (101).to_bytes(4, "little"),
        bytes(4),
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\xc1",
        b"\x01\x00\x00\x00\x05",
        b"\x01\x00\x00\x00\x90",
        b"\x02\x00\x00\x00\x91\x05",
    ],
)
def test_what_is_no_message_or_too_long_is_refused(sent):
    with pytest.raises(ProtocolError, match="between engine and front"):
        frames.FrameBuffer(100).feed(sent)


@given(st.lists(st.integers(0, (1 << 31) - 1), max_size=50))
def test_token_ids_come_back(token_ids):
    assert frames.token_ids_of(frames.token_bytes(token_ids)) == token_ids


@pytest.mark.parametrize("content", [b"abc", "abcd", [1, 2], None])
def test_what_are_no_token_ids_is_refused(content):
    with pytest.raises(ProtocolError):
        frames.token_ids_of(content)


def test_parameters_come_back_but_for_stop_strings():
    params = SamplingParams(
        max_tokens=7, temperature=0.5, logit_bias={3: -1.5}, stop=["x"], stop_token_ids=[4], seed=2**64 - 1, n=2
    )
    travelled = msgpack.unpackb(msgpack.packb(frames.params_fields(params)))
    found = SamplingParams(**frames.params_of(travelled))
    assert all(getattr(found, name) == getattr(params, name) for name in frames.PARAMS)
    assert found.stop == ()


def test_parameters_of_another_version_are_refused():
    fields = frames.params_fields(SamplingParams())
    for wrong in ({**fields, "more": 1}, {"n": 1}, [], {**fields, "logit_bias": 5}):
        with pytest.raises(ProtocolError):
            frames.params_of(wrong)


def test_a_plain_delta_is_short_and_a_last_one_says_why():
    assert frames.delta_fields(7, TokenDelta(1, (5, 6), time_s=2.0)) == [7, 1, [5, 6], 2.0]
    logprobs = (TokenLogprobs(5, -0.5, 1, ((5, -0.5),)),)
    last = TokenDelta(0, (5,), logprobs, STOP, time_s=2.0, num_cached_tokens=16, queue_s=0.5)
    assert frames.delta_fields(7, last) == [7, 0, [5], 2.0, [[5, -0.5, 1, ((5, -0.5),)]], STOP, None, 16, 0.5]
    failed = frames.delta_fields(7, TokenDelta(0, finish_reason=ERROR, error=WorkerLost("w1 is lost")))
    assert failed[6] == {"code": "worker_lost", "message": "w1 is lost"}
    assert frames.error_fields(QueueFull("full", retry_after_s=3.5))["retry_after_s"] == 3.5
