"""Result files: complete envelope, refusal of foreign files. SPDX-License-Identifier: Apache-2.0"""

from __future__ import annotations

import json

import pytest

from dflash_moe.bench.results import BenchResult, percentile, read_result, timing_fields
from dflash_moe.errors import ConfigError


def test_result_carries_machine_commit_and_every_sample(tmp_path):
    result = BenchResult("ipc", {"batches": 1})
    result.rows.append({"name": "shared", **timing_fields([3.0, 1.0, 2.0])})
    result.write(tmp_path / "a.json")
    loaded = read_result(tmp_path / "a.json", case="ipc")
    assert loaded["schema"] == 1
    assert loaded["complete"] is False
    assert loaded["rows"][0]["samples_s"] == [3.0, 1.0, 2.0]
    assert loaded["rows"][0]["median_s"] == 2.0
    assert loaded["machine"]["cores_usable"] >= 1
    assert isinstance(loaded["dirty"], bool)


def test_a_full_disk_names_the_file_and_leaves_what_was_there(tmp_path):
    result = BenchResult("ipc", {"batches": 1})
    result.write(tmp_path / "a.json")
    (tmp_path / "a.json.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        result.write(tmp_path / "a.json")
    assert caught.value.filename == str(tmp_path / "a.json")
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]
    assert read_result(tmp_path / "a.json")["case"] == "ipc"


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not a JSON"), ("[]", "schema 1"), ('{"schema": 2, "rows": []}', "found 2"), ('{"schema": 1}', "schema 1")],
)
def test_foreign_file_is_refused_by_name(tmp_path, text, said):
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_result(path)
    assert str(path) in str(caught.value)


def test_result_of_another_case_is_refused(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"schema": 1, "case": "prefill", "rows": []}))
    with pytest.raises(ConfigError, match="expected a result of case 'ipc', found 'prefill'"):
        read_result(path, case="ipc")


def test_percentile_is_an_element_of_the_samples():
    samples = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert percentile(samples, 0.5) == 3.0
    assert percentile(samples, 1.0) == 5.0
    assert percentile(samples, 0.0) == 1.0
