"""A device that cannot be opened.

SPDX-License-Identifier: Apache-2.0
"""

import pytest

from dflash_moe import _core
from dflash_moe.errors import UnsupportedError
from dflash_moe.protocol.devices import DeviceChoice, open_device


def test_a_reason_against_a_device_keeps_its_fields_and_gets_the_workers_name(monkeypatch):
    def refuse(**_choice):
        raise UnsupportedError("the card is too old", code="unsupported_device", layer=3)

    monkeypatch.setattr(_core, "BackendDevice", refuse)
    with pytest.raises(UnsupportedError, match="^worker red: the card is too old$") as caught:
        open_device(DeviceChoice("cuda", 0), threads=1, name="red")
    error = caught.value
    assert (error.code, error.worker, error.layer) == ("unsupported_device", "red", 3)


def test_the_processor_is_no_device():
    assert open_device(DeviceChoice(), threads=1, name="red") is None
