"""A worker that nobody can take over any more is ended: its caller gave up the wait, by a time-out
or by Ctrl-C, or was interrupted before it had what was returned.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_moe.config import NO_CACHE, CacheSettings
from dflash_moe.errors import WorkerTimeout
from dflash_moe.holders import launcher
from dflash_moe.holders.launcher import Launcher, StartedWorker

SOON_S = 60.0
spawn = launcher._spawn


def begun(monkeypatch: pytest.MonkeyPatch, before: Callable[[], None]) -> list[int]:
    """Has `before` called before a worker is begun; collects their pids."""
    pids: list[int] = []

    def spawn_then(name: str, model: Path, cache: CacheSettings) -> StartedWorker:
        before()
        started = spawn(name, model, cache)
        pids.append(started.process.pid)
        return started

    monkeypatch.setattr(launcher, "_spawn", spawn_then)
    return pids


def is_reaped(pids: list[int]) -> bool:
    return bool(pids) and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def wait_for(claim: Callable[[], bool]) -> bool:
    until = time.monotonic() + SOON_S
    while not claim() and time.monotonic() < until:
        time.sleep(0.01)
    return claim()


def test_ctrl_c_while_a_worker_is_begun_leaves_neither_process_nor_zombie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked, may_begin = threading.Event(), threading.Event()

    def hold_up() -> None:
        is_asked.set()
        may_begin.wait(SOON_S)

    def interrupt(main: int) -> None:
        # The caller has ordered the worker and waits for it.
        if is_asked.wait(SOON_S) and wait_for(lambda: sys._current_frames()[main].f_code.co_name == "wait"):
            signal.pthread_kill(main, signal.SIGINT)

    pids = begun(monkeypatch, hold_up)
    # A test of workers in this process may have left Ctrl-C to their host.
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main is not None
    one = Launcher()
    threading.Thread(target=interrupt, args=(main,)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            one.start_worker("w0", tmp_path)
    finally:
        signal.signal(signal.SIGINT, former)
    may_begin.set()
    assert wait_for(lambda: is_reaped(pids)), pids
    one.close()


def test_a_worker_that_came_too_late_for_its_caller_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_begin = threading.Event()
    pids = begun(monkeypatch, lambda: bool(may_begin.wait(SOON_S)))
    monkeypatch.setattr(launcher, "START_S", 0.05)
    one = Launcher()
    with pytest.raises(WorkerTimeout, match="could not be started within"):
        one.start_worker("w0", tmp_path)
    may_begin.set()
    assert wait_for(lambda: is_reaped(pids)), pids
    one.close()


def test_what_an_interrupted_caller_never_took_ends_with_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = begun(monkeypatch, lambda: None)
    one = Launcher()
    for name in ("w0", "w1"):
        one.start_worker(name, tmp_path)  # what it returns is lost
    one.close()
    assert len(pids) == 2
    assert is_reaped(pids)


@pytest.mark.parametrize("cache", [NO_CACHE, CacheSettings(), CacheSettings(Path("/var/kept"), max_bytes=1 << 40, panels="on")])
def test_a_worker_is_told_what_its_host_keeps_on_disk(tmp_path: Path, cache: CacheSettings) -> None:
    one = Launcher()
    started = one.start_worker("w0", tmp_path, cache)
    words = started.process.args
    started.close(seconds=0.0)
    one.close()
    assert isinstance(words, list)
    options = words[words.index("--name") :]
    assert CacheSettings.from_options(dict(zip(options[::2], options[1::2], strict=True))) == cache
