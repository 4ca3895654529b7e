"""What the campaign of damaged files does to a checkpoint, and what it counts.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.campaigns.faults.campaign import Run
from bench.campaigns.faults.load import Load, pids_of, start, state_of, wait_until
from dflash_moe.errors import DflashError
from dflash_moe.model.spec import ModelSpec

FILE = "model.safetensors"
# Calls that are made at least while a file is damaged.
CALLS_MEANWHILE = 20


@dataclass(slots=True)
class Found:
    """Counts of what was not as it must be, and the seconds that each refusal and return took."""

    unnamed: int = 0
    accepted: int = 0
    unhealed: int = 0
    left: int = 0
    ended: int = 0
    failed_calls: int = 0
    wrong_results: int = 0
    refused_s: list[float] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)


def damage(given: Run, file: Path, whole: bytes, way: str) -> str:
    """Damages a file while nobody computes from it, and returns what was done."""
    if way == "truncated":
        length = given.drawn.randrange(len(whole))
        file.write_bytes(whole[:length])
        return f"{length} of {len(whole)} bytes"
    if way == "gone":
        file.unlink()
        return "unlinked"
    header = int.from_bytes(whole[:8], "little")
    offset = given.drawn.randrange(8 + header, len(whole)) if way == "flipped" else given.drawn.randrange(8 + header)
    bit = given.drawn.randrange(8)
    changed = bytearray(whole)
    changed[offset] ^= 1 << bit
    file.write_bytes(changed)
    return f"bit {bit} of byte {offset}"


def damage_in_place(given: Run, file: Path, whole: bytes, way: str) -> str:
    """Damages the file that others have open, and returns what was done."""
    header = 8 + int.from_bytes(whole[:8], "little")
    offset, bit = given.drawn.randrange(header, len(whole)), given.drawn.randrange(8)
    if way == "touched":
        os.utime(file)
        return "times of now"
    if way == "truncated":
        os.truncate(file, offset)
        return f"{offset} of {len(whole)} bytes"
    before = os.stat(file)
    with file.open("r+b", buffering=0) as stream:
        stream.seek(offset)
        stream.write(bytes([whole[offset] ^ 1 << bit]))
    if way == "flipped, times kept":
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    return f"bit {bit} of byte {offset}"


def restore_in_place(file: Path, whole: bytes) -> None:
    """Gives the file that others have open its bytes again."""
    with file.open("r+b", buffering=0) as stream:
        stream.write(whole)


def all_right(load: Load) -> bool:
    """Calls every size once, and returns whether each was answered."""
    answered = [load.call(work) for work in load.works]
    return all(answered)


def start_refused(
    given: Run, spec: ModelSpec, found: Found, phase: str, *, done: str, is_named: Callable[[str], bool]
) -> None:  # fmt: skip
    """Starts a runtime on what is damaged, which must be refused by name. `done` says what is."""
    text, began = "", time.monotonic()
    try:
        with start(spec):
            found.accepted += 1
    except DflashError as error:
        text = str(error)
    found.refused_s.append(time.monotonic() - began)
    found.unnamed += int(not is_named(text))
    given.event(phase, damage=done, verdict="named" if is_named(text) else "unnamed", error=text[:300])


def return_refused(
    given: Run, load: Load, found: Found, phase: str, *, harm: Callable[[], str], mend: Callable[[], object],
    is_named: Callable[[str], bool],
) -> None:  # fmt: skip
    """Kills a worker, whose return to what is damaged must be refused by name, and releases it
    once that is mended.
    """
    runtime, victim = load.runtime, given.drawn.choice(("w0", "w1"))
    done, began = harm(), time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids_of(runtime)[victim], signal.SIGKILL)
    is_out = wait_until(lambda: state_of(runtime, victim).state == "quarantined")
    reason = state_of(runtime, victim).reason
    found.refused_s.append(time.monotonic() - began)
    mend()
    began = time.monotonic()
    with contextlib.suppress(DflashError):
        runtime.release(victim)
    is_back = wait_until(lambda: state_of(runtime, victim).state == "ready")
    found.back_s.append(time.monotonic() - began)
    found.accepted += int(not is_out)
    found.unhealed += int(not is_back)
    found.unnamed += int(not is_named(reason))
    given.event(
        phase, worker=victim, damage=done, failed_calls=load.failed, wrong_results=load.wrong,
        refused_s=found.refused_s[-1], verdict="refused" if is_out and is_back else "accepted", error=reason[:300],
    )  # fmt: skip


def use_while_damaged(
    given: Run, load: Load, found: Found, phase: str, *, harm: Callable[[], str], mend: Callable[[], None], is_seen: bool,
    has_other: bool, is_named: Callable[[str], bool],
) -> None:  # fmt: skip
    """Has calls go on while a file is damaged, until somebody has refused to use it where `is_seen`
    says that it must be noticed, and then until all sizes of calls are right again. With
    `has_other` another holder answers whatever this one refuses, and no call fails.
    """
    runtime = load.runtime
    pids = pids_of(runtime)

    def refusals() -> int:
        return load.failed + sum(one["failovers"] for one in runtime.stats()["workers"].values())

    failed, num_errors = load.failed, len(load.errors)
    with load.running(seed=given.seed + len(given.events)):
        calls, refused = load.calls, refusals()
        done = harm()
        wait_until(lambda: load.calls >= calls + CALLS_MEANWHILE and (refusals() > refused or not is_seen))
        num_refused = refusals() - refused
        mend()
        # Those that were under way when it was mended may fail yet.
        calls = load.calls
        wait_until(lambda: load.calls >= calls + 2)
    is_well = wait_until(partial(all_right, load))
    errors = [text for _, _, text in load.errors[num_errors:]]
    found.unnamed += sum(not is_named(text) for text in errors)
    found.accepted += int(is_seen and not num_refused)
    found.unhealed += int(not is_well)
    found.ended += int(pids_of(runtime) != pids)
    found.failed_calls += load.failed - failed if has_other or not is_seen else 0
    given.event(
        phase, damage=done, refused=num_refused, failed_calls=load.failed - failed, wrong_results=load.wrong,
        verdict="refused" if num_refused else "used", error=errors[0][:300] if errors else "",
    )  # fmt: skip
