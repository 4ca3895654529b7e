"""Writes every figure in the documents from the recorded results, or checks that they are what it
would write.

    python -m bench.documents [--check]

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, and a figure in a sentence between
`<!-- figure: NAME -->` and `<!-- end -->`. What NAME shows, and of which results, is defined in
tables.py, kernel_tables.py and figures.py. Nothing between the marks is written by hand, and what
is of a result that is not there stays as it is. With --check a difference is told and ends with
exit status 1, as in `make check`.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.documents.markup import DOCUMENTS, findings, written

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; tell what differs")
    arguments = parser.parse_args()
    if arguments.check:
        found = findings(ROOT)
        print("\n".join(found) or "every figure is what its result gives")
        return 1 if found else 0
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        not_recorded: list[str] = []
        new = written(text, ROOT / "bench" / "results", not_recorded)
        if new != text:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {name}")
        for line in not_recorded:
            print(f"{name}: stays as it is: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
