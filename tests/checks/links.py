"""Checks that relative links in the documents lead to files that exist, and their anchors to
headings that exist.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.checks.sources import project_files

_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def find(root: Path) -> list[str]:
    """Returns a finding for every dangling relative link in a Markdown file."""
    findings = []
    for path in project_files(root, ".md"):
        text = _FENCE.sub("", path.read_text(encoding="utf-8"))
        for target in _LINK.findall(text):
            if "://" in target or target.startswith("mailto:"):
                continue
            file_part, _, anchor = target.partition("#")
            linked = (path.parent / file_part).resolve() if file_part else path
            if not linked.exists():
                findings.append(f"{path.relative_to(root)}: the link to {target} leads nowhere")
            elif anchor and linked.suffix == ".md" and anchor not in anchors_of(linked):
                findings.append(f"{path.relative_to(root)}: {target} names a heading that does not exist")
    return findings


def anchors_of(path: Path) -> set[str]:
    """Returns the anchors of the headings as the usual renderers of Markdown form them: in lower
    case, without punctuation, and with dashes for blanks.
    """
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+\s+(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-") for heading in headings}
