"""A disk that cannot be read: opening, reading or mapping the checkpoint ends in EIO in the
workers, while they start, while they come back, and while one computes from the file. The error
names the file, and all is well once the disk is.

A library that is loaded first (failing_reads.c) has the calls fail.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.campaigns.faults.campaign import Run
from bench.campaigns.faults.damage import FILE, Found, return_refused, start_refused, use_while_damaged
from bench.campaigns.faults.load import Load, start
from bench.campaigns.faults.mapped_files import LAYOUTS, start_laid_out
from dflash_moe.model.spec import ModelSpec

SOURCE = Path(__file__).with_name("failing_reads.c")
# Each ends in EIO in turn.
CALLS = ("open", "read", "pread", "mmap")
COMPILE_S = 120.0


def run(given: Run, spec: ModelSpec, found: Found) -> None:
    """Has the disk fail `given.size` times at starts, at returns and under use."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        given.event("failing disk", verdict="skipped: it needs a C compiler (cc)")
        return
    library = given.folder / "failing_reads.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True, timeout=COMPILE_S)
    disk = _Disk(library, Path(spec.path) / FILE, given.folder / "the-disk-fails")
    with disk.below():
        _at_start(given, spec, found, disk)
        _at_return(given, spec, found, disk)
        _under_use(given, spec, found, disk)


class _Disk:
    """The disk below a file, which fails as long as `token` exists."""

    def __init__(self, library: Path, file: Path, token: Path) -> None:
        self.file, self._token = file, token
        self._variables = {"LD_PRELOAD": str(library), "DFLASH_BAD_FILE": str(file), "DFLASH_BAD_TOKEN": str(token)}

    @contextlib.contextmanager
    def below(self) -> Iterator[None]:
        """Workers that are started meanwhile have this disk."""
        os.environ |= self._variables
        try:
            yield
        finally:
            for name in self._variables:
                os.environ.pop(name)
            self.works()

    def fails(self, call: str) -> str:
        """From now on this function of the system fails; returns what does."""
        written = self._token.with_suffix(".new")
        written.write_text(call, encoding="ascii")
        written.rename(self._token)
        return f"EIO of {call}"

    def works(self) -> None:
        """From now on it works."""
        self._token.unlink(missing_ok=True)

    def is_named(self, text: str) -> bool:
        """Whether an error names the file or its folder."""
        return str(self.file.parent) in text


def _at_start(given: Run, spec: ModelSpec, found: Found, disk: _Disk) -> None:
    for number in range(given.size):
        done = disk.fails(CALLS[number % len(CALLS)])
        start_refused(given, spec, found, "EIO at start", done=done, is_named=disk.is_named)
        disk.works()
    with start(spec) as runtime:
        load = Load.quiet(runtime, tokens=(1,))
        found.unhealed += int(not all(load.call(work) for work in load.works))


def _at_return(given: Run, spec: ModelSpec, found: Found, disk: _Disk) -> None:
    with start(spec, restart_backoff_ms=(20, 100), restart_deaths=3) as runtime:
        load = Load.quiet(runtime, seed=given.seed)
        with load.running(seed=given.seed):
            for number in range(given.size):
                harm = partial(disk.fails, CALLS[number % len(CALLS)])
                return_refused(
                    given, load, found, "EIO at return", harm=harm, mend=disk.works, is_named=disk.is_named
                )  # fmt: skip
    found.failed_calls += load.failed
    found.wrong_results += load.wrong


def _under_use(given: Run, spec: ModelSpec, found: Found, disk: _Disk) -> None:
    for layouts in LAYOUTS:
        with start_laid_out(spec, layouts) as runtime:
            load = Load.quiet(runtime, seed=given.seed)
            for _ in range(given.size):
                use_while_damaged(
                    given, load, found, f"EIO under use: {' and '.join(layouts)}", harm=partial(disk.fails, "pread"),
                    mend=disk.works, is_seen=True, has_other="packed" in layouts,
                    is_named=disk.is_named,
                )  # fmt: skip
            found.wrong_results += load.wrong
