"""Checks that the holders of a shard hold the same bytes: the content checksums that they report
are compared with each other and, on request, with the host's own copy of the checkpoint.

A fingerprint covers only shapes, names and samples of the weights; a content checksum covers every
bit.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.errors import CheckpointError, WorkerTimeout
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.expert_tensors import expert_sources

if TYPE_CHECKING:
    from dflash_moe.model.spec import LayerSpec
    from dflash_moe.placement.held_shards import HeldShard

# The host reads its own copy in steps of this size, which take milliseconds, so that Ctrl-C is seen
# between two of them.
STEP_BYTES = 8 << 20
# A holder that still reads in the background is asked again after this pause.
POLL_S = 0.2

# A report is called with the name of a layer, how many of its experts have been compared, and how
# many it has. While a holder still reads its mapped weights, the name is that of layer and holder,
# and the first count is of experts read.
ContentsReport = Callable[[str, int, int], None]
# Asks a holder by name about one of its shards. It returns the content checksum, None as long as
# the shard is unchecked, and how many experts of the shard have been read.
AskChecksum = Callable[[str, "HeldShard"], "tuple[int | None, int]"]


@dataclass(slots=True)
class _Reported:
    """What the holders of one shard reported: the value that came first, who reported it, and who
    has loaded the shard without having read all of it.
    """

    reference: int | None = None
    first: str = ""
    # Replaced and never changed, so that whoever has found them may go through them.
    holders: frozenset[str] = frozenset()
    unchecked: frozenset[str] = frozenset()


class ReferenceChecksums:
    """The content checksum of each shard as the first of its holders reported it. Every other
    holder must have the same. Any thread may call.
    """

    def __init__(self) -> None:
        # Holders load in parallel and note their checksums from threads of their own.
        self._lock = threading.Lock()
        self._reported: dict[tuple[int, int], _Reported] = {}

    def note(self, held: HeldShard, holder: str, checksum: int | None) -> None:
        """Notes the checksum that `holder` reports, or None as long as the shard is unchecked
        there. Nobody may stand in for anybody then before `MappedHolders` has settled it.

        Raises CheckpointError, naming both holders and values, where another holder reported
        another value. A holder that was started again must report what it reported before.
        """
        nothing = _Reported()
        with self._lock:
            reported = self._reported.setdefault((held.layer.index, held.shard_id), nothing)
            reported.holders |= {holder}
            if checksum is None:
                reported.unchecked |= {holder}
                return
            reported.unchecked -= {holder}
            if reported.reference is None:
                reported.reference, reported.first = checksum, holder
            first, reference = reported.first, reported.reference
        if checksum == reference:
            return
        if first == holder:
            raise CheckpointError(
                f"weights of {held.layer.name}, shard {held.shard_id}: worker {holder} has loaded content checksum "
                f"{checksum_text(checksum)}, and held {checksum_text(reference)} before it was lost; its checkpoint has "
                "changed meanwhile: copy the former one there again"
            )
        raise CheckpointError(
            f"weights of {held.layer.name}, shard {held.shard_id}: worker {first} holds content checksum "
            f"{checksum_text(reference)}, worker {holder} {checksum_text(checksum)}; holders of one shard must hold the same "
            "bytes: copy the checkpoint to one of them again"
        )

    def reference(self, held: HeldShard) -> int | None:
        """Returns the checksum that every holder of a shard must have, None where no holder has
        read all of it.
        """
        with self._lock:
            reported = self._reported.get((held.layer.index, held.shard_id))
            return reported.reference if reported is not None else None

    def holders(self, held: HeldShard) -> tuple[frozenset[str], frozenset[str]]:
        """Returns all who have loaded a shard, and those of them that had not read all of it
        yet.
        """
        nothing = _Reported()
        with self._lock:
            reported = self._reported.get((held.layer.index, held.shard_id), nothing)
            return reported.holders, reported.unchecked

    def forget(self, holder: str) -> None:
        """Forgets a holder that was removed. What it reported stays the reference."""
        with self._lock:
            for reported in self._reported.values():
                reported.holders -= {holder}
                reported.unchecked -= {holder}


def checksum_text(checksum: int | None) -> str:
    """Writes a checksum the way that every message does."""
    return "unchecked" if checksum is None else f"{checksum:#018x}"


def own_checksum(checkpoint: Checkpoint, held: HeldShard, report: Callable[[int], None] = lambda _count: None) -> int:
    """Returns the content checksum of a shard in the host's own copy of the checkpoint.

    `report` is called after every expert with the number read so far. Raises CheckpointError where
    the files cannot be read.
    """
    values = []
    for expert in held.experts:
        reader = _core.ContentReader(**expert_sources(checkpoint, held.layer.ffn, expert))
        while not reader.read(STEP_BYTES):
            pass
        values.append(reader.value())
        report(len(values))
    return _core.shard_checksum(values)


def expert_checksums(path: Path, layer: LayerSpec) -> list[int]:
    """Returns the content checksum of each expert of a layer in the checkpoint at `path`. Raises
    CheckpointError where the files cannot be read.
    """
    checkpoint, found = Checkpoint.open(path), []
    for expert in range(layer.num_experts):
        reader = _core.ContentReader(**expert_sources(checkpoint, layer.ffn, expert))
        while not reader.read(STEP_BYTES):
            pass
        found.append(reader.value())
    return found


def compare_with_own_copy(
    ask: AskChecksum, held: Mapping[str, Sequence[HeldShard]], path: Path, *, timeout_s: float, report: ContentsReport
) -> int:
    """Compares every holder's shards with the checkpoint at `path`, layer by layer, and returns the
    number of shards compared. `timeout_s` bounds how long a holder that still reads in the
    background may go without progress.

    Errors: CheckpointError naming every layer and shard that differs, its holder and both values;
    UnsupportedError for a worker whose version knows no content checksums; WorkerLost and
    WorkerTimeout.
    """
    checkpoint = Checkpoint.open(path)
    shards = sorted(
        ((one.layer.index, one.shard_id, holder, one) for holder, own in held.items() for one in own), key=lambda row: row[:2]
    )
    totals: dict[int, int] = {}
    for layer, _, _, one in shards:
        totals[layer] = totals.get(layer, 0) + len(one.experts)
    done: dict[int, int] = dict.fromkeys(totals, 0)
    differing = []
    for layer, shard, holder, one in shards:

        def progress(count: int, layer: int = layer, one: HeldShard = one) -> None:
            report(one.layer.name, done[layer] + count, totals[layer])

        ours = own_checksum(checkpoint, one, progress)
        theirs = await_checksum(ask, holder, one, timeout_s, report)
        done[layer] += len(one.experts)
        if theirs != ours:
            differing.append(
                f"weights of {one.layer.name}, shard {shard}: worker {holder} holds content checksum {checksum_text(theirs)}, "
                f"this host's own copy has {checksum_text(ours)}"
            )
        checkpoint.drop_pages()
    if differing:
        first, *others = differing
        hint = (
            f"one of the two copies is damaged, the worker's or {path}: compare their sha256sum, and copy the checkpoint to "
            "that one again"
        )
        raise CheckpointError("\n".join([f"{first}; {hint}", *others]))
    return len(shards)


def held_checksums(
    ask: AskChecksum, held: Mapping[str, Sequence[HeldShard]], layers: Sequence[LayerSpec], *, timeout_s: float
) -> tuple[tuple[int, ...], ...]:
    """Returns the content checksums that holders report, for each layer in ascending order of its
    shards. Errors are those of `compare_with_own_copy` but for the first.
    """
    found: dict[int, dict[int, int]] = {layer.index: {} for layer in layers}
    for holder, shards in held.items():
        for one in shards:
            checksum = await_checksum(ask, holder, one, timeout_s, lambda _layer, _count, _total: None)
            found[one.layer.index][one.shard_id] = checksum
    return tuple(tuple(value for _, value in sorted(found[layer.index].items())) for layer in layers)


def await_checksum(ask: AskChecksum, holder: str, held: HeldShard, timeout_s: float, report: ContentsReport) -> int:
    """Returns a holder's content checksum, waiting for its background reader as long as that makes
    progress.
    """
    where = f"{held.layer.name} at {holder}"
    most_read, deadline = -1, time.monotonic() + timeout_s
    while True:
        checksum, num_read = ask(holder, held)
        if checksum is not None:
            if most_read >= 0:
                report(where, len(held.experts), len(held.experts))
            return checksum
        if num_read > most_read:
            most_read, deadline = num_read, time.monotonic() + timeout_s
        report(where, num_read, len(held.experts))
        if time.monotonic() > deadline:
            raise WorkerTimeout(
                f"worker {holder}: its background reader read {num_read} of the {len(held.experts)} experts of "
                f"{held.layer.name}, shard {held.shard_id}, and none more within {timeout_s:g} s (ipc.start_timeout_s)",
                worker=holder,
                layer=held.layer.index,
            )
        time.sleep(POLL_S)
