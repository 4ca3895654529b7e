"""Pictures: one per case, numbers as texts in the drawing, refusal of files that lack what is
drawn.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json

import pytest

from dflash_moe.bench.plots import experts as plot_experts
from dflash_moe.bench.results import timing_fields
from dflash_moe.cli import main

pytest.importorskip("matplotlib")

WORKERS = [
    {"name": "w0", "threads": 1, "address": "shared", "emulate": None},
    {"name": "w1", "threads": 2, "address": "unix", "emulate": {"mbit_s": 200.0, "delay_ms": 2.0, "slowdown": 4.0}},
]
BYTES = {"request_bytes": 1 << 20, "reply_bytes": 1 << 20, "floor_bytes": 2_000_000}


def envelope(case, rows, **more):
    return {
        "schema": 1, "case": case, "commit": "0123456789abcdef", "dirty": False, "complete": True,
        "machine": {"cpu": "Test CPU", "cores_usable": 2}, "params": {"model": "m12", "workers": WORKERS}, "rows": rows, **more,
    }  # fmt: skip


def mode_row(mode, seconds, **more):
    return {
        "name": mode,
        "mode": mode,
        "dtype": "bf16",
        "prompt_tokens": 512,
        **timing_fields(seconds),
        "calls": 96,
        **BYTES,
        **more,
    }


def decode_row(mode):
    per_token = {f"{key}_per_token": value / 8 for key, value in {"calls": 96, **BYTES}.items()}
    return mode_row(mode, [0.002, 0.0025, 0.003]) | {"p99_s": 0.003} | per_token


def slice_at(worker, start):
    times = dict(
        zip(
            ("encode_start_ns", "published_ns", "worker_received_ns", "worker_started_ns"),
            range(start, start + 4000, 1000),
            strict=True,
        )
    )
    return {
        "worker": worker, "call": 7, "num_rows": 300, **times, "worker_finished_ns": start + 90_000,
        "arrived_ns": start + 95_000, "combined_ns": 200_000,
    }  # fmt: skip


TIMELINE = {
    "mode": "batched", "dtype": "bf16", "prompt_tokens": 512, "layer": 3, "slices": [slice_at("w0", 0), slice_at("w1", 50_000)],
    "slices_left_out": 0, "clock_offsets_ns": {"w0": 0, "w1": 12345},
}  # fmt: skip
EXPERTS = [
    {
        "name": name, "format": weights, "tokens": tokens, "threads": 1, "backend": name[:5], "weights_from": source,
        "gflops": 2.0 * tokens, "bytes_per_s": 1e10 / tokens**0.1, "peak_gflops": 150.0, "peak_bytes_per_s": 1.2e10,
        **timing_fields([1.0]),
    }
    for name, weights, source in (("cpu", "bf16", "dram"), ("cpu", "f32", "cache"), ("torch_loop", "bf16", "dram"))
    for tokens in (1, 16, 64)
]  # fmt: skip
ATTENTION = [
    {
        "name": name, "kv_dtype": "bf16", "rows": rows, "context": context, "threads": threads, "us": 2.0 * context,
        "share_of_read": 0.75, "share_of_peak": 0.61, **timing_fields([1.0]),
    }
    for threads in (1, 2) for name, rows, context in (("decode", 1, 64), ("decode", 1, 4096), ("prefill", 512, 4096))
]  # fmt: skip
ATTENTION += [
    {"name": name, "kv_dtype": "bf16", "through": "core", "calls": calls, "us": 17.0 + calls, **timing_fields([1.0])}
    for name, calls in (("append_token_batch", 1), ("append_each_token", 64))
]
IPC = [
    {
        "name": kind, "payload_bytes": size, "p50_us": size / 1e3, "floor_us": size / 2e3, "bytes_per_s": 1e9,
        "memcpy_bytes_per_s": 2e9, **timing_fields([1e-6]),
    }
    for kind in ("shared", "unix") for size in (64, 4096)
]  # fmt: skip
IPC.append({"name": "call_shared", "transport": "shared", "added_p50_us": 6.5, "added_p99_us": 20.0, **timing_fields([1e-5])})
LIMITS = [
    {
        "name": name, "step_s": 2e-3, "rest_s": 0.0, "share": 0.6,
        "parts": [
            {"part": "lm_head", "seconds": 1.5e-3, "bound_s": 1.2e-3},
            {"part": "norm", "seconds": 5e-4, "bound_s": 0.0},
        ],
        **timing_fields([2e-3]),
    }
    for name in ("local, decode 1", "workers, prefill 128")
]  # fmt: skip
CASES = {
    "prefill": (
        envelope("prefill", [mode_row("stream", [1.5, 1.25, 1.75]), mode_row("auto", [0.5])]),
        ["1.5 s", "500 ms", "1.049 x"],
    ),
    "decode": (envelope("decode", [decode_row("batched"), decode_row("local")]), ["2.5 ms", "12"]),
    "ipc": (envelope("ipc", IPC), ["6.5", "memcpy", "shared"]),
    "experts": (
        envelope("experts", EXPERTS),
        ["peak 150 GFLOP/s", "read 12.0 GB/s", "bf16 torch loop", "f32 from cache", "share of the roof"],
    ),
    "limits": (
        envelope("limits", LIMITS),
        ["Where a step goes", "lm_head", "2.0 ms", "bounds 60%", "workers", "prefill 128"],
    ),
    "attention": (envelope("attention", ATTENTION), ["bf16, 2 threads", "512 of 4,096 tokens", "61", "18", "81"]),
}


@pytest.fixture
def draw(tmp_path, monkeypatch, capsys):
    """Draws a result through the command into an SVG whose texts stay texts; returns (exit code,
    last line of stderr, SVG).
    """
    import matplotlib as mpl

    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")

    def run(*results, flags=(), out="out.svg"):
        paths = []
        for at, found in enumerate(results):
            paths.append(tmp_path / f"r{at}.json")
            paths[-1].write_text(found if isinstance(found, str) else json.dumps(found))
        code = main.run(["bench", "plot", *map(str, paths), "--out", str(tmp_path / out), *flags])
        last = capsys.readouterr().err.strip().splitlines()[-1]
        drawn = tmp_path / out
        return code, last, drawn.read_text() if drawn.is_file() and out.endswith("svg") else ""

    return run


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_a_picture_with_its_numbers_machine_and_commit(draw, case):
    found, expected = CASES[case]
    code, _, drawn = draw(found)
    assert code == 0
    for text in (
        *expected,
        "model m12",
        "w1: 2 threads, unix, 4x slower, 200 Mbit/s, 2 ms",
        "Test CPU, 2 cores",
        "commit 0123456789",
    ):
        assert text in drawn


def test_several_files_are_drawn_below_each_other_with_their_names(draw):
    code, _, drawn = draw(CASES["prefill"][0], CASES["prefill"][0] | {"complete": False})
    assert code == 0
    assert "r0 · model m12" in drawn
    assert "r1 · model m12" in drawn
    assert "INCOMPLETE" in drawn


def test_a_timeline_shows_every_worker_stage_and_aligned_clock(draw):
    code, _, drawn = draw(envelope("prefill", [], timelines=[TIMELINE]), flags=["--timeline"])
    assert code == 0
    stages = ("encode", "request travels", "waits at the worker", "computes", "reply travels", "combine")
    for text in (*stages, "host", "w0", "300 rows", "batched bf16, 512 tokens, layer 3: 2 slices", "clock of w1 aligned"):
        assert text in drawn


def test_png_is_written(draw, tmp_path):
    assert draw(CASES["decode"][0], out="out.png")[0] == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def without(found, key):
    return found | {"rows": [{name: value for name, value in row.items() if name != key} for row in found["rows"]]}


PREFILL = CASES["prefill"][0]


@pytest.mark.parametrize(
    ("results", "flags", "said"),
    [
        ([without(PREFILL, "floor_bytes")], [], "row 'stream' lacks the field 'floor_bytes'"),
        ([without(CASES["experts"][0], "peak_gflops")], [], "row 'cpu' lacks the field 'peak_gflops'"),
        ([PREFILL | {"rows": [mode_row("auto", [0.5], calls="many")]}], [], "field 'calls': expected numbers"),
        ([PREFILL | {"rows": [mode_row("auto", [0.5], median_s=float("nan"))]}], [], "field 'median_s': expected numbers"),
        ([PREFILL | {"rows": [mode_row("auto", [0.5], median_s=10**400)]}], [], "field 'median_s': expected numbers"),
        ([PREFILL | {"rows": [mode_row("auto", [0.5], calls=[1.0])]}], [], "field 'calls': expected numbers"),
        ([PREFILL | {"rows": [mode_row("auto", [0.5], prompt_tokens=[512])]}], [], "field 'prompt_tokens': expected numbers"),
        ([CASES["experts"][0] | {"rows": [EXPERTS[0] | {"bytes_per_s": 0}]}], [], "'bytes_per_s': expected positive numbers"),
        ([PREFILL | {"rows": []}], [], "no rows to draw"),
        ([PREFILL, CASES["ipc"][0]], [], "r0 is of case 'prefill', r1 is of case 'ipc'"),
        ([PREFILL | {"case": "verify"}], [], "no picture is defined for bench case 'verify'"),
        ([PREFILL | {"schema": 3}], [], "expected a bench result of schema 2, found 3"),
        ([json.dumps(PREFILL)[:-40]], [], "is it cut short?"),
        (["[1, 2]"], [], "expected a bench result of schema 2"),
        ([PREFILL | {"params": 3}], [], "'params' is not an object"),
        ([PREFILL | {"rows": [3]}], [], "rows that are objects"),
        ([PREFILL], ["--timeline"], "no timeline is recorded"),
        ([PREFILL | {"timelines": [{**TIMELINE, "slices": [{"worker": "w0"}]}]}], ["--timeline"], "lacks the field 'call'"),
        ([PREFILL | {"timelines": [{**TIMELINE, "slices": [1]}]}], ["--timeline"], "damaged"),
        ([PREFILL | {"timelines": [TIMELINE | {"slices": []}]}], ["--timeline"], "has no slices"),
        ([PREFILL | {"timelines": [TIMELINE | {"prompt_tokens": "512"}]}], ["--timeline"], "'prompt_tokens': expected numbers"),
        ([PREFILL | {"timelines": [TIMELINE | {"clock_offsets_ns": [1]}]}], ["--timeline"], "'clock_offsets_ns'"),
    ],
)
def test_what_cannot_be_drawn_gets_one_sentence_and_exit_code_2(draw, results, flags, said):
    code, last, drawn = draw(*results, flags=flags)
    assert (code, drawn) == (2, "")
    assert said in last


def test_dollars_in_texts_are_no_formulas(draw):
    code, _, drawn = draw(PREFILL | {"params": {"model": "$x_{$", "workers": [{"name": "w0", "emulate": 3}]}})
    assert code == 0
    assert "model $x_{$" in drawn


def test_a_format_nobody_draws_is_refused(draw):
    code, last, _ = draw(PREFILL, out="out.gif")
    assert code == 2
    assert ".png or .svg" in last


def test_torch_stands_in_the_panel_of_the_kernels_and_another_shape_does_not():
    assert len(plot_experts._panels(EXPERTS)) == 1
    shaped = [
        {**row, "num_experts": 32, "hidden_size": 1024, "moe_intermediate_size": width}
        for row in EXPERTS
        for width in (384, 768)
    ]
    assert [len(rows) for rows in plot_experts._panels(shaped).values()] == [len(EXPERTS)] * 2
