"""Progress bars of transformers stay silent where the command line says how far a load is.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import io
import sys

import pytest

pytest.importorskip("transformers")

from transformers.utils import logging

from dflash_moe.model.progress import quiet_progress


@pytest.mark.parametrize("is_terminal", [True, False])
def test_no_bar_is_drawn_and_afterwards_all_is_as_before(monkeypatch, is_terminal):
    stderr = io.StringIO()
    stderr.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stderr", stderr)
    before = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        with quiet_progress():
            list(logging.tqdm(range(3), desc="Loading weights"))
            assert not logging.is_progress_bar_enabled()
        assert logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        with quiet_progress():
            pass
        assert not logging.is_progress_bar_enabled()
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()
    assert stderr.getvalue() == ""
