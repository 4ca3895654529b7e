"""The page as somebody has it in a browser: without a mouse, with a key, with a worker that dies.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from dflash_moe.errors import QueueFull
from dflash_moe.server.front import page_files
from tests.server import browser
from tests.server.browser import Tab, browsing
from tests.server.scripted_engine import ScriptedEngine
from tests.server.served import Served, served, tokenizer, wait_for
from tests.server.test_metrics import WORKER

needs_browser = pytest.mark.skipif(browser.program() is None, reason="chromium is not installed")
KEY = "a-key-of-somebody-who-may"
# What a model writes that means no good.
HTML = "<b>bold</b> <script>document.title = 'taken'</script> <img src=x onerror=alert(1)>"
LAST = ".answered:last-child"
FOLDER = Path(page_files.__file__).parent / "page"
IS_DONE = f"document.querySelector('{LAST} .figures')"


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    with browsing(tmp_path) as found:
        yield found
        assert found.errors == []


def ask(tab: Tab, text: str) -> None:
    tab.type(text)
    tab.press("Enter")


def test_the_page_is_small_and_knows_nothing_of_elsewhere():
    files = [path for path in FOLDER.iterdir() if path.is_file()]
    assert {path.suffix for path in files} == {".html", ".css", ".js", ".svg"}
    assert sum(path.stat().st_size for path in files) < 100_000
    for path in files:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.|innerHTML|outerHTML|insertAdjacent|document\.write|eval|style=", text), path


def test_a_browser_is_told_to_run_nothing_else(front: Served):
    index = front.ask("GET", "/")
    names = re.findall(r'(?:src|href)="(/[^"]+)"', index[1])
    assert len(names) == 4
    for status, _, headers in (index, *(front.ask("GET", name) for name in names)):
        assert (status, headers["x-content-type-options"]) == (200, "nosniff")
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    for name in ("..%2fpage.py", "__init__.py", "nothing.js", ".", "index.html%00"):
        assert front.ask("GET", f"/page/{name}")[0] == 404


def test_page_and_numbers_need_a_key():
    with served(keys=[KEY]) as front:
        for path in ("/", "/page/chat.js", "/stats"):
            status, _, headers = front.ask("GET", path)
            assert (status, headers["www-authenticate"].partition(" ")[0]) == (401, "Basic")


@needs_browser
def test_what_a_model_writes_is_text(tab: Tab):
    ids = tokenizer()(HTML)["input_ids"]
    with served(ScriptedEngine(lambda _prompt, _choice: ids)) as front:
        tab.open(front.url)
        tab.type("first line")
        tab.press("Enter", has_shift=True)
        ask(tab, "second line")
        tab.wait(IS_DONE)
        assert tab.text(".asked > .text") == "first line\nsecond line"
        assert tab.text(f"{LAST} > .text") == HTML
        assert f"{len(ids)} tokens" in tab.text(f"{LAST} .figures")
        assert tab.value("document.title") == "demo"
        # The next turn has the answer before it.
        ask(tab, "and?")
        tab.wait(f"document.querySelectorAll('.turn').length === 4 && {IS_DONE}")
        prompts = [tokenizer().decode(one) for one, *_ in front.engine.submitted]
        assert prompts[-1].index("second line") < prompts[-1].index(HTML) < prompts[-1].index("and?")


@needs_browser
def test_an_answer_can_be_stopped_and_an_error_is_said(tab: Tab):
    with served(ScriptedEngine(step_s=0.02)) as front:
        tab.open(front.url)
        ask(tab, "go on and on")
        tab.wait(f"document.querySelector('{LAST} > .text')?.textContent.length > 5")
        tab.press("Escape")
        tab.wait(IS_DONE)
        assert "stopped" in tab.text(f"{LAST} .figures")
        wait_for(lambda: front.engine.cancelled and not front.engine.open)
        front.engine.refusal = QueueFull("9 requests wait and at most 9 may", retry_after_s=7.4)
        ask(tab, "again")
        tab.wait("document.querySelector('[role=alert]')")
        assert "9 requests wait and at most 9 may (try again in 8 s)" in tab.text("[role=alert]")
        # Nothing that was typed is lost.
        assert tab.value("document.getElementById('prompt').value") == "again"
        tab.errors.remove("Failed to load resource: the server responded with a status of 429 (Too Many Requests)")


@needs_browser
def test_a_dead_worker_and_its_rates_are_seen(tab: Tab):
    engine = ScriptedEngine()
    engine.workers = {"w0": WORKER, 'w1"<i>': WORKER}
    with served(engine) as front:
        tab.open(front.url)
        tab.wait(
            "document.querySelectorAll('[data-state=ready]').length === 2 && document.querySelector('#state[data-is=ready]')"
        )
        engine.workers = {
            "w0": {**WORKER, "rows": WORKER["rows"] + 1_000_000},
            'w1"<i>': {**WORKER, "state": "lost", "reason": "signal 9"},
        }
        engine.unready = "worker w1 is lost"
        front.post("/v1/completions", {"prompt": "def", "max_tokens": 1})
        tab.wait("document.querySelector('[data-state=lost]')")
        assert tab.text("[data-state=lost]").startswith('w1"<i>lostsignal 9')
        assert re.match(r"w0[\d,]{6,} rows/s", tab.text("[data-state=ready]"))
        assert tab.text("#why") == "worker w1 is lost"
        assert tab.text("#state") == "a part is away"
        assert "lost" in tab.value("document.getElementById('picture').getAttribute('aria-label')")
        assert tab.text("#blocks") == "16 of 64"
        engine.is_up = False
        tab.wait(
            "document.querySelector('#machine.stale') && document.getElementById('why').textContent.includes('last numbers')"
        )


@needs_browser
def test_a_key_is_asked_for_once(tab: Tab):
    with served(keys=[KEY]) as front:
        tab.password = KEY
        tab.open(front.url)
        tab.wait("document.querySelector('#state[data-is=ready]')")
        ask(tab, "hello")
        tab.wait(IS_DONE)
        assert tab.num_challenges == 1


@needs_browser
def test_thoughts_are_folded_and_letters_that_were_cut_are_whole(tab: Tab, front: Served):
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""}, {"reasoning_content": "hm… "}, {"reasoning_content": "<i>ü</i>"},
        {"content": "né"},
    ]  # fmt: skip
    listed = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    listed += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
    stream = (
        ": waiting\n\n" + "".join(f"data: {json.dumps(one, ensure_ascii=False)}\n\n" for one in listed) + "data: [DONE]\n\n"
    )
    tab.open(front.url)
    tab.value(f"""(() => {{
        const bytes = new TextEncoder().encode({json.dumps(stream)}), given = window.fetch;
        window.fetch = async (url, more) => url === "/stats" ? given(url, more) : new Response(new ReadableStream({{
            start(to) {{ for (const one of bytes) to.enqueue(new Uint8Array([one])); to.close(); }} }}));
    }})()""")
    ask(tab, "think")
    tab.wait(IS_DONE)
    assert tab.text(f"{LAST} > .text") == "né"
    assert tab.text(f"{LAST} details.thought .text") == "hm… <i>ü</i>"
    assert tab.value(f"document.querySelector('{LAST} details.thought').open") is False


@needs_browser
def test_everything_is_reached_by_keys_at_360_pixels_in_the_dark(tab: Tab, front: Served):
    tab.open(front.url)
    tab.wait("document.querySelector('#state[data-is=ready]')")
    light = tab.value("getComputedStyle(document.body).backgroundColor")
    tab.do("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True)
    tab.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    tab.open(front.url)
    tab.wait("document.querySelector('#state[data-is=ready]')")
    assert tab.value("getComputedStyle(document.body).backgroundColor") != light
    tab.value("document.querySelectorAll('details').forEach((one) => one.open = true)")
    assert tab.value("document.documentElement.scrollWidth") <= 360
    reached = []
    for _ in range(12):
        tab.press("Tab")
        reached.append(tab.value("document.activeElement.id || document.activeElement.tagName"))
    assert {"system", "temperature", "max-tokens", "send", "new", "log", "prompt", "SUMMARY"} <= set(reached)
    unnamed = """[...document.querySelectorAll('input, textarea, button')].filter((one) =>
        !(one.labels?.length || one.textContent.trim())).map((one) => one.id)"""
    assert tab.value(unnamed) == []


@needs_browser
@pytest.mark.transformers
def test_a_real_worker_that_is_killed_is_seen(tab: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tests.server import test_serve

    two = "  - {name: w0, backend: cpu, address: loopback}\n  - {name: w1, backend: cpu}\n"
    given = f"version: 1\nhost: {{threads: 1}}\nfailure: {{restart: off}}\nengine: {{kv_memory: 16MiB}}\nworkers:\n{two}"
    monkeypatch.setattr(test_serve, "TOPOLOGY", given)
    with test_serve.serving(tmp_path, "--request-log", "off") as (process, url):
        tab.open(url)
        tab.wait("document.querySelectorAll('[data-state=ready]').length === 2")
        ask(tab, "Return a list of")
        tab.wait(IS_DONE)
        assert re.search(r"\d+ tokens", tab.text(f"{LAST} .figures"))
        (worker,) = [pid for pid in children(process.pid) if b"worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(worker, signal.SIGKILL)
        tab.wait("document.querySelector('[data-worker=w1]:not([data-state=ready])')")
        assert tab.value("document.querySelector('[data-worker=w0]').dataset.state") == "ready"


def children(pid: int) -> list[int]:
    return [int(one) for path in Path(f"/proc/{pid}/task").iterdir() for one in (path / "children").read_text().split()]
