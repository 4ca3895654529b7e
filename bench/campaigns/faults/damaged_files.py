"""Damaged and missing files: checkpoints that are cut off, changed or gone when a runtime or a
worker loads them or while it computes from them, a disk that cannot be read, and one that is full.
The error names the file, the process stays healthy, nothing half written is left, a flipped bit is
never served, and all is well once the file is.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bench.campaigns.faults import failing_disk, mapped_files
from bench.campaigns.faults.campaign import Campaign, Run, spread
from bench.campaigns.faults.damage import FILE, Found, damage, return_refused, start_refused
from bench.campaigns.faults.leftovers import belongings, left_since
from bench.campaigns.faults.load import Load, make_model, start
from dflash_moe.bench.results import BenchResult
from dflash_moe.errors import DflashError
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol.keys import write_key_file

# A disk so small is full at once, and holds a key and a result.
DISK_BYTES = 1 << 16
REFUSED_GOAL_S = 5.0
MOUNT_S = 30.0


def run(given: Run) -> None:
    """Damages files `given.size` times in each way."""
    spec = make_model(given.folder / "model")
    whole = (Path(spec.path) / FILE).read_bytes()
    before = belongings()
    found = Found()
    for _ in range(given.size):
        _at_start(given, spec, whole, found)
    _at_return(given, spec, whole, found)
    mapped_files.run(given, found)
    failing_disk.run(given, spec, found)
    if os.geteuid() == 0:
        _full_disk(given, found)
    else:
        given.event("full disk", verdict="skipped: mounting a small disk needs root")
    left = left_since(before)
    zero = {"errors without the file's name": found.unnamed, "damage accepted": found.accepted,
            "not healed": found.unhealed, "processes that ended": found.ended, "failed calls": found.failed_calls,
            "wrong results": found.wrong_results, "files left half written": found.left, **left}  # fmt: skip
    for what, value in zero.items():
        given.claim(what.replace("_", " "), value, at_most=0)
    given.goal("refused, s", max(found.refused_s), at_most=REFUSED_GOAL_S)
    given.row(
        "damaged files", found.refused_s, events=len(given.events), **spread("refused", found.refused_s, unit_ms=False),
        **spread("back", found.back_s, unit_ms=False), **left,
    )  # fmt: skip


# -- when a runtime starts -------------------------------------------------------------------------


def _at_start(given: Run, spec: ModelSpec, whole: bytes, found: Found) -> None:
    """The file is cut off or gone, or its header has changed; then it is whole again."""
    file = Path(spec.path) / FILE

    def is_named(text: str) -> bool:
        return str(spec.path) in text or FILE in text

    for way in ("truncated", "gone"):
        done = damage(given, file, whole, way)
        start_refused(given, spec, found, f"{way} at start", done=done, is_named=is_named)
        file.write_bytes(whole)
    with start(spec) as runtime:
        load = Load.quiet(runtime, tokens=(1,))
        found.unhealed += int(not all(load.call(work) for work in load.works))


# -- when a worker comes back ----------------------------------------------------------------------


def _at_return(given: Run, spec: ModelSpec, whole: bytes, found: Found) -> None:
    """The file changes while the runtime runs; a killed worker that loads it anew is not let in,
    the other one goes on, and once the file is whole the worker is released.
    """
    file = Path(spec.path) / FILE

    def is_named(reason: str) -> bool:
        # Where it holds other bytes, the worker that disagrees is named.
        return any(word in reason for word in (str(spec.path), FILE, "checkpoint", "checksum", "fingerprint"))

    with start(spec, restart_backoff_ms=(20, 100), restart_deaths=3) as runtime:
        load = Load.quiet(runtime, seed=given.seed)
        with load.running(seed=given.seed):
            for number in range(given.size):
                way = ("flipped", "truncated", "gone", "header")[number % 4]
                return_refused(
                    given, load, found, f"{way} at return", harm=partial(damage, given, file, whole, way),
                    mend=partial(file.write_bytes, whole), is_named=is_named,
                )  # fmt: skip
    found.failed_calls += load.failed
    found.wrong_results += load.wrong


# -- a full disk -----------------------------------------------------------------------------------


def _full_disk(given: Run, found: Found) -> None:
    """Writes a key, a result over an older one, and nothing of either stays half written."""
    with _small_disk(given.folder / "disk") as disk:
        result = disk / "result.json"
        result.write_text("the older one", encoding="utf-8")
        writers: dict[str, tuple[Path, Callable[[], None]]] = {
            "key": (disk / "shared.key", lambda: write_key_file(disk / "shared.key")),
            "result": (result, lambda: BenchResult("fault", {"size": 0}).write(result)),
        }
        free = os.statvfs(disk)
        with (disk / "filler").open("wb") as filler, contextlib.suppress(OSError):
            filler.write(b"\0" * (free.f_bavail * free.f_frsize))
            filler.flush()
        for _ in range(given.size):
            for what, (path, write) in writers.items():
                names = sorted(os.listdir(disk))
                try:
                    write()
                    text, is_typed = "", False
                except (DflashError, OSError) as error:
                    text, is_typed = str(error), True
                found.unnamed += int(not (is_typed and path.name in text))
                found.left += int(sorted(os.listdir(disk)) != names or result.read_text(encoding="utf-8") != "the older one")
                given.event("full disk", what=what, verdict="named" if path.name in text else "unnamed", error=text[:300])
        (disk / "filler").unlink()
        for _, write in writers.values():
            write()


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    subprocess.run(mount, check=True, timeout=MOUNT_S)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=False, timeout=MOUNT_S)
        shutil.rmtree(folder, ignore_errors=True)


CAMPAIGN = Campaign(
    "damaged-files", "checkpoints cut off, changed, unreadable or gone, and a full disk", "times in each way", 20, 4, run
)  # fmt: skip
