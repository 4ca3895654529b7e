"""The layer contract of the C++ rooms: which room may include which, and what no room but
`bindings` may use.

    base <- wire, transport, compute (strangers) <- store <- worker, client (strangers) <- bindings
    compute <- plugin <- bindings

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.checks.sources import project_files

MAY_INCLUDE: dict[str, set[str]] = {
    "base": set(),
    "wire": {"base"},
    "transport": {"base"},
    "compute": {"base"},
    "store": {"base", "compute"},
    "worker": {"base", "wire", "transport", "compute", "store"},
    "client": {"base", "wire", "transport"},
    "plugin": {"base", "compute"},
    "bindings": {"base", "wire", "transport", "compute", "plugin", "store", "worker", "client"},
}
# "wire never sees a file descriptor": neither the owner type nor the system's headers for them.
FORBIDDEN_IN_WIRE = {"base/owned_fd.h", "unistd.h", "fcntl.h", "poll.h", "sys/socket.h", "sys/mman.h", "sys/eventfd.h"}
_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
# What the standard library itself throws for lack of threads or memory may be caught where it
# happens and become a Result.
_EXCEPTION = re.compile(r"\bthrow\b|\bcatch\s*\((?!const std::(?:system_error|bad_alloc)\b)")


def find(root: Path) -> list[str]:
    """Every include and every exception in `root`/csrc that the tables do not allow."""
    findings: list[str] = []
    csrc = root / "csrc"
    for path in project_files(root, ".h", ".cc", ".cu", ".cuh"):
        if csrc in path.parents:
            findings += _findings_of_file(path, csrc, root)
    return findings


def _findings_of_file(path: Path, csrc: Path, root: Path) -> list[str]:
    where = path.relative_to(root)
    room = path.relative_to(csrc).parts[0]
    if room not in MAY_INCLUDE:
        return [f"{where}: the room '{room}' is not in the table of tests/checks/includes.py; decide where it belongs"]
    findings = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = _INCLUDE.match(line)
        if match:
            findings += _findings_of_include(f"{where}:{number}", room, match[1], match[2], csrc)
        elif room != "bindings" and _EXCEPTION.search(line.split("//")[0]):
            findings.append(f"{where}:{number}: exceptions live in bindings/ only; return a Result")
    return findings


def _findings_of_include(at: str, room: str, bracket: str, target: str, csrc: Path) -> list[str]:
    if room == "wire" and target in FORBIDDEN_IN_WIRE:
        return [f"{at}: wire never sees a file descriptor, but includes {target}"]
    if bracket == "<":
        if target.startswith(("pybind11", "Python.h")) and room != "bindings":
            return [f"{at}: only bindings may include {target}"]
        return []
    other = target.split("/")[0]
    if other not in MAY_INCLUDE:
        if (csrc / target).exists():
            return []
        return [f'{at}: include "{target}" by its path from csrc/, as "room/file.h"']
    if other != room and other not in MAY_INCLUDE[room]:
        return [f"{at}: {room} must not include {target}; the arrows are in tests/checks/includes.py"]
    return []
