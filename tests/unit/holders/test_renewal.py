"""What the renewal of a data path keeps of attempts that came to nothing.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import gc
import weakref

import pytest

from dflash_moe.errors import DflashError
from dflash_moe.holders.renewal import Renewal


class _Segment:
    """Stands for what an attempt has mapped and opened."""


def test_what_a_renewal_lacked_keeps_nothing_of_the_attempt() -> None:
    renewal, made = Renewal("the settings have changed"), []

    def attempt() -> None:
        segment = _Segment()
        made.append(weakref.ref(segment))
        raise DflashError("no descriptor is left", code="system")

    try:
        attempt()
    except DflashError as error:
        renewal.lacks(error)
    gc.collect()
    assert made[0]() is None
    with pytest.raises(DflashError, match="no descriptor is left") as told:
        renewal.outcome.result(0.0)
    assert told.value.code == "system"
