"""The messages of a hand-over, as Python makes and reads them, are the bytes that the library's
tests read.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from dflash_moe import _core
from dflash_moe.errors import ProtocolError
from dflash_moe.protocol.handover import (
    HANDOVER_CODEC,
    HANDOVER_TOKEN_BYTES,
    Counted,
    HandoverMessage,
    OpenHandover,
    PathWorn,
    PlanHead,
    WorkerGone,
    counted_fields,
)
from tests.golden.handover_messages import MESSAGES, lines

GOLDEN = Path(__file__).parents[2] / "golden" / "handover" / "messages.txt"


def values(message: HandoverMessage) -> tuple[type, dict[str, Any]]:
    fields = dict(_core.handover_tables())[line_of(message).split()[0]]
    return type(message), {name: getattr(message, name) for _, name, _ in fields}


def line_of(message: HandoverMessage) -> str:
    return lines()[[type(one) for one in MESSAGES].index(type(message))]


def test_messages_encode_to_the_golden_bytes() -> None:
    assert lines() == GOLDEN.read_text(encoding="utf-8").splitlines()


def test_golden_bytes_decode_to_the_messages() -> None:
    golden = [bytes.fromhex(line.split()[1]) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
    assert [values(HANDOVER_CODEC.decode(message)) for message in golden] == [values(message) for message in MESSAGES]


def test_every_message_is_there_in_the_order_of_its_type() -> None:
    assert [type(message) for message in MESSAGES] == list(get_args(HandoverMessage))


def test_a_long_reason_is_cut_at_a_character_and_an_odd_file_name_is_said() -> None:
    told = HANDOVER_CODEC.decode(HANDOVER_CODEC.encode(WorkerGone(worker=0, reason="\u2013" * 400)))
    assert isinstance(told, WorkerGone)
    assert told.reason == "\u2013" * 341
    assert WorkerGone(worker=0, reason="/tmp/\udcff").reason == "/tmp/?"


def test_a_field_outside_its_limits_is_refused_by_name() -> None:
    head = dict.fromkeys(("num_layers", "num_shards", "num_tensors", "spin_ns", "call_timeout_ns", "stall_timeout_ns"), 0)
    with pytest.raises(ProtocolError, match="message PlanHead: field num_workers: is 1025; allowed are 0..1024"):
        HANDOVER_CODEC.encode(PlanHead(num_workers=1025, architecture="", fingerprint="", **head))
    with pytest.raises(
        ProtocolError, match=f"field token: found 3 bytes, allowed is a binary of exactly {HANDOVER_TOKEN_BYTES}"
    ):
        OpenHandover(version=1, token=b"abc", layout=0)
    with pytest.raises(ProtocolError, match="message type"):
        HANDOVER_CODEC.decode(b"\x80")


def test_counters_have_all_names_whether_somebody_counted_or_not() -> None:
    counted = MESSAGES[-1]
    assert isinstance(counted, Counted)
    assert counted_fields(counted)["compute_ns"] == 2**64 - 1
    assert counted_fields(None) == dict.fromkeys(counted_fields(counted), 0)
    assert not hasattr(PathWorn(worker=0, reason=""), "__dict__")
