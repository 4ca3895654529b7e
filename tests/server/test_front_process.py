"""The front is a light process: no torch and no transformers, nothing from the folder it was
started in, and what it tokenises is what transformers does.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_moe.integrations.tokenizer import decode, encode, encode_with_ends, special_ids
from dflash_moe.server.front.api_error import ApiError
from dflash_moe.server.front.prompts import Prompts
from dflash_moe.server.front.tokens import FrontTokenizer
from tests.server.served import facts, served, tokenizer

# As many ids as are looked at in a thread.
MANY = [5] * 5000
CHECK = """
import sys
import dflash_moe.server.front.process
import tokenizers
heavy = {"torch", "transformers", "numpy", "safetensors"} & sys.modules.keys()
print(sorted(heavy))
"""


def test_a_front_imports_neither_torch_nor_transformers():
    found = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.strip() == "[]"


def test_a_running_front_has_mapped_no_torch(front):
    front.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
    with open(f"/proc/{front.keeper.pid}/maps", encoding="utf-8") as file:
        assert "libtorch" not in file.read()


def test_keys_are_neither_in_arguments_nor_in_the_environment():
    key = "quite-a-secret-key-of-somebody"
    with served(keys=[key]) as front:
        for name in ("cmdline", "environ"):
            with open(f"/proc/{front.keeper.pid}/{name}", "rb") as file:
                assert key.encode() not in file.read()


@pytest.fixture(scope="module")
def both():
    return FrontTokenizer(facts()["tokenizer"]), tokenizer()


def test_many_ids_are_looked_at_in_a_thread(monkeypatch):
    prompts = Prompts(facts(max_model_len=len(MANY)))
    names = []
    check = prompts.tokenizer.check

    def noted(*given: Any) -> None:
        names.append(threading.current_thread().name)
        check(*given)

    monkeypatch.setattr(prompts.tokenizer, "check", noted)
    assert asyncio.run(prompts.of_field(MANY)) == [MANY]
    assert asyncio.run(prompts.of_field([[5], MANY[1:]])) == [[5], MANY[1:]]
    assert all(name.startswith("text") for name in names)
    with pytest.raises(ApiError, match="token id -1") as caught:
        asyncio.run(prompts.of_field([*MANY[1:], -1]))
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_special_ids_are_held_once(both):
    assert special_ids(both[0]) is both[0].all_special_ids
    assert special_ids(both[0]) == special_ids(both[1])


@settings(max_examples=50)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_ids_texts_and_ends_are_those_of_transformers(both, text):
    ours, theirs = both
    assert encode(ours, text) == encode(theirs, text)
    assert encode_with_ends(ours, text) == encode_with_ends(theirs, text)
    ids = encode(theirs, text)
    for skip in (True, False):
        assert decode(ours, ids, skip_special_tokens=skip) == decode(theirs, ids, skip_special_tokens=skip)
    assert b"".join(ours.token_bytes(one) for one in ids).decode("utf-8", "replace") == decode(
        theirs, ids, skip_special_tokens=False
    )
