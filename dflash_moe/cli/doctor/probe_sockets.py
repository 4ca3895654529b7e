"""Finds what `doctor` tells of stream sockets and waiting: the buffers that are asked for and
granted, the bounds of the system, and every timeout.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from dflash_moe.config import SETTINGS, Settings, format_bytes

_SYSCTL = Path("/proc/sys/net")
FAMILIES = {"unix": socket.AF_UNIX, "tcp": socket.AF_INET}
TIMEOUTS = ("call_timeout_s", "start_timeout_s", "stall_timeout_s")


def probe_sockets(settings: Settings, sysctl: Path = _SYSCTL) -> dict[str, Any]:
    """Returns `asked_bytes`, where None is the system's own choice, what each family grants of it,
    and the bounds of the system, all in bytes.

    `max_bytes` are net.core.wmem_max and rmem_max, which bound what may be asked for. `tcp_bytes`
    are the least, default and largest size between which TCP tunes itself where nothing is asked.
    """
    asked = settings.socket_buffer_bytes
    return {
        "asked_bytes": asked,
        "granted_bytes": {name: _granted(family, asked) for name, family in FAMILIES.items()},
        "max_bytes": {"send": _numbers(sysctl / "core/wmem_max"), "receive": _numbers(sysctl / "core/rmem_max")},
        "tcp_bytes": {"send": _numbers(sysctl / "ipv4/tcp_wmem"), "receive": _numbers(sysctl / "ipv4/tcp_rmem")},
    }


def probe_timeouts(settings: Settings) -> dict[str, dict[str, Any]]:
    """Returns every `ipc.*_timeout_s` with its value in seconds and its meaning."""
    helps = {setting.name: setting.help for setting in SETTINGS}
    return {f"ipc.{name}": {"seconds": getattr(settings, name), "meaning": helps[name]} for name in TIMEOUTS}


def socket_problems(found: dict[str, Any]) -> list[str]:
    """Returns a sentence where the system grants less than was asked for."""
    asked = found["asked_bytes"]
    problems = []
    for name, granted in found["granted_bytes"].items():
        least = min((size for size in granted.values() if size is not None), default=None)
        if asked is not None and least is not None and least < asked:
            problems.append(
                f"ipc.socket_buffer_bytes asks for {format_bytes(asked)}, {name} sockets get {format_bytes(least)}: raise "
                "net.core.wmem_max and net.core.rmem_max with sysctl, or leave the setting out and let the system tune"
            )
    return problems


def socket_lines(sockets: dict[str, Any], timeouts: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the lines of the report in text."""
    asked = sockets["asked_bytes"]
    shown = "the system's own" if asked is None else f"{format_bytes(asked)} asked"
    granted = ", ".join(
        f"{name} {_size(sizes['send'])} out {_size(sizes['receive'])} in" for name, sizes in sockets["granted_bytes"].items()
    )
    bounds = ", ".join(f"{way} {_size(_last(sizes))}" for way, sizes in sockets["max_bytes"].items())
    tuned = ", ".join(f"{way} {_size(_last(sizes))}" for way, sizes in sockets["tcp_bytes"].items())
    return [
        f"sockets    buffers (ipc.socket_buffer_bytes): {shown}; granted: {granted}; at most {bounds}; TCP tunes itself up to "
        f"{tuned}",
        "timeouts   " + ", ".join(f"{name} {entry['seconds']:g} s" for name, entry in timeouts.items()),
    ]


def _granted(family: int, asked: int | None) -> dict[str, int | None]:
    """Returns what a new socket of this family has after asking. Linux reports twice the usable
    size.
    """
    found: dict[str, int | None] = {"send": None, "receive": None}
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            for way, option in (("send", socket.SO_SNDBUF), ("receive", socket.SO_RCVBUF)):
                if asked is not None:
                    probe.setsockopt(socket.SOL_SOCKET, option, asked)
                size = probe.getsockopt(socket.SOL_SOCKET, option)
                found[way] = size // 2 if asked is not None else size
    except OSError:
        # A machine without this family has no such sockets; the line `transports` of doctor says
        # so.
        pass
    return found


def _numbers(path: Path) -> list[int]:
    try:
        return [int(part) for part in path.read_text(encoding="ascii").split()]
    except (OSError, ValueError):
        return []


def _last(sizes: list[int]) -> int | None:
    return sizes[-1] if sizes else None


def _size(size: int | None) -> str:
    return "unknown" if size is None else format_bytes(size)
