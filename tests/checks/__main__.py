"""Runs every contract check and prints what was found; exit status 1 on any finding.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.checks import (
    citations,
    comment_widths,
    constructs,
    cycles,
    error_catalogue,
    file_heads,
    generated_figures,
    glossary,
    includes,
    layers,
    links,
    message_tables,
    numerics_names,
    protocol_tables,
    result_trees,
    room_picture,
    stub_parity,
    stubs,
    waits,
    wheel_versions,
)

ROOT = Path(__file__).resolve().parents[2]
CHECKS = (
    layers,
    includes,
    cycles,
    constructs,
    waits,
    file_heads,
    comment_widths,
    protocol_tables,
    message_tables,
    numerics_names,
    error_catalogue,
    links,
    citations,
    glossary,
    room_picture,
    generated_figures,
    result_trees,
    stub_parity,
    stubs,
    wheel_versions,
)


def main() -> int:
    num_findings = 0
    for check in CHECKS:
        name = check.__name__.rpartition(".")[2]
        findings = check.find(ROOT)
        num_findings += len(findings)
        print(f"{name}: {'ok' if not findings else f'{len(findings)} findings'}")
        for finding in findings:
            print(f"  {finding}")
    print(result_trees.report(ROOT))
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())
