"""Control messages on the wire never change: what former versions wrote is read as ever, what this
one writes is what was recorded, and each side of an older peer sees its own fields.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from dflash_moe.protocol.messages import CODEC, MESSAGES, PROTOCOL_MINOR
from dflash_moe.protocol.schema import Codec, Message
from tests.golden.control_messages import MINOR_0, MINOR_1, MINOR_2, MINOR_3, encoded, session

GOLDEN = Path(__file__).parents[2] / "golden" / "control"
VERSIONS = [(MINOR_0,), (MINOR_0, MINOR_1), (MINOR_0, MINOR_1, MINOR_2), (MINOR_0, MINOR_1, MINOR_2, MINOR_3)]


def recorded(minor: int) -> dict[str, str]:
    return json.loads((GOLDEN / f"minor_{minor}.json").read_text())


def test_every_message_of_this_version_is_recorded_as_it_is_written() -> None:
    assert len(VERSIONS) == PROTOCOL_MINOR + 1
    assert encoded(session(*VERSIONS[-1])) == recorded(PROTOCOL_MINOR)
    assert set(recorded(PROTOCOL_MINOR)) == {cls.__name__ for cls in MESSAGES}


def test_every_field_of_every_message_is_in_the_record() -> None:
    for message in session(*VERSIONS[-1]):
        for field in dataclasses.fields(message):  # type: ignore[arg-type]
            assert getattr(message, field.name) != field.default, f"{type(message).__name__}.{field.name}"


@pytest.mark.parametrize("minor", range(PROTOCOL_MINOR + 1))
def test_what_a_version_wrote_is_read_with_the_documented_defaults(minor: int) -> None:
    told = {type(message).__name__: message for message in session(*VERSIONS[minor])}
    for name, text in recorded(minor).items():
        assert CODEC.decode(bytes.fromhex(text)) == told[name]


def older_codec(*minors: dict[str, dict[str, object]]) -> Codec:
    """The codec of a version that had these fields only."""
    known = {name: {key for minor in minors for key in minor.get(name, {})} for minor in minors for name in minor}
    codec = Codec([cls for cls in MESSAGES if cls.__name__ in known])
    codec.schemas = {
        number: dataclasses.replace(
            schema, fields=tuple(field for field in schema.fields if field.name in known[schema.cls.__name__])
        )
        for number, schema in codec.schemas.items()
    }
    return codec


def test_an_older_peer_reads_what_it_knows_of_this_versions_messages() -> None:
    older = older_codec(MINOR_0)
    expected: dict[str, Message] = {type(message).__name__: message for message in session(MINOR_0)}
    for name, text in recorded(PROTOCOL_MINOR).items():
        if name in expected:
            assert older.decode(bytes.fromhex(text), ignore_unknown=True) == expected[name]


def test_an_older_peer_that_did_not_hear_of_a_higher_version_refuses_unknown_fields() -> None:
    from dflash_moe.errors import ProtocolError

    with pytest.raises(ProtocolError, match="message Hello: unknown field 17"):
        older_codec(MINOR_0).decode(bytes.fromhex(recorded(PROTOCOL_MINOR)["Hello"]))
