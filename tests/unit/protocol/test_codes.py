"""One table of error codes, in C++ and in Python.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dflash_moe import _core
from dflash_moe.protocol.failures import BUSY, ERROR_CLASSES, to_error
from dflash_moe.protocol.messages import Refusal


def test_control_and_data_connections_share_their_error_codes() -> None:
    core = dict(_core.error_codes().values())
    assert {code: cls for code, cls in ERROR_CLASSES.items() if code < BUSY} == core


def test_the_workers_name_stands_once_before_its_refusal() -> None:
    for text in ("no memory", "worker w0: no memory"):
        assert str(to_error(Refusal(code=7, text=text), worker="w0")) == "worker w0: no memory"
