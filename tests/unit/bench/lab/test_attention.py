"""`bench.lab attention` on tiny pages: every field of the interface, bytes and operations as
counted by hand, pages that are read again only after all others.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bench.lab.__main__ import build_app
from bench.lab.attention import AttentionParams, run_attention
from bench.lab.attention_append import AppendCase, append_cases
from bench.lab.attention_pages import AttentionShape, LayerStack, Rows
from dflash_moe import _core
from dflash_moe.bench.read_speed import ReadSpeed, read_buffer_bytes
from dflash_moe.cli.main import run
from dflash_moe.errors import ConfigError

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_size=16, num_layers=3)
PROMISED = {
    "name", "kv_dtype", "rows", "context", "num_heads", "num_kv_heads", "head_size", "threads", "isa", "us", "bytes_per_s",
    "read_bytes_per_s", "share_of_read", "gflops", "peak_gflops", "share_of_peak", "samples_s", "median_s", "p95_s",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_moe.bench.read_speed.last_cache_bytes", lambda: 4096)
    monkeypatch.setattr("dflash_moe.bench.read_speed.LEAST_BYTES", 1 << 16)
    monkeypatch.setattr("bench.lab.attention.SAMPLE_S", 1e-4)
    monkeypatch.setattr("bench.lab.attention_append.REPEATS", 3)


def tiny(**changes: object) -> AttentionParams:
    defaults = {
        "shape": SHAPE, "contexts": (16, 40), "chunks": ((8, 40),), "dtypes": ("bf16",), "threads": (1,), "repeat": 2,
        "append_tokens": 4,
    }  # fmt: skip
    return AttentionParams(**(defaults | changes))  # type: ignore[arg-type]


def test_every_row_has_the_promised_fields_and_rates_that_follow_from_its_median() -> None:
    result = run_attention(tiny(dtypes=("bf16", "f32")))
    assert result.complete
    rows = [row for row in result.rows if "context" in row]
    assert [(row["kv_dtype"], row["name"], row["rows"], row["context"]) for row in rows] == [
        (dtype, *case) for dtype in ("bf16", "f32") for case in (("decode", 1, 16), ("decode", 1, 40), ("prefill", 8, 40))
    ]
    for row in rows:
        assert row.keys() >= PROMISED
        num_bytes = row["context"] * 2 * 2 * 16 * (2 if row["kv_dtype"] == "bf16" else 4)
        visible = sum(range(row["context"] - row["rows"] + 1, row["context"] + 1))
        assert row["bytes_per_s"] == pytest.approx(num_bytes / row["median_s"])
        assert row["gflops"] == pytest.approx(4e-9 * 4 * 16 * visible / row["median_s"])
        assert row["us"] == pytest.approx(1e6 * row["median_s"])
        assert row["share_of_read"] == pytest.approx(row["bytes_per_s"] / row["read_bytes_per_s"])
        assert row["share_of_peak"] == pytest.approx(row["gflops"] / row["peak_gflops"])


def test_tokens_are_stored_with_one_call_and_with_one_each() -> None:
    result = run_attention(tiny(contexts=(16,), chunks=()))
    rows = [row for row in result.rows if "through" in row]
    assert {(row["name"], row["calls"]) for row in rows} == {("append_token_batch", 1), ("append_each_token", 4)}
    assert {row["through"] for row in rows} >= {"core"}
    for found in result.summary:
        once, each = (
            next(row["median_s"] for row in rows if (row["through"], row["calls"]) == (found["through"], calls))
            for calls in (1, 4)
        )
        assert found["speedup"] == pytest.approx(each / once)


@pytest.mark.parametrize("kv_dtype", ["bf16", "f16", "f32"])
def test_both_ways_of_storing_write_the_same_tokens(kv_dtype: str) -> None:
    stack = LayerStack(SHAPE, kv_dtype, 128)
    slots = np.array([3, 40, 77, 120], np.int64)
    keys, values = Rows.random(4, 32, kv_dtype, 5), Rows.random(4, 32, kv_dtype, 6)
    for case in append_cases(stack, 4):
        for layer in stack.layers[:1]:
            blank = Rows.random(128, 32, kv_dtype, 9)
            every = np.arange(128, dtype=np.int64)
            layer.append(every.ctypes.data, 128, *blank.described, *blank.described)
        case.store(slots)
        for at, slot in enumerate(slots):
            found = stack.layers[0].read(int(slot) // 16)
            for stored, given in zip(found, (keys, values), strict=True):
                bits = given.array[at].astype(np.uint32) << 16 if kv_dtype == "bf16" else None
                expected = given.array[at].astype(np.float32) if bits is None else bits.view(np.float32)
                np.testing.assert_array_equal(stored[:, slot % 16].reshape(-1), expected, err_msg=case.label)


def test_a_page_is_read_again_only_after_all_others() -> None:
    stack = LayerStack(SHAPE, "bf16", 160)
    steps = list(itertools.islice(stack.steps(1, 40), 10))
    # 160 tokens have three whole sequences of 40, which take three blocks each.
    assert len({(id(layer), id(plan)) for layer, plan in steps}) == 9
    assert [layer is stack.layers[at % 3] for at, (layer, _) in enumerate(steps)] == [True] * 10
    assert steps[9] == steps[0]
    assert all(plan.positions.tolist() == [39] for _, plan in steps)


def test_the_pages_of_all_layers_exceed_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_moe.bench.read_speed.last_cache_bytes", lambda: 1 << 16)
    result = run_attention(tiny(contexts=(16,), chunks=(), dtypes=("f32",)))
    assert result.params["pages_bytes"]["f32"] >= 8 << 16


def test_a_thread_reads_its_part_of_eight_caches_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_moe.bench.read_speed.last_cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr("dflash_moe.bench.read_speed.memory_available", lambda: 1 << 40)
    assert [read_buffer_bytes(threads) for threads in (1, 2)] == [8 << 20, 8 << 20]
    monkeypatch.setattr("dflash_moe.bench.read_speed.memory_available", lambda: 1 << 20)
    assert [read_buffer_bytes(threads) for threads in (1, 2, 64)] == [8 << 20, 4 << 20, 1 << 17]


def test_a_read_speed_is_none_before_its_first_kept_round() -> None:
    speed = ReadSpeed(1)
    speed.measure(keep=False)
    assert speed.median is None
    speed.measure(keep=True)
    assert speed.median is not None
    assert speed.row() is None


def test_ratios_need_both_ways() -> None:
    stack = LayerStack(SHAPE, "f16", 64)
    assert AppendCase.ratios(append_cases(stack, 2)) == []


def test_an_unknown_dtype_and_too_little_memory_are_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'int8' is not allowed"):
        run_attention(tiny(dtypes=("int8",)))
    with pytest.raises(ConfigError, match="a context of 4 tokens has no last 8"):
        run_attention(tiny(chunks=((8, 4),)))
    monkeypatch.setattr("bench.lab.attention.memory_available", lambda: 1000)
    with pytest.raises(ConfigError, match="measure shorter contexts"):
        run_attention(tiny())


def test_the_command_prints_both_tables_and_keeps_the_result(tmp_path, capsys) -> None:
    out = tmp_path / "a.json"
    flags = ["--contexts", "16", "--dtypes", "f16", "--threads", "1", "--repeat", "1"]
    assert run(["attention", *flags, "--json", str(out)], build=build_app) == 0
    printed = capsys.readouterr().out
    assert "append_token_batch" in printed
    assert "decode" in printed
    assert out.is_file()
    assert run(["attention", "--contexts", "0"], build=build_app) == 2
    assert "--contexts '0'" in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("isa", [name for name in _core.supported_isas() if name != "reference"])
def test_every_kernel_set_is_measured(isa: str) -> None:
    result = run_attention(tiny(contexts=(16,), chunks=(), isa=isa, append_tokens=2))
    assert result.rows[0]["isa"] == isa
