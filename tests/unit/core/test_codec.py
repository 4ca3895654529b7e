"""The codec, limits and processor facts as Python sees them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

from dflash_moe import _core, errors

HEADER = {
    "kind": 1,
    "request_dtype": 2,
    "reply_dtype": 0,
    "generation": 2**63 + 1,
    "call_id": 12,
    "weights_fingerprint": 2**64 - 1,
    "layer": 3,
    "shard": 4,
    "num_rows": 5,
    "num_pairs": 40,
    "payload_bytes": 1000,
    "payload_checksum": 0xDEADBEEF,
    "slice": 65535,
    "attempt": 1,
}


def test_a_header_survives_the_codec() -> None:
    assert _core.decode_frame_header(_core.encode_frame_header(HEADER)) == HEADER


def test_every_flipped_bit_of_a_header_is_noticed() -> None:
    encoded = _core.encode_frame_header(HEADER)
    for bit in range(8 * len(encoded)):
        changed = bytearray(encoded)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(errors.ProtocolError):
            _core.decode_frame_header(bytes(changed))


@pytest.mark.parametrize("num_bytes", [0, 63, 65])
def test_a_header_of_another_length_is_refused(num_bytes: int) -> None:
    with pytest.raises(errors.ProtocolError, match="64 bytes"):
        _core.decode_frame_header(bytes(num_bytes))


def test_unknown_header_fields_are_refused() -> None:
    with pytest.raises(errors.ConfigError, match="colour"):
        _core.encode_frame_header({"colour": 1})


def test_a_checksum_notices_every_flipped_bit() -> None:
    data = bytes(range(100))
    for bit in range(800):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        assert _core.checksum(bytes(changed)) != _core.checksum(data)


def test_layouts_name_the_limit_they_break() -> None:
    assert _core.request_layout(3, 7, 10, "bf16")["payload_bytes"] == 64 + 60
    assert _core.reply_layout(2, 8, "f16") == {"rows_offset": 32, "payload_bytes": 64}
    with pytest.raises(errors.ConfigError, match="num_rows"):
        _core.request_layout(_core.wire_limits()["max_rows"] + 1, 5000, 10, "bf16")
    with pytest.raises(errors.ConfigError, match="dtype 'int8'"):
        _core.reply_layout(2, 8, "int8")


def test_instruction_sets_are_listed_worst_first_and_parsed_strictly() -> None:
    supported = _core.supported_isas()
    assert supported[:2] == ["reference", "scalar"]
    assert _core.best_isa() == supported[-1]
    assert [_core.parse_isa(isa) for isa in supported] == supported
    with pytest.raises(errors.ConfigError, match=", ".join(supported)):
        _core.parse_isa("mmx")
