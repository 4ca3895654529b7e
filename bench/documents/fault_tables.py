"""Writes the tables of the fault campaigns.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.documents.recorded import Recorded
from bench.documents.text import digits, markdown, ratio, seconds
from dflash_moe.bench.compare import compare_rows

KILLS = "worker_kills"
AUDIT = "audit"
FALLBACK = "fallback_kills"
HOSTS = "several_hosts"
CLUSTERS = {"kills_ray": "Ray", "kills_slurm": "Slurm"}
RESTARTS = "rolling_restarts"
CHANGES = {"restart": "started anew", "add": "added", "remove": "removed"}
# The prefix of an event's figures, and what it is called.
EVENTS = {"": ("kills", "killed"), "stop_": ("stops", "stopped"), "lone_": ("lone_kills", "killed, the only holder")}
DEVICE_STEPS = "device_step_faults"
HOLDERS = {"replicas": "two", "lone": "one"}
STEP_FAULTS = {"kill": "worker killed", "stop": "worker stopped", "interrupt": "Ctrl-C at the host"}


def worker_kills(recorded: Recorded) -> str:
    """Writes what kills and stops cost the calls that they fell into, over each transport."""
    lines = [
        (
            row["name"], what, f"{row[count]:,}", str(row["failed_calls"]), str(row["wrong_bits"]),
            *(f"{row[f'{prefix}stall_{name}_ms']:.1f} ms" for name in ("p50", "p99", "max")),
        )
        for row in recorded.rows(KILLS)
        for prefix, (count, what) in EVENTS.items()
    ]  # fmt: skip
    head = ("transport", "worker", "times", "failed calls", "with wrong bits", "stall p50", "p99", "max")
    return markdown(head, lines)


# The campaigns over the whole stack, in the order of their table; not every machine can run each.
CAMPAIGNS = (
    "kills", "stops", "all-dead", "crash-loop", "partitions", "lossy-link", "proxies", "control-groups", "scribblers",
    "damaged-files", "strangers", "registrations", "mode-changes", "soak",
)  # fmt: skip
FAILING = "fault_failing-calls"
# The field of a row that says how often something was broken.
COUNTS = ("kills", "stops", "loops", "cuts", "scribbles", "flips", "events", "restarts", "sessions", "faults")
GOOD, BAD = ("passed", "error", "recovered"), ("untyped", "lasting", "leak", "wrong", "crash", "hang")


def faults(recorded: Recorded) -> str:
    """Writes a line for each row of each campaign over the whole stack."""
    lines = []
    for name in CAMPAIGNS:
        if f"fault_{name}" in recorded.names():
            lines += [_line(name, row) for row in recorded.rows(f"fault_{name}")]
    head = ("campaign", "case", "times", "calls", "failed", "wrong bits", "stall p50", "p99", "back or healed at most")
    return markdown(head, lines)


def _line(campaign: str, row: dict[str, Any]) -> tuple[str, ...]:
    times = sum(row["tries"].values()) if "tries" in row else next((row[key] for key in COUNTS if key in row), "-")
    back_s = row.get("back_max_s", row.get("healed_max_s"))
    return (
        campaign, row["name"], _count(times), _count(row.get("calls", "-")), _count(row.get("failed_calls", "-")),
        _count(row.get("wrong_results", "-")), *(_ms(row.get(f"stall_{name}_ms")) for name in ("p50", "p99")),
        "-" if back_s is None else f"{back_s:.2f} s",
    )  # fmt: skip


def _count(value: int | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def failing_calls(recorded: Recorded) -> str:
    """Writes how each failing call of the system ended, by place and kind."""
    rows = recorded.rows(FAILING) if FAILING in recorded.names() else []
    lines = [
        (*row["name"].split(", "), str(row["failed_calls_injected"]), *(str(row.get(name, 0)) for name in GOOD),
         str(sum(row.get(name, 0) for name in BAD)))
        for row in rows
    ]  # fmt: skip
    return markdown(("while", "call", "failed", "unnoticed", "typed error", "error, then well", "anything else"), lines)


def fallback_kills(recorded: Recorded) -> str:
    """Writes what it costs that all workers are killed and only the host is left."""
    lines = [
        (
            row["name"].removeprefix("restart "), f"{row['events']:,}", f"{row['calls']:,}", str(row["failed_calls"]),
            str(row["wrong_bits"]), f"{row['fallback_calls']:,}",
            *(f"{row[f'stall_{name}_ms']:.1f} ms" for name in ("p50", "p99", "max")),
        )
        for row in recorded.rows(FALLBACK)
    ]  # fmt: skip
    head = ("restart", "times", "calls", "failed calls", "wrong bits", "requests to the host", "stall p50", "p99", "max")
    return markdown(head, lines)


def hosts_together(recorded: Recorded) -> str:
    """Writes what four hosts at one worker get done together, and one after the other."""
    lines = [
        (
            row["name"],
            digits(row["together_rows_per_s"]),
            digits(row["in_turn_rows_per_s"]),
            ratio(row["together_over_in_turn"]),
        )
        for row in recorded.rows(HOSTS, lambda row: "together_over_in_turn" in row)
    ]
    return markdown(("weights", "rows/s at once", "in turn", "ratio"), lines)


def hosts_beside(recorded: Recorded) -> str:
    """Writes what calls take beside another host at their worker."""
    rows = recorded.rows(HOSTS, lambda row: "p99_s" in row)
    p99 = {row["name"]: row["p99_s"] for row in rows}
    lines = []
    for row in rows:
        limit = seconds(row["bound_s"]) if "bound_s" in row else "-"
        times, over = "-", "-"
        if "faults" in row:
            times, over = str(row["faults"]), f"{ratio(row['p99_s'] / p99[row['set_against']])} {row['set_against']}"
        lines.append((row["name"], times, seconds(row["median_s"]), seconds(row["p99_s"]), limit, over))
    return markdown(("calls", "times", "p50", "p99", "bound", "p99 over that"), lines)


def cluster_kills(recorded: Recorded) -> str:
    """Writes what it cost calls that workers were killed which a cluster then started anew."""
    lines = []
    for name, cluster in CLUSTERS.items():
        (row,) = recorded.rows(name)
        counts = [f"{row[key]:,}" for key in ("kills", "calls", "failed_calls", "wrong_bits", "not_back")]
        stalls = [_ms(row[f"stall_{part}_ms"]) for part in ("p50", "p99", "max")]
        lines.append((cluster, *counts, *stalls, f"{row['back_p50_s']:.1f} s", f"{row['back_max_s']:.1f} s"))
    counted = ("cluster", "kills", "calls", "failed", "with wrong bits", "not back")
    return markdown((*counted, "stall p50", "p99", "max", "back, p50", "at most"), lines)


def device_step_faults(recorded: Recorded) -> str:
    """Writes what faults inside of device steps cost these steps."""
    lines = [
        (
            HOLDERS[row["scene"]], STEP_FAULTS[row["kind"]], str(row["faults"]), str(row["replays"]), str(row["failed_steps"]),
            str(row["wrong_bits"]), *(f"{row[f'stall_{name}_ms']:.0f} ms" for name in ("p50", "p99", "max")),
        )
        for row in recorded.rows(DEVICE_STEPS)
    ]  # fmt: skip
    head = ("holders of a shard", "fault", "times", "replayed", "failed", "with wrong bits", "stall p50", "p99", "max")
    return markdown(head, lines)


def audit(recorded: Recorded) -> str:
    """Writes what the audit found, and what golden rows cost a start."""
    drifting, healthy, golden = recorded.rows(AUDIT)
    lines = [
        ("drifting workers out within 200 audited rows", f"{drifting['out_in_time']} of {drifting['runs']}"),
        ("audited rows until then, p50 and most", f"{drifting['p50_rows']}, {drifting['most_rows']}"),
        ("mismatches of healthy workers beside them", str(drifting["healthy_mismatches"])),
        ("audited rows of healthy workers", f"{healthy['audited_rows']:,}"),
        ("mismatches", str(healthy["mismatches"])),
        ("golden rows of a start, p50", f"{golden['golden_ms_median']:,.0f} ms"),
        ("the start itself, p50", f"{golden['start_ms_median']:,.0f} ms"),
    ]
    return markdown(("what", "found"), lines)


def rolling_restarts(recorded: Recorded) -> str:
    """Writes what changes of workers cost the calls that they fell into, over each transport."""
    lines = [
        (
            row["name"], CHANGES[kind["kind"]], str(kind["count"]), str(row["failed_calls"]), str(row["wrong_bits"]),
            *(f"{kind[f'stall_{name}_ms']:.0f} ms" for name in ("p50", "max")), f"{kind['seconds_p50']:.1f} s",
        )
        for row in recorded.rows(RESTARTS)
        for kind in row["kinds"]
    ]  # fmt: skip
    head = ("transport", "worker", "times", "failed calls", "with wrong bits", "stall p50", "max", "takes, p50")
    return markdown(head, lines)


def simulation(recorded: Recorded) -> str:
    """Writes what the recorded seeds of the simulator did together."""
    row = recorded.rows("simulation")[0]
    lines = [
        ("seeds", f"{row['seeds']:,}", "-"),
        ("virtual hours", f"{row['virtual_hours']:.1f}", f"{row['per_cpu_minute']['virtual_hours']:.1f}"),
        ("calls", f"{row['calls']:,}", f"{row['per_cpu_minute']['calls']:,.0f}"),
        ("calls with the right bits", f"{row['succeeded']:,}", "-"),
        ("calls that were abandoned", f"{row['abandoned']:,}", "-"),
        *((f"calls that ended in `{name}`", f"{count:,}", "-") for name, count in row["failed"].items()),
        ("faults", f"{sum(row['faults'].values()):,}", f"{row['per_cpu_minute']['faults']:,.0f}"),
        *((f"- `{name}`", f"{count:,}", "-") for name, count in row["faults"].items()),
        ("seeds that broke a rule", str(len(row["failing"])), "-"),
    ]
    return markdown(("what", "in all", "per minute of a processor"), lines)


EARLIER = "earlier_commit"
# Rows of this tree beside the earlier one.
NOW = {"hedge 0": "without hedging", "default": "default"}


def without_faults(recorded: Recorded) -> str:
    """Writes what a call and a token take beside an earlier commit."""
    found = recorded.result(EARLIER)
    lines = []
    for name, what in NOW.items():
        compared = compare_rows(found, EARLIER, "earlier", name, min_effect=0.0).verdicts
        rows = {row["transport"]: row for row in recorded.rows(EARLIER) if row["name"] == name}
        before = {row["transport"]: row for row in recorded.rows(EARLIER) if row["name"] == "earlier"}
        for (transport, row), verdict in zip(rows.items(), compared, strict=True):
            interval = "-" if verdict.low is None or verdict.high is None else f"{verdict.low:.3f} to {verdict.high:.3f}"
            took = [1e6 * one["median_s"] for one in (before[transport], row)]
            lines.append(
                (transport, what, *(f"{one:.1f} us" for one in took), f"{took[1] - took[0]:+.1f} us", interval, verdict.verdict)
            )
    head = ("over", "hedging", "earlier", "now", "difference", "ratio, 95 in 100", "verdict")
    return markdown(head, lines)


SKEWED = "skewed_routing"


def skewed_routing(recorded: Recorded) -> str:
    """Writes what calls take with one holder of each shard and with two."""
    rows = {(row["routing"], row["calls"], row["holders"]): row for row in recorded.rows(SKEWED)}
    lines = [
        (
            found["routing"], str(found["calls"]),
            *(f"{1e3 * rows[found['routing'], found['calls'], holders]['median_s']:.1f} ms" for holders in (1, 2)),
            f"{found['share']:.2f}", f"{found['share_min']:.2f} to {found['share_max']:.2f}",
        )
        for found in recorded.summary(SKEWED)
    ]  # fmt: skip
    return markdown(("routing", "calls at once", "one holder", "two holders", "share, median", "over rounds"), lines)


TABLES: dict[str, Callable[[Recorded], str]] = {
    "worker-kills": worker_kills, "audit": audit, "fallback-kills": fallback_kills, "faults": faults,
    "hosts-together": hosts_together, "hosts-beside": hosts_beside,
    "cluster-kills": cluster_kills,
    "failing-calls": failing_calls, "device-step-faults": device_step_faults, "rolling-restarts": rolling_restarts,
    "simulation": simulation, "without-faults": without_faults, "skewed-routing": skewed_routing,
}  # fmt: skip
