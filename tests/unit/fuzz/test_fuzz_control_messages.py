"""The control-message fuzzer covers every message, and reports a codec that lets something through.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_moe.protocol.messages import CODEC, MESSAGES
from tests.fuzz import fuzz_control_messages as fuzz


def test_every_message_is_a_seed() -> None:
    assert {type(CODEC.decode(seed)) for seed in fuzz.seeds()} == set(MESSAGES)


def test_a_short_run_finds_nothing() -> None:
    assert fuzz.run(0.5, seed=7) == 0


def test_a_codec_that_raises_otherwise_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Careless:
        schemas = CODEC.schemas

        def encode(self, message: object) -> bytes:
            return CODEC.encode(message)  # type: ignore[arg-type]

        def decode(self, data: bytes) -> object:
            if data[:1] == b"\x00":
                raise KeyError("careless")
            return CODEC.decode(data)

    monkeypatch.setattr(fuzz, "CODEC", Careless())
    monkeypatch.setattr(fuzz, "FINDINGS", tmp_path)
    assert fuzz.examine(b"\x00") == "decode raised KeyError: 'careless'"
