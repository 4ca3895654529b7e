"""The control codec is total: any bytes give a message within its limits or a ProtocolError that
names what is wrong.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_moe.errors import ProtocolError
from dflash_moe.protocol import schema
from dflash_moe.protocol.messages import CODEC, MESSAGES, Attach, Hello, Progress, Stats, compress_experts, expand_experts
from dflash_moe.protocol.schema import MAX_FRAME_BYTES

PROGRESS = Progress(counter=7, resident_bytes=1 << 40)
KEYS = st.one_of(st.integers(-3, 20), st.text(max_size=3), st.booleans())
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=8), st.binary(max_size=40)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)


def packed(**changes: object) -> bytes:
    body = {0: Progress.TYPE, 1: 7, 2: 1 << 40}
    body.update({int(key[1:]): value for key, value in changes.items()})
    return msgpack.packb(body)


@given(st.binary(max_size=300))
def test_any_bytes_give_a_message_or_a_protocol_error(payload: bytes) -> None:
    try:
        message = CODEC.decode(payload)
    except ProtocolError:
        return
    assert isinstance(message, MESSAGES)


@settings(max_examples=500)
@given(st.sampled_from([cls.TYPE for cls in MESSAGES]), st.dictionaries(st.integers(1, 13), VALUES, max_size=13))
def test_any_typed_map_gives_a_message_or_a_protocol_error_naming_it(kind: int, fields: dict[int, object]) -> None:
    payload = msgpack.packb({**fields, 0: kind})
    problem = ""
    try:
        message = CODEC.decode(payload)
    except ProtocolError as error:
        problem = str(error)
    if problem:
        assert CODEC.schemas[kind].cls.__name__ in problem or "frame:" in problem
        return
    assert CODEC.decode(CODEC.encode(message)) == message


def test_every_message_type_number_and_name_is_unique() -> None:
    assert len({cls.TYPE for cls in MESSAGES}) == len(MESSAGES) == len(CODEC.schemas)


def test_round_trip_keeps_every_field() -> None:
    hello = Hello(
        package_version="1", worker="w0", numerics_class="f32-canonical", model_fingerprint="ab",
        wire_limits={"max_rows": 4096}, dtypes=("f32", "bf16"), capabilities=("shared",), threads=2, spin_ns=5,
        slowdown=1.5, isa="avx2",
    )  # fmt: skip
    assert CODEC.decode(CODEC.encode(hello)) == hello


def test_unknown_message_type_is_named() -> None:
    with pytest.raises(ProtocolError, match="message type: found int 99"):
        CODEC.decode(msgpack.packb({0: 99}))


def test_unknown_field_is_named_unless_the_peer_has_a_higher_minor_version() -> None:
    with pytest.raises(ProtocolError, match="message Progress: unknown field 9"):
        CODEC.decode(packed(k9=1))
    assert CODEC.decode(packed(k9=1), ignore_unknown=True) == PROGRESS


def test_missing_field_is_named() -> None:
    with pytest.raises(ProtocolError, match=r"message Progress: field resident_bytes \(2\) is missing"):
        CODEC.decode(msgpack.packb({0: Progress.TYPE, 1: 7}))


def test_missing_optional_field_takes_its_default() -> None:
    body = msgpack.unpackb(CODEC.encode(Hello(
        package_version="1", worker="w", numerics_class="c", model_fingerprint="f", wire_limits={}, dtypes=(), threads=3,
    )), strict_map_key=False)  # fmt: skip
    del body[8]
    decoded = CODEC.decode(msgpack.packb(body))
    assert isinstance(decoded, Hello)
    assert decoded.threads == 0


@pytest.mark.parametrize("value", [-1, 2**64 - 1 + 0.0, True, "7", None, [7]])
def test_wrong_field_type_is_named(value: object) -> None:
    with pytest.raises(ProtocolError, match="message Progress: field counter: found"):
        CODEC.decode(packed(k1=value))


def test_value_over_its_limit_is_named_with_the_limit() -> None:
    with pytest.raises(ProtocolError, match=r"field num_slots: found int 257, allowed is an integer 0\.\.256"):
        CODEC.encode(Attach(
            generation=1, transport="shared", num_slots=257, request_bytes=64, reply_bytes=64, num_descriptors=0,
            has_pulse=False,
        ))  # fmt: skip


def test_extension_types_are_refused() -> None:
    with pytest.raises(ProtocolError, match="extension type 5 is not allowed"):
        CODEC.decode(packed(k1=msgpack.ExtType(5, b"x")))
    with pytest.raises(ProtocolError, match="field counter"):
        CODEC.decode(packed(k1=msgpack.Timestamp(1, 0)))


def test_duplicate_keys_are_refused() -> None:
    with pytest.raises(ProtocolError, match="duplicate key"):
        CODEC.decode(b"\x83\x00\x13\x01\x07\x01\x08")


def test_deep_nesting_is_an_error_and_not_a_crash() -> None:
    with pytest.raises(ProtocolError):
        CODEC.decode(b"\x91" * 60000)


def test_a_message_over_the_frame_limit_is_refused_by_both_sides() -> None:
    with pytest.raises(ProtocolError, match="exceed"):
        CODEC.decode(b"\x00" * (MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError, match="at most 64 entries"):
        CODEC.encode(Stats(counters={f"c{index}": index for index in range(65)}))


def test_two_fields_with_one_key_are_a_programming_error() -> None:
    from dataclasses import dataclass
    from typing import Annotated

    namespace = {"Annotated": Annotated, "Wire": schema.Wire, "Uint": schema.Uint}
    broken = dataclass(type("Broken", (schema.Message,), {"__annotations__": {
        "a": Annotated[int, schema.Wire(1, schema.Uint())], "b": Annotated[int, schema.Wire(1, schema.Uint())],
    }, **namespace}))  # fmt: skip
    with pytest.raises(TypeError, match="distinct"):
        schema.schema_of(broken)


@given(st.sets(st.integers(0, 300)))
def test_expert_runs_round_trip(experts: set[int]) -> None:
    ascending = tuple(sorted(experts))
    assert expand_experts(compress_experts(ascending)) == ascending


@pytest.mark.parametrize("ranges", [(1,), (0, 0), (5, 2, 6, 1), (3, 1, 0, 1), (65000, 600)])
def test_bad_expert_runs_are_refused(ranges: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="expert_ranges"):
        expand_experts(ranges)
