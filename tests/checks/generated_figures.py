"""Figures of recorded results in the documents are those that `python -m bench.documents` writes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

from bench.documents.markup import findings


def find(root: Path) -> list[str]:
    """As `bench.documents.markup.findings`."""
    return findings(root)
