"""What `doctor` tells of the folder in which packed experts are kept: where it is, what it has and
has room for, and how fast this machine reads what lies there.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any

from dflash_moe.config import Settings, format_bytes
from dflash_moe.errors import DflashError
from dflash_moe.store.folder import PANELS, CacheFolder, default_path
from dflash_moe.store.machine_panels import panel_room

# What is read at most, in pieces of the size of an expert: a fraction of a second on most disks.
READ_BYTES = 256 << 20
PIECE_BYTES = 2 << 20


def probe_cache(settings: Settings) -> dict[str, Any]:
    """Returns `path`, None where nothing is kept; `panels`, the setting; `kept_bytes` of panels
    that are there and `room_bytes` for all, those included; `bytes_per_s` that a thread reads of
    them past the page cache, None where there are none or it cannot; and `problem`, why the folder
    cannot be used, empty where it can or is not there yet.
    """
    cache = settings.cache
    found: dict[str, Any] = {"path": None, "panels": cache.panels, "kept_bytes": 0, "room_bytes": 0, "bytes_per_s": None}
    found |= {"problem": ""}
    if cache.is_off:
        return found
    path = cache.path or default_path()
    found |= {"path": str(path), "room_bytes": panel_room(cache)}
    if not path.is_dir():
        return found
    try:
        folder = CacheFolder.open(path, allow_network=cache.panels == "on")
        try:
            sizes = folder.sizes(PANELS)
        finally:
            folder.close()
    except DflashError as error:
        return found | {"problem": str(error)}
    largest = max(sizes, key=sizes.__getitem__, default=None)
    return found | {"kept_bytes": sum(sizes.values()), "bytes_per_s": largest and _read_speed(path / PANELS / largest)}


def cache_line(found: dict[str, Any]) -> str:
    """Returns the line of the report."""
    if found["path"] is None:
        return "cache      nothing is kept on disk (cache.path: none)"
    if found["problem"]:
        return f"cache      {found['path']} cannot be used: {found['problem']}"
    kept, room = format_bytes(found["kept_bytes"]), format_bytes(found["room_bytes"])
    line = f"cache      {found['path']}: {kept} of packed experts, room for {room} (panels: {found['panels']})"
    if found["bytes_per_s"]:
        line += f"; a thread reads {format_bytes(round(found['bytes_per_s']))}/s past the page cache"
    return line


def _read_speed(path: Path) -> float | None:
    """Returns the bytes per second of one thread that reads a file, None where the file system has
    no reads past the page cache, or the file went away.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with mmap.mmap(-1, PIECE_BYTES) as memory, memoryview(memory) as view:
            done, began = 0, time.perf_counter()
            while done < READ_BYTES and (count := os.preadv(descriptor, [view], done)):
                done += count
            return done / (time.perf_counter() - began)
    except OSError:
        return None
    finally:
        os.close(descriptor)
