"""Writes the tables of expert kernels and weights: times of one layer, peers, loading, formats.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.documents.recorded import Recorded, Row
from bench.documents.text import digits, gigabytes_per_s, markdown, mebibytes, percent, seconds


def experts(name: str, wanted: Callable[[Row], bool]) -> Callable[[Recorded], str]:
    """Returns the writer of a table of times of one layer by batch size. After each time stand its
    share of this machine's read bandwidth, and that of its peak in the kernel's own arithmetic.
    """

    def table(recorded: Recorded) -> str:
        rows = recorded.rows(name, wanted)
        sizes = sorted({row["tokens"] for row in rows})
        lines: dict[tuple[str, ...], dict[int, str]] = {}
        for row in rows:
            key = (row["format"], row["kernel"], str(row["threads"]), row["routing"], row["weights_from"])
            cells = lines.setdefault(key, {})
            if row["tokens"] in cells:
                raise ValueError(f"{name}.json: two rows are {key}, {row['tokens']} tokens; a table can show only one")
            cells[row["tokens"]] = _expert_cell(row)
        varying = [at for at in range(5) if at < 2 or len({key[at] for key in lines}) > 1]
        heads = ("weights", "kernel", "threads", "routing", "weights from")
        return markdown(
            [*(heads[at] for at in varying), *(f"{size:,} token{'s' if size > 1 else ''}" for size in sizes)],
            ([*(key[at] for at in varying), *(cells.get(size, "-") for size in sizes)] for key, cells in lines.items()),
        )

    return table


def _expert_cell(row: Row) -> str:
    return f"{seconds(row['median_s'])} ({percent(row['of_peak_bytes'])}, {percent(row['of_peak_gflops'])})"


def peers(recorded: Recorded) -> str:
    """Writes the fastest time of each peer divided by that of each of our classes."""
    sizes = sorted({entry["tokens"] for entry in recorded.summary("experts_against_peers")})
    lines: dict[tuple[str, str, str], dict[int, str]] = {}
    for entry in recorded.summary("experts_against_peers"):
        key = (entry["name"], entry["peer"], str(entry["threads"]))
        lines.setdefault(key, {})[entry["tokens"]] = digits(entry["ratio"])
    head = ("ours", "against", "threads", *(f"{size:,} token{'s' if size > 1 else ''}" for size in sizes))
    return markdown(head, ([*key, *(cells.get(size, "-") for size in sizes)] for key, cells in lines.items()))


def peer_errors(recorded: Recorded) -> str:
    """Writes the relative errors of all kernels against float32."""
    found = recorded.result("experts_against_peers")["params"]["relative_errors"]
    lines = [(case, kernel, f"{error:.1e}") for case, errors in found.items() for kernel, error in errors.items()]
    return markdown(("weights", "kernel", "relative error"), lines)


def layer_against_gemm(recorded: Recorded) -> str:
    """Writes the whole layer beside its products alone."""
    rows = {(row["format"], row["threads"], row["kind"]): row for row in recorded.rows("layer_against_gemm")}
    head = ("weights", "threads", "layer GFLOP/s", "products GFLOP/s", "layer / products", "over one thread")
    return markdown(
        head,
        (
            (
                entry["format"],
                str(entry["threads"]),
                digits(entry["gflops"]),
                digits(rows[entry["format"], entry["threads"], "gemm"]["gflops"]),
                percent(entry["of_gemm"]),
                digits(entry["of_one_thread"]),
            )
            for entry in recorded.summary("layer_against_gemm")
        ),
    )


def loading(recorded: Recorded) -> str:
    """Writes loading beside copying and reading the same file."""
    shares = {(entry["format"], entry["resident"]): entry for entry in recorded.summary("weight_loading")}
    lines = []
    for row in recorded.rows("weight_loading"):
        entry: Any = shares.get((row["format"], row.get("resident")), {})
        what = f"load as {row['resident']}" if row["kind"] == "load" else row["kind"]
        lines.append(
            (
                row["format"],
                what,
                gigabytes_per_s(row["bytes_per_s"]),
                percent(entry["of_copy"]) if entry else "-",
                percent(entry["of_page_cache"]) if entry else "-",
                mebibytes(row["anonymous_beyond_packed_bytes"]) if row["kind"] == "load" else "-",
            )
        )
    return markdown(("stored as", "what", "GB/s", "of a copy", "of reading", "MiB beyond what is kept"), lines)


def mapped_weights(recorded: Recorded) -> str:
    """Writes computing from the mapped checkpoint, and from panels on disk, beside computing from
    packed weights.
    """
    rows = {(row["format"], row["tokens"], row["layout"]): row for row in recorded.rows("mapped_weights")}
    head = (
        "weights", "tokens", "packed, p50", "mapped, p50", "mapped / packed", "stored / packed", "packed MiB", "mapped MiB",
        "stored MiB",
    )  # fmt: skip
    lines = []
    for entry in recorded.summary("mapped_weights"):
        packed, mapped, stored = (rows[entry["format"], entry["tokens"], layout] for layout in ("packed", "mapped", "stored"))
        lines.append(
            (
                entry["format"],
                f"{entry['tokens']:,}",
                seconds(packed["median_s"]),
                seconds(mapped["median_s"]),
                digits(entry["time_ratio"]),
                digits(entry["stored_ratio"]),
                *(mebibytes(row["start_anonymous_bytes"]) for row in (packed, mapped, stored)),
            )
        )
    return markdown(head, lines)


def stored_start(recorded: Recorded) -> str:
    """Writes what panels on disk are worth beside packing at each start."""
    rows = {row["name"]: row for row in recorded.rows("stored_start")}
    first, second = rows["first start, then writing"], rows["second start"]
    two, death = rows["two workers with all experts"], rows["a worker is killed"]
    gib = 1 << 30
    lines = [
        ("start of a worker that packs, s", digits(second["packed_start_s"]), "1"),
        ("start from panels, s", digits(second["stored_start_s"]), digits(second["of_packed"])),
        ("first start, of which panels are written afterwards, s", digits(first["first_start_s"]), digits(first["of_packed"])),
        (
            "a call of one token while they are written, speed",
            seconds(first["writing_call_s"]),
            digits(first["speed_of_packed"]),
        ),
        ("a call of one token from panels", seconds(second["stored_call_s"]), digits(second["call_of_packed"])),
        ("memory of two workers that pack, GiB", digits(two["packed_bytes"] / gib), digits(two["packed_of_panels"])),
        ("memory of two workers from panels, GiB", digits(two["stored_bytes"] / gib), digits(two["of_panels"])),
        ("a call of the stand-in for a killed worker", seconds(death["stand_in_call_s"]), digits(death["of_worker"])),
        ("a killed worker is back after, s", digits(death["back_s"]), "-"),
    ]
    if cold := rows.get("first token with a cold page cache"):
        took = seconds(cold["cold_s"]), digits(cold["of_bound"])
        lines.append(("the first token where the page cache has no panels", *took))
    if chat := rows.get("a process to its first token"):
        lines += [
            ("imports of torch, transformers and the model's class, s", digits(chat["imports_s"]), "-"),
            ("a prompt of 16 once all is there, s", digits(chat["later_s"]), "-"),
            ("a process to its first token, s", digits(chat["kept_s"]), "-"),
            ("the same where nothing was proven before, s", digits(chat["proving_s"]), "-"),
        ]
    if host := rows.get("the host's own matrices"):
        lines += [
            ("packing the host's own matrices, s", digits(host["pack_s"]), "1"),
            ("reading and summing up as many bytes, s", digits(host["read_s"]), digits(host["read_s"] / host["pack_s"])),
        ]
    return markdown(("what", "median", "of packed, of panels, of the worker, of the bound"), lines)


def slots_bounds(recorded: Recorded) -> str:
    """Writes slots beside the bounds of the same tokens."""
    lines = [
        (
            f"{row['fraction']:.2f}",
            f"{row['rows']:,}",
            seconds(row["slots_s"]),
            seconds(row["compute_s"]),
            seconds(row["reads_s"]),
            digits(row["of_bound"]),
            f"{row['of_replay']:.3f}",
        )
        for row in recorded.rows("larger_than_memory")
        if "rows" in row
    ]
    head = (
        "memory, of the experts",
        "rows",
        "with slots",
        "arithmetic alone",
        "reads alone",
        "of the bound",
        "bytes, of LRU's",
    )
    return markdown(head, lines)


def slots_groups(recorded: Recorded) -> str:
    """Writes whole models in a memory control group: slots, the mapped checkpoint and llama.cpp."""
    lines = [
        (
            f"{row['fraction']:.2f}",
            f"{row['read_ahead_kb']:,}",
            row["side"],
            digits(row["tokens_per_s"]),
            digits(row["slots_are"]),
        )
        for row in recorded.rows("larger_than_memory")
        if "side" in row
    ]
    return markdown(("memory, of the experts", "read-ahead, KiB", "side", "tokens/s", "slots are"), lines)


def weight_errors(recorded: Recorded) -> str:
    """Writes how far each format moves the outputs of the layers of the shipped model."""
    return markdown(
        ("format", "numerics", "bits a weight", "output moves by, mean", "worst layer"),
        (
            (
                row["format"],
                row["numerics"],
                f"{row['bits_per_weight']:.2f}",
                f"{100 * row['error_rms']:.2f}%",
                f"{100 * row['error_worst']:.2f}%",
            )
            for row in recorded.rows("weight_errors")
        ),
    )


def class_errors(recorded: Recorded) -> str:
    """Writes how far each numerics class moves the outputs of the layers of the shipped model."""
    return markdown(
        ("class", "output moves by, mean", "worst layer"),
        (
            (f"`{row['name']}`", f"{100 * row['error_rms']:.3f}%", f"{100 * row['error_worst']:.3f}%")
            for row in recorded.rows("class_errors")
        ),
    )


def _is_ours(row: Row) -> bool:
    return bool(row["backend"] == "cpu")


def _is_plain(row: Row) -> bool:
    """Says whether a row has uniform routing and weights from memory."""
    return row["routing"] == "uniform" and row["weights_from"] == "dram"


TABLES: dict[str, Callable[[Recorded], str]] = {
    "experts-one-thread": experts("experts", lambda row: _is_ours(row) and _is_plain(row) and row["threads"] == 1),
    "experts-threads": experts("experts", lambda row: _is_ours(row) and _is_plain(row) and row["threads"] > 1),
    "experts-other": experts("experts", lambda row: _is_ours(row) and not _is_plain(row)),
    "experts-torch": experts("experts", lambda row: not _is_ours(row)),
    "experts-bf16": experts("experts_bf16", lambda _row: True),
    "peers": peers,
    "peer-errors": peer_errors,
    "peer-times": experts("experts_against_peers", lambda _row: True),
    "layer-against-gemm": layer_against_gemm,
    "loading": loading,
    "mapped-weights": mapped_weights,
    "stored-start": stored_start,
    "slots-bounds": slots_bounds,
    "slots-groups": slots_groups,
    "weight-errors": weight_errors,
    "class-errors": class_errors,
}
