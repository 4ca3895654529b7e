"""Signals that ask a process to end arrive wherever the main thread is, also in a callback of the
garbage collector, which drops what a handler raises.

Each case runs in a process of its own, because handlers belong to the process.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import subprocess
import sys

END_S = 60

# `dropping` takes a signal while the callback of a weak reference runs, and returns after it.
DROPPING = """
import os, signal, sys, threading, time, weakref
from dflash_moe.telemetry.stop_signals import exit_by_signals, told_by_signals

class Thing:
    pass

def dropping(number):
    def callback(_reference):
        os.kill(os.getpid(), number)
        for _ in range(1000):
            pass
    thing = Thing()
    reference = weakref.ref(thing, callback)
    del thing
    return reference
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", DROPPING + code], capture_output=True, text=True, timeout=END_S, check=False)


def test_a_signal_in_a_callback_is_told_once_and_ends_nothing_by_itself() -> None:
    ended = run(
        """
told = threading.Event()
with told_by_signals(told.set) as stopped:
    dropping(signal.SIGTERM)
    assert told.wait(30)
    assert stopped.is_set()
print("went on")
"""
    )
    assert (ended.returncode, ended.stdout) == (0, "went on\n"), ended.stderr


def test_after_the_block_a_signal_does_what_it_did_before() -> None:
    ended = run(
        """
with told_by_signals(lambda: None):
    pass
assert signal.set_wakeup_fd(-1) == -1
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(30)
"""
    )
    assert ended.returncode == -15, ended.stderr


def test_a_raise_that_a_callback_drops_is_repeated() -> None:
    ended = run(
        """
with exit_by_signals([signal.SIGTERM]):
    try:
        dropping(signal.SIGTERM)
        time.sleep(30)
        print("lost")
    finally:
        print("cleaned up")
"""
    )
    assert (ended.returncode, ended.stdout) == (143, "cleaned up\n"), ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_raise_that_somebody_catches_ends_the_process_with_the_block() -> None:
    ended = run(
        """
with exit_by_signals([signal.SIGHUP]):
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(30)
    except BaseException:
        pass
    print("went on")
print("lost")
"""
    )
    assert (ended.returncode, ended.stdout) == (129, "went on\n"), ended.stderr


def test_a_second_signal_does_not_disturb_what_the_first_one_ends() -> None:
    ended = run(
        """
with exit_by_signals([signal.SIGTERM]):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):
            pass
        print("cleaned up")
"""
    )
    assert (ended.returncode, ended.stdout) == (143, "cleaned up\n"), ended.stderr
