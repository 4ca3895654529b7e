"""The messages of a hand-over are the bytes that the library's codec is tested with.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

from dflash_moe.protocol.handover import HANDOVER_CODEC, HANDOVER_MESSAGES
from tests.golden.handover_messages import MESSAGES, lines

GOLDEN = Path(__file__).parents[2] / "golden" / "handover" / "messages.txt"


def test_messages_encode_to_the_golden_bytes() -> None:
    assert lines() == GOLDEN.read_text(encoding="utf-8").splitlines()


def test_golden_bytes_decode_to_the_messages() -> None:
    golden = [bytes.fromhex(line.split()[1]) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
    assert [HANDOVER_CODEC.decode(message) for message in golden] == list(MESSAGES)


def test_every_message_is_there_in_the_order_of_its_type() -> None:
    assert [type(message) for message in MESSAGES] == list(HANDOVER_MESSAGES)
    assert [message.TYPE for message in MESSAGES] == list(range(1, len(MESSAGES) + 1))
