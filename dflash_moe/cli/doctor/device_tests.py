"""The self-test of `doctor --selftest` for cards compares every kernel of every device that a
plug-in finds with the reference.

The owner of a card that nobody here has can prove or disprove in this way that it works. Simulated
cards count as devices.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dflash_moe import _core
from dflash_moe.cli.doctor.selftest import SelfTest
from dflash_moe.errors import DflashError


def run_device_tests(backends: Mapping[str, Mapping[str, Any]]) -> list[SelfTest]:
    """Runs the tests and returns one result for each device, numerics class and weight format.
    `backends` are those of `probes.probe_backends`.
    """
    tests: list[SelfTest] = []
    for name, finding in backends.items():
        for index, listed in enumerate(finding.get("devices", ())):
            if not listed["reason"]:
                tests += _test_device(name, index, listed["arch"])
    return tests


def _test_device(backend: str, index: int, arch: str) -> list[SelfTest]:
    label = f"{backend}:{index} {arch}".strip()
    try:
        device = _core.BackendDevice(backend=backend, device=index)
    except DflashError as error:
        return [SelfTest(label, "-", 0, 0, 0, error=str(error))]
    return list(_merged(label, device))


def _merged(label: str, device: _core.BackendDevice) -> Iterable[SelfTest]:
    """Runs the cases of a device, and joins the results of the same class and format. The first
    error ends them.
    """
    merged: dict[tuple[str, str], SelfTest] = {}
    number, num_cases = 0, 1
    while number < num_cases:
        try:
            case = device.self_test(number)
        except DflashError as error:
            merged["error", ""] = SelfTest(label, "-", number, 0, 0, error=str(error))
            break
        number, num_cases = number + 1, case["num_cases"]
        key = numerics, formats = case["kernel"].partition(" ")[0], case["formats"]
        former = merged.get(key, SelfTest(label, formats, 0, 0, 0, numerics))
        merged[key] = SelfTest(
            label, formats, former.cases + 1, former.elements + case["elements"], former.differing + case["differing"], numerics
        )
    return merged.values()
