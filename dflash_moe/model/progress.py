"""Shows the progress bars of transformers on a terminal, and keeps them silent elsewhere.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_progress() -> Iterator[None]:
    """Keeps transformers from drawing progress bars within the block, unless stderr is a
    terminal.
    """
    from transformers.utils import logging

    is_quiet = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if is_quiet:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_quiet:
            logging.enable_progress_bar()
