"""The store that the tests of this folder open.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_moe.store.panel_store import PanelStore
from tests.unit.store.stored_panels import opened


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PanelStore]:
    found = opened(tmp_path)
    yield found
    found.close()
