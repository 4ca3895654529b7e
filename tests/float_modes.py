"""Floating-point modes that a program may have set in the thread which calls us.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# What C calls FE_UPWARD. The default, to the nearest, is 0 everywhere.
_UPWARD = 0x800 if platform.machine() == "x86_64" else 0x400000
FOREIGN_MODES = ("flush-to-zero", "upward")


@contextmanager
def float_mode(name: str) -> Iterator[None]:
    """Opens a block in which the calling thread, and threads that it starts, have one of
    FOREIGN_MODES.
    """
    if name == "flush-to-zero":
        assert torch.set_flush_denormal(True)
        try:
            yield
        finally:
            torch.set_flush_denormal(False)
        return
    assert name == "upward"
    libm = ctypes.CDLL("libm.so.6")
    assert libm.fesetround(_UPWARD) == 0
    try:
        yield
    finally:
        libm.fesetround(0)
