"""Whoever runs a worker on another machine is told what encryption leaves open, and what its
absence means, in each place where they read how to.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("document", ["README.md", "docs/protocol.md", "docs/security.md", "docs/howto/by_hand_worker.md"])
def test_readers_are_told_what_somebody_on_the_path_can_do(document: str) -> None:
    text = " ".join((ROOT / document).read_text(encoding="utf-8").replace("**", "").lower().split())
    assert "on the path" in text
    assert "encrypt" in text
    assert "unnoticed" in text


def test_the_protocol_says_who_is_believed() -> None:
    text = " ".join((ROOT / "docs/protocol.md").read_text(encoding="utf-8").split())
    assert "A worker that holds the key and frames correctly is believed" in text
    assert "A host that holds the key can load any tensor of the worker's checkpoint as an expert" in text
    assert "It cannot name files" in text
