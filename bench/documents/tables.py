"""Writes the tables of the documents. Each shows all rows that its rule names, in the order of the
file. Those of kernels and weights are in kernel_tables.py, those of llama.cpp in
llama_tables.py, those of our runtime against llama.cpp and vLLM in peer_tables.py, and those of the
engine in engine_tables.py, those of the server in serving_tables.py, those of fault campaigns in
fault_tables.py.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

from bench.documents import (
    engine_tables,
    fault_tables,
    gguf_tables,
    kernel_tables,
    llama_tables,
    overview,
    peer_tables,
    promise_tables,
    serving_tables,
    verify_tables,
    vllm_tables,
)
from bench.documents.recorded import Recorded, Row
from bench.documents.text import digits, gigabytes_per_s, markdown, mebibytes, payload, percent, ratio, seconds

SETTINGS = ("equal", "weak_worker", "slow_link")


def provenance(recorded: Recorded) -> str:
    """Writes where every recorded result comes from."""
    lines = []
    for name in recorded.names():
        found = recorded.result(name)
        machine = found["machine"]
        state = "" if not found["dirty"] else " and changes"
        state += "" if found["complete"] else ", incomplete"
        lines.append(
            (
                f"[{name}](../../bench/results/{name}.json)",
                f"{found['commit'][:10]}{state}",
                machine["cpu"],
                str(machine["cores_usable"]),
                machine["isa"],
                f"{machine['memory_bytes'] / 2**30:.0f} GiB",
            )
        )
    return markdown(("result", "commit", "processor", "cores", "kernel set", "memory"), lines)


def transports(recorded: Recorded) -> str:
    """Writes every transport and payload."""
    head = ("transport", "payload", "p50", "p99", "floor", "x floor", "GB/s", "of memcpy")
    return markdown(
        head,
        (
            (
                row["name"],
                payload(row["payload_bytes"]),
                us(row["p50_us"]),
                us(row["p99_us"]),
                us(row["floor_us"]),
                digits(row["p50_us"] / row["floor_us"]),
                gigabytes_per_s(row["bytes_per_s"]),
                percent(row["bytes_per_s"] / row["memcpy_bytes_per_s"]),
            )
            for row in recorded.rows("ipc", lambda row: not row["name"].startswith(("call_", "adds_")))
        ),
    )


def socket_steps(recorded: Recorded) -> str:
    """Writes each step from a bare socket to a channel over it."""
    rows = recorded.rows("ipc", lambda row: row["name"].startswith("adds_"))
    return markdown(
        ("over", "round trip", "p50", "p99", "x bare"),
        (
            (
                row["name"].removeprefix("adds_"),
                row["step"],
                us(row["p50_us"]),
                us(row["p99_us"]),
                digits(row["p50_us"] / row["bare_us"]),
            )
            for row in rows
        ),
    )


def encryption(recorded: Recorded) -> str:
    """Writes what TLS adds to TCP, beside libssl on bare sockets."""
    head = ("payload", "TLS, p50", "TCP in the same rounds", "added", "libssl alone", "TLS / libssl alone", "GB/s")
    return markdown(
        head,
        (
            (
                payload(row["payload_bytes"]),
                us(row["p50_us"]),
                us(row["without_us"]),
                us(row["p50_us"] - row["without_us"]),
                us(row["floor_us"]),
                digits(row["p50_us"] / row["floor_us"]),
                gigabytes_per_s(row["bytes_per_s"]),
            )
            for row in recorded.rows("ipc", lambda row: row["name"] == "tls")
        ),
    )


def us(value: float) -> str:
    return seconds(value * 1e-6)


def expert_calls(recorded: Recorded) -> str:
    """Writes what a call adds over each transport."""
    rows = recorded.rows("ipc", lambda row: row["name"].startswith("call_"))
    return markdown(
        ("over", "whole call, p50", "added, p50", "added, p99"),
        (
            (row["name"].removeprefix("call_"), seconds(row["median_s"]), us(row["added_p50_us"]), us(row["added_p99_us"]))
            for row in rows
        ),
    )


def modes(name: str) -> Callable[[Recorded], str]:
    """Returns the writer of every mode and prompt of one setting."""

    def table(recorded: Recorded) -> str:
        head = ("prompt", "mode", "prefill, p50", "p95", "rounds", "tokens/s", "calls", "bytes / floor", "decode tokens/s",
                "better fixed / auto")  # fmt: skip
        return markdown(head, (_mode_line(recorded, name, row) for row in recorded.rows(name)))

    return table


def _mode_line(recorded: Recorded, name: str, row: Row) -> tuple[str, ...]:
    prompt = row.get("prompt_tokens", recorded.result(name)["params"]["prompt_tokens"])
    return (
        f"{prompt:,}",
        row["mode"] if row["name"] == row["mode"] else row["name"],
        seconds(row["median_s"]),
        seconds(row["p95_s"]),
        str(len(row["samples_s"])),
        digits(row["tokens_per_s"]),
        f"{row['calls']:,}",
        _of_floor(row),
        _decode(row),
        _of_better_fixed(recorded, name, row),
    )


def _of_better_fixed(recorded: Recorded, name: str, row: Row) -> str:
    """Writes for `auto` how much quicker it was than the better fixed mode: the median of the
    rounds' ratios.
    """
    size = ("prompt_tokens", "dtype")
    same = (one for one in recorded.summary(name) if row["name"] == "auto" and all(one[key] == row[key] for key in size))
    return next((ratio(one["median_ratio"]) for one in same), "-")


def _of_floor(row: Row) -> str:
    return f"{(row['request_bytes'] + row['reply_bytes']) / row['floor_bytes']:.4f}" if row["floor_bytes"] else "-"


def _decode(row: Row) -> str:
    return digits(row["decode_tokens_per_s"]) if row.get("decode_tokens_per_s") else "-"


def auto(name: str) -> Callable[[Recorded], str]:
    """Returns the writer of how `auto` did in one setting, against the better fixed mode and its
    own forecast.
    """

    def table(recorded: Recorded) -> str:
        head = ("prompt", "better fixed mode", "its time / auto's, median", "least", "most", "forecast off by")
        return markdown(
            head,
            (
                (
                    f"{entry['prompt_tokens']:,}",
                    entry["better_fixed"],
                    ratio(entry["median_ratio"]),
                    ratio(min(entry["ratios_to_better_fixed"])),
                    ratio(max(entry["ratios_to_better_fixed"])),
                    _off(entry),
                )
                for entry in recorded.summary(name)
            ),
        )

    return table


def _off(entry: Row) -> str:
    found = {worker: made["deviation"] for worker, made in entry["predictions"].items()}
    return ", ".join(f"{worker} {percent(off) if off is not None else '-'}" for worker, off in found.items())


def overlap(recorded: Recorded) -> str:
    """Writes a call in one slice, and as `auto` cuts it."""
    head = ("cut", "slices", "whole call, p50", "send", "compute", "receive")
    return markdown(
        head,
        (
            (
                row["name"],
                f"{row['num_slices']:g}",
                seconds(row["median_s"]),
                seconds(row["send_s"]),
                seconds(row["compute_s"]),
                seconds(row["receive_s"]),
            )
            for row in recorded.rows("slice_overlap")
        ),
    )


def local_or_remote(case: str) -> Callable[[Recorded], str]:
    """Returns the writer of remote workers beside all experts in the host."""
    name = f"local_against_remote_{case}"

    def table(recorded: Recorded) -> str:
        rows = recorded.rows(name)
        shares = speed_shares(rows)
        head = ("experts", "mode", "p50", "p95", "tokens/s", "speed of local")
        return markdown(
            head,
            (
                (
                    "host" if row["name"] == "local" else "two workers",
                    row["mode"],
                    seconds(row["median_s"]),
                    seconds(row["p95_s"]),
                    digits(row["tokens_per_s"]),
                    ratio(shares[row["name"]]),
                )
                for row in rows
            ),
        )

    return table


def speed_shares(rows: Iterable[Row]) -> dict[str, float]:
    """Returns for each row the median over rounds of the time of local divided by its own, where
    the time of a round is the median of its samples.
    """
    rounds = {row["name"]: _rounds(row) for row in rows}
    local = rounds["local"]
    return {name: statistics.median(a / b for a, b in zip(local, own, strict=True)) for name, own in rounds.items()}


def _rounds(row: Row) -> list[float]:
    step = row["samples_per_round"]
    return [statistics.median(row["samples_s"][at : at + step]) for at in range(0, len(row["samples_s"]), step)]


def emulated_link(recorded: Recorded) -> str:
    """Writes the emulator beside a link that the kernel shapes."""
    rows = {(row["tokens"], row["num_slices"], row["link"]): row for row in recorded.rows("emulated_link")}
    head = ("tokens", "slices", "real, p50", "emulated, p50", "real / emulated")
    return markdown(
        head,
        (
            (
                f"{entry['tokens']:,}",
                str(entry["num_slices"]),
                *(seconds(rows[entry["tokens"], entry["num_slices"], link]["median_s"]) for link in ("real", "emulated")),
                ratio(entry["ratio"]),
            )
            for entry in recorded.summary("emulated_link")
        ),
    )


def prefill(recorded: Recorded) -> str:
    """Writes a long prompt in every mode and wire dtype."""
    head = ("mode", "wire", "prefill, p50", "rounds", "calls", "requests MiB", "replies MiB", "bytes / floor",
            "decode tokens/s", "decode calls")  # fmt: skip
    return markdown(
        head,
        (
            (
                "all experts in the host" if row["name"] == "local" else row["mode"],
                row["dtype"],
                seconds(row["median_s"]),
                str(len(row["samples_s"])),
                f"{row['calls']:,}",
                mebibytes(row["request_bytes"]),
                mebibytes(row["reply_bytes"]),
                _of_floor(row),
                _decode(row),
                f"{row['decode_calls']:,}",
            )
            for row in recorded.rows("prefill_4248")
        ),
    )


def cores(recorded: Recorded) -> str:
    """Writes the same work on one core and on two."""
    lines = []
    for cpus in ("one_core", "two_cores"):
        for row in recorded.rows(f"prefill_{cpus}"):
            lines.append((cpus.replace("_", " "), row["name"], seconds(row["median_s"]), seconds(row["p95_s"]), _decode(row)))
    return markdown(("cores", "mode", "prefill, p50", "p95", "decode tokens/s"), lines)


def decode_timeline(recorded: Recorded) -> str:
    """Where a token goes, and who is woken, by model, prompt, cores and threads of torch."""
    head = ("model", "after tokens", "cores", "threads of torch", "tokens/s", "token", "host", "until published", "request",
            "worker", "reply and sum", "wakes: host", "torch", "workers")  # fmt: skip
    lines = []
    for row in recorded.rows("decode_timeline"):
        parts, wakes = row["parts_s"], row["wakes"]
        name = "shipped" if row["model"] == "model" else f"random, {row['layers']} layers"
        times = (row["token_s"], parts["host"], parts["publish"], parts["request"], parts["worker"])
        lines.append((
            name, f"{row['prompt_tokens']:,}", str(row["cores"]), str(row["torch_threads"]), digits(row["tokens_per_s"]),
            *map(seconds, times), seconds(parts["reply"] + parts["combine"]), *(digits(wakes[who]) for who in wakes),
        ))  # fmt: skip
    return markdown(head, lines)


def memory(recorded: Recorded) -> str:
    """Writes every process of a host with two workers after loading."""
    recorded.rows("memory_3_6_gb")
    head = ("process", "experts a layer", "anonymous MiB", "file-backed MiB", "of it expert weights MiB")
    return markdown(
        head,
        (
            (
                process["name"],
                str(process["experts_per_layer"]),
                *(mebibytes(process[key]) for key in ("anonymous_bytes", "file_bytes", "weight_bytes")),
            )
            for process in recorded.result("memory_3_6_gb")["params"]["processes"]
        ),
    )


def parity(recorded: Recorded) -> str:
    """Writes the figures of the worst layer of every required family."""
    lines = []
    for row in recorded.rows("verify_families"):
        worst = max(layer["remote_error"] / layer["eager_error"] for layer in row["layers"] if layer["eager_error"])
        lines.append(
            (
                row["name"],
                row["dtype"],
                digits(worst),
                *(f"{max(layer[key] for layer in row['layers']):.1e}" for key in ("difference_rms", "difference_max")),
                f"{row['logits_rms']:.1e}",
                # Older results counted the tokens before the first one that differs.
                f"{row.get('greedy_equal', row['greedy_compared'])} of {row['greedy_tokens']}",
                str(row["remote_calls"]),
                "yes" if row["passed"] else "NO",
            )
        )
    head = (
        "family",
        "dtype",
        "remote error / eager's",
        "difference rms",
        "max",
        "logits rms",
        "greedy tokens equal",
        "remote calls",
        "within bounds",
    )
    return markdown(head, lines)


def bits_per_byte(recorded: Recorded) -> str:
    """Writes the shipped model over every wire dtype."""
    return markdown(
        ("experts", "wire", "host", "bits per byte", "remote calls"),
        (
            (
                "eager, in the host" if row["experts"] == "eager" else row["experts"],
                row["wire_dtype"] or "none",
                row["host_dtype"],
                f"{row['bits_per_byte']:.4f}",
                f"{row['calls']:,}" if "calls" in row else "-",
            )
            for row in recorded.rows("bits_per_byte")
        ),
    )


TABLES: dict[str, Callable[[Recorded], str]] = {
    "provenance": provenance,
    "transports": transports,
    "encryption": encryption,
    "expert-calls": expert_calls,
    "socket-steps": socket_steps,
    **{f"modes-{name}": modes(f"modes_{name}") for name in SETTINGS},
    **{f"auto-{name}": auto(f"modes_{name}") for name in SETTINGS},
    "overlap": overlap,
    "local-prefill": local_or_remote("prefill"),
    "local-decode": local_or_remote("decode"),
    "emulated-link": emulated_link,
    "prefill": prefill,
    "cores": cores,
    "decode-timeline": decode_timeline,
    "memory": memory,
    "parity": parity,
    "bits-per-byte": bits_per_byte,
    **engine_tables.TABLES,
    **fault_tables.TABLES,
    **promise_tables.TABLES,
    **gguf_tables.TABLES,
    **kernel_tables.TABLES,
    **llama_tables.TABLES,
    **overview.TABLES,
    **peer_tables.TABLES,
    **serving_tables.TABLES,
    **vllm_tables.TABLES,
    **verify_tables.TABLES,
}
TABLES = {f"measured/{name}": table for name, table in TABLES.items()}
