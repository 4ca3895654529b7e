"""Result files: complete envelope, refusal of foreign files. SPDX-License-Identifier: Apache-2.0"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_moe.bench.results import BenchResult, percentile, read_result, text_of, timing_fields
from dflash_moe.errors import ConfigError

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"


def test_result_carries_machine_commit_and_every_sample(tmp_path):
    result = BenchResult("ipc", {"batches": 1})
    result.rows.append({"name": "shared", **timing_fields([3.0, 1.0, 2.0])})
    result.write(tmp_path / "a.json")
    loaded = read_result(tmp_path / "a.json", case="ipc")
    assert loaded["schema"] == 2
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
    [
        ("{", "not a JSON"),
        ("[]", "schema 2"),
        ('{"schema": 3, "rows": []}', "found 3"),
        ('{"schema": 2}', "schema 2"),
        ('{"schema": 2, "rows": {"columns": ["name"], "values": [["a", 1]]}}', "schema 2"),
        ('{"schema": 2, "rows": {"columns": "name", "values": 1}}', "schema 2"),
    ],  # fmt: skip
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


def test_a_long_round_keeps_its_median_its_ends_and_what_lies_evenly_between():
    rounds = ([float(one) for one in range(41)], [float(one) for one in range(100, 181, 2)])
    fields = timing_fields([*reversed(rounds[0]), *rounds[1]], per_round=41)
    assert fields["samples_s"][:21] == [float(one) for one in range(0, 41, 2)]
    assert fields["samples_s"][21:] == [float(one) for one in range(100, 181, 4)]
    assert (fields["samples_per_round"], fields["measured_per_round"]) == (21, 41)
    assert (fields["median_s"], fields["p95_s"]) == (70.0, 172.0), "of all that was measured"
    assert timing_fields([1.0, 2.0] * 50, per_round=2)["samples_s"] == [1.0, 2.0] * 50
    even = [1.0] * 15 + [2.0] * 15
    assert timing_fields(even, per_round=30)["samples_s"][10] == 1.5, "the median of an even number"


def test_many_like_rows_are_a_table_with_the_digits_that_say_something(tmp_path):
    many = [{"name": f"row {number}", "share": 1 / 3, "samples_s": [2 / 3, 1e-7 / 3], "found": None} for number in range(64)]
    slices = [{"shard": number, "slices": many[:number]} for number in range(3)]
    result = BenchResult("ipc", {"share": 1 / 3}, rows=many, timelines=[{"slices": many}], summary=slices)
    result.write(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text()
    assert text.count('"samples_s"') == 2 + 3, "once in each table, and in each row of a short list"
    assert '\n["row 7",0.33333333,[0.6667,3.333e-08],null],\n' in text, "a row has a line"
    loaded, short = read_result(tmp_path / "a.json"), {"share": 0.33333333, "samples_s": [0.6667, 3.333e-08], "found": None}
    assert loaded["params"]["share"] == 1 / 3, "a setting is as it was given"
    assert loaded["rows"] == [{"name": f"row {number}", **short} for number in range(64)]
    assert loaded["timelines"][0]["slices"] == loaded["rows"]
    assert loaded["summary"][2]["slices"] == loaded["rows"][:2]
    unlike = [*many[:63], {"name": "of other fields"}]
    (tmp_path / "b.json").write_text(text_of(result.as_json() | {"rows": unlike}))
    assert [row["name"] for row in read_result(tmp_path / "b.json")["rows"]] == [row["name"] for row in unlike]


def test_a_result_of_the_first_schema_is_read(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"schema": 1, "case": "ipc", "rows": [{"name": "tcp", "samples_s": [1.0] * 99}]}))
    assert read_result(path)["rows"][0]["samples_s"] == [1.0] * 99


def test_recorded_results_are_small():
    sizes = {path.name: path.stat().st_size for path in RESULTS.iterdir()}
    results = [size for name, size in sizes.items() if name.endswith(".json")]
    assert max(results) <= 300_000
    assert sum(results) < 3_000_000
    assert sum(sizes.values()) - sum(results) < 1_000_000, "pictures"


def test_percentile_is_an_element_of_the_samples():
    samples = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert percentile(samples, 0.5) == 3.0
    assert percentile(samples, 1.0) == 5.0
    assert percentile(samples, 0.0) == 1.0
