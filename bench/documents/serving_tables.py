"""Writes the tables of the server: beside other servers, beside large requests, and what breaks.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.documents.peer_tables import SIDES, marks
from bench.documents.recorded import Recorded, Row
from bench.documents.text import digits, markdown, percent, seconds

PEERS = "serving_against_peers"
INTERFERENCE = "serving_interference"
FAULTS = "serving_faults"
# Rows whose requests are more than so many streams.
REQUESTS = {"arrivals": "4, beside prompts of 2,048", "leaving": "16, steps noted"}
COMPANY = {
    "alone": "nothing",
    "bodies": "bodies of 8 MiB",
    "tokenize": "texts of a megabyte to count",
    "schemas": "the worst schemas",
    "forms": "nothing; they keep to a schema",
}


def streams(recorded: Recorded) -> str:
    """Writes every measurement of a server, and the same requests in the engine's process."""
    head = ("requests", "weights", "side", "tokens/s", "first token, p50", "gaps, p50", "p99", "cores that others took")
    return markdown(head, (line for row in recorded.rows(PEERS) for line in _lines(row)))


def _lines(row: Row) -> Iterator[tuple[str, ...]]:
    others = f"{row['others_busy_cores']:.2f}"
    if row["side"] == "engine":
        for count, speed in row["total_tokens_per_s"].items():
            yield _streams(int(count)), row["format"], "our engine alone", digits(speed), "-", "-", "-", others
        return
    requests = REQUESTS.get(row["name"].split("-")[0]) or _streams(row["concurrency"])
    side = SIDES["llama"] + "'s server" if row["side"] == "llama" else SIDES[row["side"]]
    yield (
        requests, row["format"], side, digits(row["tokens_per_s"]), seconds(row["ttft_s"]["p50"]),
        *(seconds(row["itl_s"][name]) for name in ("p50", "p99")), others,
    )  # fmt: skip


def _streams(count: int) -> str:
    return "1" if count == 1 else f"{count} at once"


def processor_time(recorded: Recorded) -> str:
    """Writes what a token takes of the processor in the front and at the client, and how long it is
    on its way.
    """
    lines = []
    rows = recorded.rows(PEERS, lambda row: row["side"] == "ours" and not row["name"].startswith("arrivals"))
    for row in rows:
        delay = row.get("delay_s")
        way = (seconds(delay["p50"]), seconds(delay["p95"])) if delay else ("-", "-")
        front, client = row["server_cpu_us_per_token"]["front"], row["client_cpu_us_per_token"]
        lines.append((_streams(row["concurrency"]), row["format"], f"{front:.0f} us", f"{client:.0f} us", *way))
    head = ("streams", "weights", "the front's, a token", "the client's, a token", "from step to reader, p50", "p95")
    return markdown(head, lines)


def targets(result: str) -> Callable[[Recorded], str]:
    """Returns the writer of what was measured against each mark."""
    return lambda recorded: marks(recorded.summary(result))


def interference(recorded: Recorded) -> str:
    """Writes streams beside whatever they had for company."""
    lines = [
        (
            COMPANY[row["name"]], digits(row["tokens_per_s"]), *(seconds(row["itl_s"][name]) for name in ("p50", "p99")),
            ", ".join(f"{count} x {status}" for status, count in sorted(row.get("beside", {}).items())) or "-",
            f"{row['others_busy_cores']:.2f}",
        )
        for row in recorded.rows(INTERFERENCE)
    ]  # fmt: skip
    return markdown(("16 streams beside", "tokens/s", "gaps, p50", "p99", "its answers", "cores that others took"), lines)


def faults(recorded: Recorded) -> str:
    """Writes what each part of the fault campaign counted."""
    return markdown(("what happens", "times", "found"), (_fault(row) for row in recorded.rows(FAULTS)))


def _fault(row: Row) -> tuple[str, str, str]:
    match row["name"]:
        case "overload":
            found = f"{row['answered']} answered, {row['refused']} got 429, {row['lost']} lost; memory grew by "
            return "requests at twice the capacity", f"{row['requests']:,}", found + f"{row['grown_bytes'] / 2**20:.1f} MiB"
        case "vanish":
            more = ", ".join(f"{row[key]} {key}" for key in ("blocks", "threads", "descriptors"))
            return "callers hang up in an answer", str(row["callers"]), f"more than before: {more}"
        case "slow":
            return "streams that nobody reads", str(row["streams"]), f"cost others {percent(row['cost'])}"
        case "fronts":
            who = "the front is killed under load"
        case _:
            who = "one of two holders is killed under load"
    found = f"{row['whole']:,} whole answers, {row['cut']} cut off, {row['refused']} refused, {row['wrong']} wrong; "
    return who, str(row["kills"]), found + f"all well after {row['ready_p50_s']:.2f} s, at most {row['ready_max_s']:.2f} s"


TABLES: dict[str, Callable[[Recorded], str]] = {
    "serving-streams": streams,
    "serving-processor": processor_time,
    "serving-targets": targets(PEERS),
    "serving-interference": interference,
    "serving-interference-targets": targets(INTERFERENCE),
    "serving-faults": faults,
}
