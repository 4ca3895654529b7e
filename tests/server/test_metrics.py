"""A scrape says what was sent, whatever callers send and however the engine process is.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from dflash_moe.server.front.engine_link import MEASURE_S
from dflash_moe.server.front.engine_numbers import EngineNumbers
from tests.server.scripted_engine import QUEUE_S, ScriptedEngine
from tests.server.served import Served, served, wait_for

COMPLETIONS = "/v1/completions"
HOWTO = Path(__file__).parents[2] / "docs" / "howto" / "observe.md"
KEY = "a-key-of-somebody-who-may"
NASTY = 'w"1\\\n<script>'
WORKER = {
    "transport": "shared", "state": "ready", "reason": "", "deaths": 2, "calls": 10, "rows": 40, "request_bytes": 4000,
    "reply_bytes": 3000, "floor_bytes": 6900, "wait_ns": 2_000_000_000, "worker_compute_ns": 1_500_000_000,
    "worker_queue_ns": 500_000_000, "failovers": 3, "hedges": 4, "hedges_won": 1,
    "audit": {"audited_rows": 5, "mismatches": 0}, "prediction_errors": [[0, 0.125]],
}  # fmt: skip
Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(front: Served, **headers: str) -> Samples:
    """The samples of a scrape, by name and labels. All of it was parsed."""
    status, text, found = front.ask("GET", "/metrics", headers=headers)
    assert (status, found["content-type"].partition(";")[0]) == (200, "text/plain"), text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples["dflash_moe_" + name, frozenset(labels.items())]


def test_counters_are_what_was_sent():
    engine = ScriptedEngine()
    engine.workers = {NASTY: WORKER}
    with served(engine) as front:
        before = scrape(front)
        assert value(before, "generation_tokens_total") == 0
        usages = [front.post(COMPLETIONS, {"prompt": "def main", "max_tokens": count})[1]["usage"] for count in (3, 5)]
        front.events(COMPLETIONS, {"prompt": "def", "max_tokens": 4})
        assert front.post(COMPLETIONS, {"prompt": 7})[0] == 400
        wait_for(lambda: value(scrape(front), "generation_tokens_total") == 12)
        found = scrape(front)
    assert value(found, "http_requests_total", route=COMPLETIONS, status="200") == 3
    assert value(found, "http_requests_total", route=COMPLETIONS, status="400") == 1
    assert value(found, "prompt_tokens_total") > sum(usage["prompt_tokens"] for usage in usages)
    assert value(found, "requests_finished_total", reason="length") == 3
    assert value(found, "request_queue_time_seconds_count") == 3
    assert value(found, "request_queue_time_seconds_sum") == pytest.approx(3 * QUEUE_S)
    assert value(found, "request_queue_time_seconds_bucket", le="0.2") == 0
    assert value(found, "request_queue_time_seconds_bucket", le="0.5") == 3
    assert value(found, "engine_step_sequences_sum") == 12
    assert value(found, "kv_cache_usage_ratio") == 0.25
    assert value(found, "engine_up") == value(found, "ready") == 1
    assert value(found, "http_streams_open") == 0
    # The scrape itself is one.
    assert value(found, "http_connections") == value(found, "http_requests_open") == 1
    assert value(found, "http_body_bytes_total", direction="sent") > value(found, "http_body_bytes_total", direction="received")
    assert value(found, "front_process_resident_memory_bytes") > 1 << 20
    assert value(found, "engine_process_cpu_seconds_total") > 0
    for name, expected in (
        ("worker_up", 1), ("worker_lost_total", 2), ("expert_calls_total", 10), ("expert_rows_total", 40),
        ("wire_floor_bytes_total", 6900), ("expert_wait_seconds_total", 2), ("worker_compute_seconds_total", 1.5),
        ("worker_queue_seconds_total", 0.5), ("audited_rows_total", 5), ("audit_mismatches_total", 0),
    ):  # fmt: skip
        assert value(found, name, worker=NASTY) == pytest.approx(expected), name
    assert value(found, "wire_bytes_total", worker=NASTY, direction="request") == 4000
    assert value(found, "holder_choices_total", worker=NASTY, kind="hedge") == 4
    assert value(found, "prediction_error_ratio", worker=NASTY, layer_class="0") == 0.125
    assert not any("layer" in dict(labels) for _, labels in found)


def test_it_can_be_read_as_openmetrics(front):
    status, text, headers = front.ask("GET", "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert (status, headers["content-type"].partition(";")[0]) == (200, "application/openmetrics-text")
    names = {family.name for family in openmetrics.text_string_to_metric_families(text)}
    assert {"dflash_moe_http_requests", "dflash_moe_time_to_first_token_seconds"} <= names


def test_the_howto_names_all_metrics():
    engine = ScriptedEngine()
    engine.workers = {"w0": WORKER}
    with served(engine) as front:
        front.post(COMPLETIONS, {"prompt": "def", "max_tokens": 3})
        scrape(front)
        wait_for(lambda: value(scrape(front), "generation_tokens_total") == 3)
        text = front.ask("GET", "/metrics")[1]
    families = {family.name + "_total" * (family.type == "counter") for family in text_string_to_metric_families(text)}
    named = {name.removeprefix("dflash_moe_") for name in families}
    listed = set(re.findall(r"`([a-z0-9_]+)`", "".join(re.findall(r"^\| (.*?) \|", HOWTO.read_text(), re.MULTILINE))))
    assert {name for name in named if "_process_" not in name} == listed
    assert {"front_process_cpu_seconds_total", "engine_process_resident_memory_bytes"} <= named


def test_paths_and_methods_that_somebody_makes_up_are_no_series_of_their_own(front):
    front.ask("GET", "/v1/models/demo")
    known = len(scrape(front))
    for place in range(20):
        front.ask("GET", f"/made/up/{place}")
        front.ask("POST", f"/v1/models/name-{place}")
        front.ask("GET", f"/v1/models/name-{place}")
    connection = front.connect()
    connection.request("NONSENSE", "/")
    assert connection.getresponse().status == 400
    connection.close()
    found = scrape(front)
    # 404 of what is no path, 405 and 404 of a known one, and what was no request.
    assert len(found) - known <= 4
    assert value(found, "http_requests_total", route="other", status="404") >= 20
    assert value(found, "http_requests_total", route="/v1/models/{name:path}", status="404") >= 20
    assert value(found, "http_requests_total", route="unparsed", status="400") >= 1


def test_strangers_read_nothing():
    with served(keys=[KEY]) as front:
        status, _, headers = front.ask("GET", "/metrics")
        assert (status, "www-authenticate" in headers) == (401, True)
        assert value(scrape(front, authorization=f"Bearer {KEY}"), "http_requests_total", route="/metrics", status="401") == 1


def test_before_the_model_and_without_its_numbers_there_is_a_scrape():
    with served(is_loaded=False) as front:
        found = scrape(front)
        assert value(found, "engine_up") == value(found, "ready") == 0
        assert ("dflash_moe_generation_tokens_total", frozenset()) not in found


def test_numbers_that_cannot_be_had_leave_the_last_ones():
    with served() as front:
        front.post(COMPLETIONS, {"prompt": "def", "max_tokens": 3})
        wait_for(lambda: value(scrape(front), "generation_tokens_total") == 3)
        front.engine.is_up = False
        wait_for(lambda: value(scrape(front), "engine_up") == 0)
        found = scrape(front)
        assert value(found, "generation_tokens_total") == 3
        assert value(found, "ready") == 0
        front.engine.is_up, pid = True, front.keeper.pid
        wait_for(lambda: value(scrape(front), "engine_up") == 1)
        front.engine.stats = None
        wait_for(lambda: value(scrape(front), "engine_up") == 0)
        # A fault in counting takes no front, and so no request.
        assert front.keeper.pid == pid


def test_an_engine_process_that_is_frozen_leaves_the_last_numbers():
    command = [sys.executable, "-m", "tests.server.engine_program"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = int(process.stdout.readline().split()[0])
            front = Served(None, None, SimpleNamespace(port=port), [])
            front.wait_ready()
            before = scrape(front)
            assert value(before, "engine_up") == 1
            os.kill(process.pid, signal.SIGSTOP)
            wait_for(lambda: value(scrape(front), "engine_up") == 0)
            found = scrape(front)
            assert value(found, "kv_cache_blocks") == value(before, "kv_cache_blocks")
            assert value(found, "engine_numbers_age_seconds") > MEASURE_S
            os.kill(process.pid, signal.SIGCONT)
            wait_for(lambda: value(scrape(front), "engine_up") == 1)
        finally:
            process.kill()


def test_those_who_ask_at_a_time_share_a_question():
    async def run() -> None:
        asked: list[asyncio.Future[Mapping[str, Any]]] = []

        async def measure() -> Mapping[str, Any]:
            asked.append(asyncio.get_running_loop().create_future())
            return await asked[-1]

        now = [0.0]
        numbers = EngineNumbers(measure, lambda: now[0])
        callers = [asyncio.ensure_future(numbers.refresh()) for _ in range(50)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # One that hangs up takes the question from nobody.
        callers[0].cancel()
        asked[0].set_result({"engine": 1})
        await asyncio.wait(callers)
        assert (len(asked), numbers.latest, numbers.is_up) == (1, {"engine": 1}, True)
        await numbers.refresh()
        assert len(asked) == 1
        now[0] = 10.0
        last = asyncio.ensure_future(numbers.refresh())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asked[1].set_result({})
        await last
        assert (numbers.latest, numbers.is_up, numbers.age_s) == ({"engine": 1}, False, 10.0)

    asyncio.run(run())
