"""One table of error codes, in C++ and in Python.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dflash_moe import _core
from dflash_moe.errors import (
    CheckpointError,
    ConfigError,
    ProtocolError,
    UnsupportedError,
    WorkerError,
    WorkerLost,
    WorkerTimeout,
)
from dflash_moe.protocol.failures import to_error
from dflash_moe.protocol.messages import Refusal


def test_an_error_without_a_code_of_its_own_has_its_classs() -> None:
    classes = (CheckpointError, ConfigError, ProtocolError, UnsupportedError, WorkerError, WorkerLost, WorkerTimeout)
    core = _core.error_codes()
    assert {core[str(cls("what happened").code)][1]: cls for cls in classes} == {cls: cls for cls in classes}
    assert WorkerError("what happened", code="range").code == "range"


def test_a_refusal_names_the_worker_in_a_field() -> None:
    error = to_error(Refusal(code=7, text="no memory"), worker="w0")
    assert (error.worker, error.code) == ("w0", "worker_failed")


def test_the_workers_name_stands_once_before_its_refusal() -> None:
    for text in ("no memory", "worker w0: no memory"):
        assert str(to_error(Refusal(code=7, text=text), worker="w0")) == "worker w0: no memory"
