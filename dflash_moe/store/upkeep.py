"""Lists, checks and removes what is in the folder: for `dflash-moe store`, and for a writer who
needs room.

A file goes because it is damaged, nobody here reads its layout, or no checkpoint has its source any
more, and then because it was used least recently. What a process has open stays.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from dflash_moe.errors import CheckpointError, DflashError
from dflash_moe.store.closed_file import derived_names
from dflash_moe.store.folder import INDEX, PANELS, PROOFS, SPECS, CacheFolder
from dflash_moe.store.panel_file import SUFFIX, PanelHeader, read_at, read_header
from dflash_moe.store.panel_index import PanelIndex, index_names, read_all
from dflash_moe.store.proof_file import ProofFile, read_proofs
from dflash_moe.store.spec_file import SpecFile, read_spec

log = logging.getLogger(__name__)

# What was set aside has this behind its name, so that nothing finds it any more.
DAMAGED = ".damaged"
# Layouts by the number of their bytes and the width of a panel.
KnownLayouts = Collection[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """The panels of one checkpoint, or those that no checkpoint has, whose path is empty."""

    model: str
    path: str
    is_current: bool  # the checkpoint's files are as they were
    num_files: int
    num_bytes: int  # on disk
    layouts: tuple[str, ...]
    used_at: float  # seconds since 1970


@dataclass(slots=True)
class Removed:
    """What was removed, and how many files stay because somebody uses them."""

    num_files: int = 0
    num_bytes: int = 0
    num_in_use: int = 0


@dataclass(frozen=True, slots=True)
class VerifiedFile:
    """What reading all of a file has shown; `fault` is empty where it is as it must be."""

    name: str
    num_bytes: int
    fault: str


@dataclass(slots=True)
class _Survey:
    """What is in the folder: files with their sizes, indexes, and when each file was used last by a
    checkpoint that is as it was.
    """

    sizes: dict[str, int]
    indexes: dict[str, PanelIndex]
    current: set[str] = field(default_factory=set)
    used_at: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: CacheFolder) -> _Survey:
        found = cls(folder.sizes(PANELS), dict(read_all(folder)))
        for name, index in found.indexes.items():
            if index.is_current():
                found.current.add(name)
                at = folder.used_at(INDEX, name)
                for panels in index.panels.values():
                    found.used_at[panels] = max(at, found.used_at.get(panels, 0.0))
        return found


def entries(folder: CacheFolder) -> list[StoreEntry]:
    """Returns what is kept, by checkpoint, the one used last first. A file that several checkpoints
    use is in the entry of each. Raises DflashError.
    """
    survey = _Survey.of(folder)
    headers = {name: header for name in survey.sizes if (header := _header(folder, name)) is not None}

    def entry(model: str, path: str, names: set[str], is_current: bool, used_at: float) -> StoreEntry:
        layouts = tuple(sorted({str(headers[name].layout) for name in names & headers.keys()}))
        size = sum(survey.sizes.get(name, 0) for name in names)
        return StoreEntry(model, path, is_current, len(names & survey.sizes.keys()), size, layouts, used_at)

    found = [
        entry(index.model, index.path, set(index.panels.values()), name in survey.current, folder.used_at(INDEX, name))
        for name, index in survey.indexes.items()
    ]
    lost = set(survey.sizes).difference(*(index.panels.values() for index in survey.indexes.values()))
    for model in sorted({headers[name].model if name in headers else "" for name in lost}):
        of_model = {name for name in lost if (headers[name].model if name in headers else "") == model}
        found.append(entry(model, "", of_model, False, max(folder.used_at(PANELS, name) for name in of_model)))
    return sorted(found, key=lambda one: (-one.used_at, one.path))


def verify(folder: CacheFolder, sum_of: Callable[[memoryview], int]) -> Iterator[VerifiedFile]:
    """Reads every file of panels, and yields what it found. `sum_of` returns the sum of an expert's
    piece. A file that is not as it must be is set aside where this user may. Raises DflashError.
    """
    for name, num_bytes in sorted(folder.sizes(PANELS).items()):
        if not name.endswith(SUFFIX):
            continue
        try:
            fault = _fault_of(folder, name, sum_of)
        except FileNotFoundError:
            continue
        if fault and folder.is_writable:
            folder.rename(PANELS, name, name + DAMAGED)
        yield VerifiedFile(name, num_bytes, fault)


def _fault_of(folder: CacheFolder, name: str, sum_of: Callable[[memoryview], int]) -> str:
    path = folder.path / PANELS / name
    try:
        descriptor = folder.open_file(PANELS, name)
        try:
            header = read_header(descriptor, path)
            for number, one in enumerate(header.experts, header.first):
                found = sum_of(read_at(descriptor, one.num_bytes, one.offset))
                if found != one.panels_sum:
                    return f"{path}: the panels of expert {number} sum up to {found:08x}, expected {one.panels_sum:08x}"
        finally:
            os.close(descriptor)
    except CheckpointError as error:
        return str(error)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        return f"{path}: {getattr(error, 'strerror', None) or error}"
    return ""


def collect(
    folder: CacheFolder,
    max_bytes: int,
    *,
    known: KnownLayouts | None,
    kept: Collection[str] = (),
    is_thorough: bool = True,
) -> Removed:
    """Removes files until at most `max_bytes` are left, and those that nobody can use in any case
    where it is thorough. `known` are the layouts that this machine's kernels read, None where that
    is not known. Files in `kept` stay. The caller holds the lock of the one writer. Raises
    DflashError.
    """
    survey = _Survey.of(folder)
    removed = Removed()
    left = sum(survey.sizes.values())
    for rank, _, name in sorted(_ranked(folder, survey, known)):
        if name in kept or (left <= max_bytes and not (is_thorough and rank < _USABLE)):
            continue
        left -= _remove(folder, survey, name, removed)
    _drop_indexes(folder, survey, are_old_dropped=is_thorough)
    if is_thorough:
        _drop_derived(folder, removed, lambda kept: kept is None or not kept.key.is_current())
    return removed


# From this rank on a checkpoint uses a file.
_USABLE = 3


def _ranked(folder: CacheFolder, survey: _Survey, known: KnownLayouts | None) -> Iterator[tuple[int, float, str]]:
    """Yields each file with its rank among those to be removed, and when it was used last."""
    for name in survey.sizes:
        header = _header(folder, name)
        if header is None:
            yield 0, 0.0, name
        elif known is not None and (header.layout.version, header.layout.width) not in known:
            yield 1, 0.0, name
        elif name not in survey.used_at:
            yield 2, folder.used_at(PANELS, name), name
        else:
            yield _USABLE, survey.used_at[name], name


def remove(folder: CacheFolder, which: str | None) -> Removed:
    """Removes the panels, specs and proofs of a model, which is named by its fingerprint or its
    path, or all. What another checkpoint uses stays. The caller holds the lock of the one writer.
    Raises DflashError.
    """
    survey = _Survey.of(folder)
    gone = {name for name, index in survey.indexes.items() if which in (None, index.model, index.path)}
    others = {panels for name in survey.indexes.keys() - gone for panels in survey.indexes[name].panels.values()}
    named = {panels for name in gone for panels in survey.indexes[name].panels.values()}
    removed = Removed()
    for name in list(survey.sizes):
        header = None if which is None or name in named else _header(folder, name)
        if name not in others and (which is None or name in named or (header is not None and header.model == which)):
            _remove(folder, survey, name, removed)
    for name in gone if which is not None else {*gone, *index_names(folder)}:
        folder.remove(INDEX, name)
    _drop_derived(folder, removed, lambda kept: which is None or (kept is not None and which in _names_of(kept)))
    return removed


def _remove(folder: CacheFolder, survey: _Survey, name: str, removed: Removed) -> int:
    """Removes a file and counts it; returns how many bytes that gives back."""
    try:
        if not folder.remove(PANELS, name):
            removed.num_in_use += 1
            return 0
    except DflashError as error:
        log.warning("a file of panels stays: %s", str(error))
        return 0
    size = survey.sizes.pop(name)
    removed.num_files += 1
    removed.num_bytes += size
    return size


def _drop_derived(folder: CacheFolder, removed: Removed, is_to_go: Callable[[SpecFile | ProofFile | None], bool]) -> None:
    """Removes and counts the specs and proofs of which `is_to_go` says so; it gets None for a file
    that cannot be used.
    """
    readers: dict[str, Callable[[CacheFolder, str], SpecFile | ProofFile | None]] = {SPECS: read_spec, PROOFS: read_proofs}
    for inside, read in readers.items():
        sizes = folder.sizes(inside)
        for name in derived_names(folder, inside):
            if is_to_go(read(folder, name)) and folder.remove(inside, name):
                removed.num_files += 1
                removed.num_bytes += sizes.get(name, 0)


def _names_of(kept: SpecFile | ProofFile) -> tuple[Any, ...]:
    """Returns the path and the fingerprint of the model of which something is kept."""
    return kept.key.path, kept.key.model if isinstance(kept, ProofFile) else kept.spec.get("fingerprint")


def _drop_indexes(folder: CacheFolder, survey: _Survey, *, are_old_dropped: bool) -> None:
    for name, index in survey.indexes.items():
        is_old = are_old_dropped and name not in survey.current
        if is_old or survey.sizes.keys().isdisjoint(index.panels.values()):
            folder.remove(INDEX, name)


def _header(folder: CacheFolder, name: str) -> PanelHeader | None:
    """Returns the header of a file, None where it cannot be used."""
    if not name.endswith(SUFFIX):
        return None
    try:
        descriptor = folder.open_file(PANELS, name)
    except (FileNotFoundError, CheckpointError):
        return None
    try:
        return read_header(descriptor, folder.path / PANELS / name)
    except CheckpointError:
        return None
    finally:
        os.close(descriptor)
