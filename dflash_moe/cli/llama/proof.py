"""The proof that a program which loads a model does not compute its experts by itself, silently:
what it has open, what its library has said, and what follows.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# A plug-in takes the workers over when it is loaded, before any model is.
DIAL_S = 10.0
# A program that keeps tensors of the plan may load another model first, a draft for example. It has
# this time to load the one that the workers hold.
KEPT_S = 10.0
# A model that is mapped for so long without a tensor of the plan is worth a line. It is no proof,
# because a disk may be slow.
QUIET_S = 60.0
# A program that only reads a model's header has the file open for less.
LOADING_S = 1.0


@dataclass(frozen=True, slots=True)
class Sighting:
    """What is known of the program at one moment. `reasons` has each planned tensor that it met,
    with an empty text where the workers stand in for it.
    """

    is_mapped: bool
    is_open: bool
    is_connected: bool
    reasons: Mapping[str, str]
    calls: int


class LocalityProof:
    """Judges sightings of one program that is to let workers compute the tensors `planned`, but for
    those `excluded`. One thread uses it.
    """

    def __init__(
        self,
        planned: Sequence[str],
        excluded: Collection[str],
        *,
        may_be_local: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`may_be_local` allows tensors that the program keeps after all."""
        self._expected = [name for name in planned if name not in excluded]
        self._may_be_local = may_be_local
        self._clock = clock
        self._since = 0.0
        self._kept_since = 0.0
        self._has_seen = False
        self._has_loaded = False
        self._is_quiet_said = False
        # Everything that was expected has been seen, so that what the program has open tells
        # nothing more.
        self.is_settled = False

    def judge(self, now: Sighting) -> str:
        """Returns why the program must be ended, or an empty text."""
        self.is_settled = now.is_connected and not self._missing(now) and not self._kept(now)
        if now.is_mapped or now.is_open:
            if not self._has_seen:
                self._has_seen, self._since = True, self._clock()
            self._has_loaded |= now.is_mapped or self._clock() - self._since >= LOADING_S
        if self._has_seen and not now.is_connected and self._clock() - self._since >= DIAL_S:
            return (
                f"the program has loaded the model for {DIAL_S:g} s and has not asked for the workers, so that it computes the "
                "experts by itself; is the plug-in built for this llama.cpp (make ggml LLAMA_CPP=DIR)?"
            )
        if self._may_be_local:
            return ""
        if verdict := self._kept(now):
            # A load has the file open until its end, however long it takes.
            if now.is_open or not self._kept_since:
                self._kept_since = self._clock()
            if now.calls or self._clock() - self._kept_since >= KEPT_S:
                return verdict
        missing = self._missing(now)
        if self._has_loaded and missing and now.calls:
            return (
                f"the program computes and has kept {len(missing)} of {len(self._expected)} tensors that the workers hold, the "
                f"first is {missing[0]}; exclude them with a flag (-ot), or pass --allow-local"
            )
        return ""

    def warn(self, now: Sighting) -> str:
        """Returns a line, once, where nothing is heard of a model that is mapped for long."""
        is_quiet = now.is_mapped and not now.reasons and not now.calls and self._clock() - self._since >= QUIET_S
        if not is_quiet or self._is_quiet_said or self._may_be_local:
            return ""
        self._is_quiet_said = True
        return f"the program has had the model mapped for {QUIET_S:g} s and has not loaded a tensor that the workers hold"

    def judge_end(self, now: Sighting) -> str:
        """Returns what is wrong with a run that ended well, or an empty text."""
        if self._may_be_local:
            return ""
        if verdict := self._kept(now):
            return verdict
        if now.calls or not self._has_loaded or not self._missing(now):
            return ""
        return (
            "the program has loaded the model and called no worker, so that it computed the experts by itself; is the plug-in "
            "built for this llama.cpp (make ggml LLAMA_CPP=DIR)?"
        )

    def _kept(self, now: Sighting) -> str:
        kept = [name for name in self._expected if now.reasons.get(name)]
        if not kept:
            return ""
        return (
            f"the program keeps {len(kept)} of {len(self._expected)} tensors that the workers hold, the first is "
            f"{kept[0]}: {now.reasons[kept[0]]}; --allow-local lets it compute them"
        )

    def _missing(self, now: Sighting) -> list[str]:
        return [name for name in self._expected if name not in now.reasons]


class OpenFiles:
    """Sees whether a process has one of the files of a model mapped or open."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = {(status.st_dev, status.st_ino): path.name for path in files for status in [path.stat()]}
        self._mapped = {(str(inode), name) for (_, inode), name in self._files.items()}

    def look(self, pid: int) -> tuple[bool, bool]:
        """Returns whether one is mapped, and whether one is open. A process that is gone has
        none.
        """
        try:
            return self._is_mapped(pid), self._is_open(pid)
        except OSError:
            return False, False

    def _is_mapped(self, pid: int) -> bool:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and (fields[4], os.path.basename(fields[5].rstrip("\n"))) in self._mapped:
                    return True
        return False

    def _is_open(self, pid: int) -> bool:
        folder = f"/proc/{pid}/fd"
        for entry in os.listdir(folder):
            try:
                status = os.stat(f"{folder}/{entry}")
            except OSError:
                continue
            if (status.st_dev, status.st_ino) in self._files:
                return True
        return False
