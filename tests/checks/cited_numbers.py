"""Numbers in docs/benchmarks.md and README.md name the recorded result they come from, and that
file exists.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from pathlib import Path

# A measured figure: a number with a unit of speed or time, or a ratio.
_FIGURE = re.compile(r"\b\d[\d,.]*\s?(?:us|µs|ms|GB/s|GiB/s|MB/s|GFLOPS|tokens/s|tok/s|x faster|times faster)\b")
_JSON = re.compile(r"bench/results/[\w./-]+\.json")
DOCUMENTS = ("docs/benchmarks.md", "README.md")


def find(root: Path) -> list[str]:
    """Cited JSON files that do not exist, and sections with measured figures that cite none."""
    findings = []
    for name in DOCUMENTS:
        path = root / name
        if not path.exists():
            continue
        for title, body in sections_of(path.read_text(encoding="utf-8")):
            cited = _JSON.findall(body)
            findings += [f"{name}: {json} does not exist" for json in cited if not (root / json).exists()]
            figure = _FIGURE.search(body)
            if figure and not cited:
                findings.append(f"{name}: section '{title}' states '{figure[0]}' without naming its bench/results/*.json")
    return findings


def sections_of(text: str) -> list[tuple[str, str]]:
    """(heading, text up to the next heading of any level), code blocks included."""
    parts = re.split(r"^#+\s+(.*)$", text, flags=re.MULTILINE)
    return [("(top)", parts[0]), *zip(parts[1::2], parts[2::2], strict=True)]
