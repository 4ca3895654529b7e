"""Keeps the progress bars of transformers silent: how far a load is, the command line says in lines
of its own.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_progress() -> Iterator[None]:
    """Keeps transformers from drawing progress bars within the block."""
    from transformers.utils import logging

    is_quiet = logging.is_progress_bar_enabled()
    if is_quiet:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_quiet:
            logging.enable_progress_bar()
