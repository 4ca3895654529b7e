"""A receipt is read as it was written, and whatever else a file holds is refused in one sentence.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import copy
import json

import hypothesis
import pytest
from hypothesis import strategies

from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.errors import ConfigError
from dflash_moe.proofs.receipt import (
    HostFacts,
    Receipt,
    ReceiptLayer,
    ReceiptShard,
    Residuals,
    read_receipt,
)
from dflash_moe.proofs.receipt_fields import MAX_BYTES
from dflash_moe.topology.spec import ShardTerms

DIGEST = "ab" * 32
RECEIPT = Receipt(
    version="0.1.0",
    model="path/to/ä model",
    fingerprint=DIGEST,
    dtype="bf16",
    request_dtype="bf16",
    reply_dtype="f32",
    layers=(
        ReceiptLayer(
            0,
            (
                ReceiptShard(ShardTerms((0, 1, 4)), "bf16", 7),
                ReceiptShard(ShardTerms((2, 3), "int8", "bf16-mma", "sm_90"), "int8_g32", (1 << 64) - 1),
            ),
        ),
    ),
    host=HostFacts("cpu", {"bf16": "f32-canonical"}, "bf16", ("model.norm: norm (rms)",), ""),
    prompt_ids=(1, 2, 3),
    sampling=SamplingParams(max_tokens=8, temperature=0.5, seed=3, logit_bias={5: -1.5}, ignore_eos=True),
    tokens=(4, 5),
    residuals=Residuals(2, 16, (0, 3), ((DIGEST, DIGEST), (DIGEST, DIGEST)), (b"\0" * 72, b"\1" * 72)),
)


def written(tmp_path, value) -> Receipt:
    path = tmp_path / "R.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return read_receipt(path)


def test_a_receipt_is_read_as_it_was_written(tmp_path):
    assert written(tmp_path, RECEIPT.to_json()) == RECEIPT


def places(value, before=()):
    """The path of every value in a receipt."""
    yield before
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*before, key))


ODD_VALUES = strategies.one_of(
    strategies.none(),
    strategies.booleans(),
    strategies.integers(-(1 << 70), 1 << 70),
    strategies.floats(),
    strategies.text(max_size=20),
    strategies.lists(strategies.integers(-2, 70000), max_size=4),
    strategies.dictionaries(strategies.text(max_size=5), strategies.integers(), max_size=2),
)


@hypothesis.given(strategies.sampled_from(list(places(RECEIPT.to_json()))), ODD_VALUES)
def test_whatever_stands_in_a_place_is_read_or_refused(tmp_path_factory, place, value):
    found = copy.deepcopy(RECEIPT.to_json())
    if place:
        owner = found
        for key in place[:-1]:
            owner = owner[key]
        owner[place[-1]] = value
    else:
        found = value
    with contextlib.suppress(ConfigError):
        made = written(tmp_path_factory.mktemp("odd"), found)
        assert made.residuals.num_layers * 36 == len(made.residuals.values[0])


@hypothesis.given(strategies.binary(max_size=200))
def test_bytes_that_are_no_receipt_are_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("bytes") / "R.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"R\.json"):
        read_receipt(path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kind": "another"}, "kind"),
        ({"schema": 2}, "schema"),
        ({"extra": 1}, "extra"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [1] * 9}, "max_tokens"),
        ({"model": "a\ud800"}, "model"),
        ({"layers": [{"index": 0, "shards": [{}]}]}, "expert_ranges"),
    ],
    ids=str,
)
def test_refusals_name_the_field(tmp_path, change, named):
    with pytest.raises(ConfigError, match=named):
        written(tmp_path, {**RECEIPT.to_json(), **change})


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"kind": ' + "1" * 10_000 + "}", "[]", "", '{"kind": NaN}'],
    ids=["deep", "long", "list", "none", "nan"],
)
def test_odd_json_is_refused(tmp_path, text):
    with pytest.raises(ConfigError):
        written(tmp_path, text)


def test_positions_ascend_within_the_sequence(tmp_path):
    for positions in ([3, 0], [0, 0], [0, 4]):
        found = RECEIPT.to_json()
        found["residuals"]["positions"] = positions
        with pytest.raises(ConfigError, match="positions"):
            written(tmp_path, found)


def test_a_huge_file_is_not_read(tmp_path):
    path = tmp_path / "R.json"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 2)
    with pytest.raises(ConfigError, match="MiB"):
        read_receipt(path)
