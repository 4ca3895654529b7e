"""Checks the layer contract of the C++ rooms: which room may include which, and what no room but
`bindings` may use.

    base <- wire, transport, compute (strangers) <- store <- worker, client (strangers) <- bindings
    compute <- plugin <- bindings; transport, plugin <- measure (an extension of its own)
    worker, client <- simulation (an extension of its own)
    base, wire, transport, client <- c_interface (what a program without Python links)
    wire, transport/ring, cards <- device_exchange <- cards/entry (the plug-ins, no core)
    client <- c_interface <- ggml_plugin (a plug-in of ggml that knows the header dflash_moe.h only)

Inside transport, secure is below the other folders, and stream and fabric build on it; the room's
own files join them. And inside compute: formats <- numerics <- experts <- operators <- reference <-
cpu.
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
    "c_interface": {"base", "wire", "transport", "client"},
    "ggml_plugin": {"c_interface"},
    "plugin": {"base", "compute"},
    "cards": {"base", "compute"},
    "measure": {"base", "transport", "compute", "plugin", "cards"},
    "simulation": {"base", "wire", "transport", "compute", "store", "worker", "client"},
    "bindings": {"base", "wire", "transport", "compute", "plugin", "cards", "store", "worker", "client"},
}
# What one folder of a room may include beyond its room: the device's side of the exchange knows the
# wire, and the sources that become plug-ins know the tables between a plug-in and the core.
FOLDER_MAY_INCLUDE: dict[str, set[str]] = {"cards/device_exchange": {"wire", "transport"}, "cards/entry": {"plugin"}}
# Of these rooms only a part: a device has rings and kernels, and neither sockets nor the
# processor's experts. Of cards the core reads the formats that they take. A program of others gets
# to the client by its C interface alone.
ONLY_PARTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("cards", "transport"): ("transport/ring/",),
    ("cards", "compute"): ("compute/formats/", "compute/experts/", "compute/numerics.h", "compute/yielding_progress.h"),
    ("bindings", "cards"): ("cards/record_layout.h",),
    ("ggml_plugin", "c_interface"): ("c_interface/dflash_moe.h",),
}
# Inner walls: folder of a room -> folders of that room which it may include. "" is the room's own
# files, which say what numerics classes are. An operator beside `experts` knows what that knows.
MAY_INCLUDE_INSIDE: dict[str, dict[str, set[str]]] = {
    "compute": {
        "formats": set(),
        "": {"formats"},
        "experts": {"", "formats"},
        "operators": {"", "formats", "experts"},
        "reference": {"", "formats", "experts", "operators"},
        "cpu": {"", "formats", "experts", "operators", "reference"},
    },
    # "" is the host's side of a card, whatever its runtime; `sim` is that of a simulated card.
    "cards": {
        "": {"sim"},
        "kernels": {"", "sim"},
        "sim": {"", "kernels"},
        "module": {""},
        "cuda": {"", "module"},
        "hip": {"", "module"},
        "device_exchange": {"", "kernels", "sim"},
        "entry": {"", "kernels", "sim", "module", "cuda", "hip", "device_exchange"},
    },
    "transport": {
        "secure": set(),
        "": {"secure", "shared", "stream", "fabric"},
        "ring": {""},
        "loopback": {"", "ring"},
        "shared": {"", "ring"},
        "stream": {"", "ring", "secure"},
        "fabric": {"", "ring", "secure"},
        "faulty": {""},
    },
}
# The room wire never sees a file descriptor: neither the type that owns one nor the system's
# headers.
FORBIDDEN_IN_WIRE = {"base/owned_fd.h", "unistd.h", "fcntl.h", "poll.h", "sys/socket.h", "sys/mman.h", "sys/eventfd.h"}
_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
# What the standard library itself throws for lack of threads or memory may be caught where it
# happens and become a Result.
_EXCEPTION = re.compile(r"\bthrow\b|\bcatch\s*\((?!const std::(?:system_error|bad_alloc)\b)")
# The C functions catch everything, because nothing may leave them; they throw nothing either.
_CATCH_ALL = re.compile(r"\bcatch\s*\(\.\.\.\)")


def find(root: Path) -> list[str]:
    """Returns a finding for every include and exception in `root`/csrc that the tables do not
    allow.
    """
    findings: list[str] = []
    csrc = root / "csrc"
    for path in project_files(root, ".h", ".cc", ".cu", ".cuh"):
        if csrc in path.parents:
            findings += _findings_of_file(path, csrc, root)
    return findings


def _findings_of_file(path: Path, csrc: Path, root: Path) -> list[str]:
    where = path.relative_to(root)
    room = path.relative_to(csrc).parts[0]
    # Bindings are in csrc/bindings, csrc/measure/bindings and csrc/simulation/bindings.
    is_binding = "bindings" in path.relative_to(csrc).parts
    if room not in MAY_INCLUDE:
        return [f"{where}: the room '{room}' is not in the table of tests/checks/includes.py; decide where it belongs"]
    findings = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = _INCLUDE.match(line)
        if match:
            findings += _findings_of_include(
                f"{where}:{number}", path.relative_to(csrc), match[1], match[2], csrc, is_binding=is_binding
            )
            findings += _findings_inside(f"{where}:{number}", path.relative_to(csrc), match[2])
        elif not is_binding and _EXCEPTION.search(_code_of(line, room)):
            findings.append(f"{where}:{number}: exceptions live in bindings/ only; return a Result")
    return findings


def _code_of(line: str, room: str) -> str:
    """Returns a line without its comment, and in c_interface without the catch that it may have."""
    code = line.split("//")[0]
    return _CATCH_ALL.sub("", code) if room == "c_interface" else code


def _findings_inside(at: str, source: Path, target: str) -> list[str]:
    walls = MAY_INCLUDE_INSIDE.get(source.parts[0])
    if walls is None or not target.startswith(f"{source.parts[0]}/"):
        return []
    own, other = _folder(source), _folder(Path(target))
    if own not in walls:
        return [
            f"{at}: the folder {source.parts[0]}/{own} is not in the table of tests/checks/includes.py; decide where it belongs"
        ]
    if other != own and other not in walls[own]:
        return [f"{at}: {source.parts[0]}/{own} must not include {target}; the walls are in tests/checks/includes.py"]
    return []


def _folder(path: Path) -> str:
    """Returns the first folder inside a room, empty for the room's own files."""
    return path.parts[1] if len(path.parts) > 2 else ""


def _findings_of_include(at: str, source: Path, bracket: str, target: str, csrc: Path, *, is_binding: bool) -> list[str]:
    room = source.parts[0]
    if room == "wire" and target in FORBIDDEN_IN_WIRE:
        return [f"{at}: wire never sees a file descriptor, but includes {target}"]
    if bracket == "<":
        if target.startswith(("pybind11", "Python.h")) and not is_binding:
            return [f"{at}: only bindings may include {target}"]
        return []
    other = target.split("/")[0]
    if other not in MAY_INCLUDE:
        if (csrc / target).exists():
            return []
        return [f'{at}: include "{target}" by its path from csrc/, as "room/file.h"']
    may = MAY_INCLUDE[room] | ({"bindings"} if is_binding else set())  # conversions and exceptions, once
    may |= FOLDER_MAY_INCLUDE.get(f"{room}/{_folder(source)}", set())
    is_in_part = target.startswith(ONLY_PARTS.get((room, other), ("",)))
    if other != room and (other not in may or not is_in_part):
        return [f"{at}: {room} must not include {target}; the arrows are in tests/checks/includes.py"]
    return []
