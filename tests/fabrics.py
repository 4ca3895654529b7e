"""What tests of the fabric need of this machine.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

from dflash_moe import _core
from dflash_moe.errors import UnsupportedError


def require_fabric() -> None:
    """Skips a test with the reason where this build or machine has no libfabric."""
    try:
        _core.fabric_providers()
    except UnsupportedError as error:
        pytest.skip(str(error))
