"""Signals that ask this process to end, taken so that none is lost.

Python runs a handler between any two instructions of the main thread, also those of a callback of
the garbage collector or of a weak reference. What a handler raises there is dropped, and the
process would go on as if nobody had asked. So a thread is told here instead; and where something
has to be raised because the main thread may be anywhere, a raise that was dropped is repeated.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

# A signal is one byte of the pipe.
_READ_BYTES = 64
# A handler that ran in a callback of the garbage collector has raised in vain, since Python drops
# what is raised there. The signal is sent again after this time; most callbacks have ended by then.
REPEAT_S = 0.01


@contextmanager
def told_by_signals(on_stop: Callable[[], None]) -> Iterator[threading.Event]:
    """Within the block SIGINT and SIGTERM end nothing by themselves: each has `on_stop` called in a
    thread, after the event that this yields was set. Only the main thread may enter.
    """
    stopped = threading.Event()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def watch() -> None:
        while os.read(read_end, _READ_BYTES):
            stopped.set()
            on_stop()

    watching = threading.Thread(target=watch, name="signals", daemon=True)
    watching.start()
    # The interpreter writes to the pipe from the signal itself, whatever the main thread is doing.
    # Only signals that have a handler are written, and these are the only ones of the process.
    former_end = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    former = {number: signal.signal(number, _note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(former_end)
        os.close(write_end)
        watching.join()
        os.close(read_end)


@contextmanager
def exit_by_signals(numbers: Sequence[int]) -> Iterator[None]:
    """Within the block the first of the signals `numbers` raises SystemExit(128 + number) in the
    main thread, so that `with` blocks end what they have begun. Later ones do not disturb that.
    Only the main thread may enter.
    """
    asked: list[int] = []
    # Set while nothing has to be repeated: the raise is on its way up, or the block is over.
    is_raised = threading.Event()

    def leave(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if not is_raised.is_set() and not _is_below(frame, note_dropped.__code__):
            is_raised.set()
            raise SystemExit(128 + asked[0])

    def note_dropped(dropped: Any) -> None:
        if asked and isinstance(dropped.exc_value, SystemExit):
            is_raised.clear()
            threading.Thread(target=repeat, daemon=True).start()
        else:
            former_hook(dropped)

    def repeat() -> None:
        while not is_raised.wait(REPEAT_S):
            os.kill(os.getpid(), asked[0])

    former_hook, sys.unraisablehook = sys.unraisablehook, note_dropped
    former = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        is_raised.set()
        for number, handler in former.items():
            signal.signal(number, handler)
        sys.unraisablehook = former_hook
    if asked:
        # Somebody has caught everything, or the block was over first.
        raise SystemExit(128 + asked[0])


def _is_below(frame: FrameType | None, code: CodeType) -> bool:
    """Whether a frame belongs to a call of the function with this code."""
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _note(_number: int, _frame: object) -> None:
    """Does nothing. A signal without a handler in Python would not be written to the pipe."""
