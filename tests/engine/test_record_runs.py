"""The steps of `make results` that take seconds run with tiny parameters, each a test. `make
verify-all` runs every one so, as the command does, and writes the documents from what they made.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

from bench.record.__main__ import record
from bench.record.steps import STEPS, Place, Step

pytestmark = [pytest.mark.long, pytest.mark.transformers]

# These take most of the minutes of all, and the shortest of them 16 s.
SLOWEST = {
    "faults", "timeline", "audit", "earlier-commit", "link", "verify-real", "depth", "modes", "local-remote", "serving-faults",
    "serving-interference", "serving-peers", "larger",
}  # fmt: skip
# What these run is run here too: the same program by another step, or the same sweep of a family by
# a test of its own (tests/models/test_verify_families.py, tests/models/test_odd_settings.py).
TWICE = {"cores": "prefill", "experts": "experts-bf16", "parity": "", "odd-settings": ""}
OF_SECONDS = [step for step in STEPS if step.name not in SLOWEST and step.name not in TWICE]


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Where the steps of this process write, and keep the model that they share."""
    return Place(tmp_path_factory.mktemp("results"), is_quick=True)


def test_most_steps_take_seconds() -> None:
    assert {step.name for step in STEPS} >= SLOWEST | TWICE.keys()
    assert {step.name for step in OF_SECONDS} >= {other for other in TWICE.values() if other}
    assert len([step for step in OF_SECONDS if not step.lacking()]) > 20


@pytest.mark.parametrize("step", OF_SECONDS, ids=lambda step: step.name)
def test_a_step_of_seconds_runs(step: Step, place: Place) -> None:
    if lacking := step.lacking():
        pytest.skip(f"this machine lacks {lacking}")
    run = record([step], place, again=True)
    assert run.failed == {}
    assert run.took_s.keys() == {step.name}
