"""Files of panels, found for a checkpoint, written once and set aside where they are damaged.

A worker asks for the panels of a group of experts. It maps what it gets, and where it gets nothing
it packs as without a store and may hand the panels in. A store that cannot be read or written costs
a log line and never a start.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash_moe.config.values import format_bytes
from dflash_moe.errors import CheckpointError, DflashError
from dflash_moe.model.checkpoint_files import SeenFiles
from dflash_moe.store import upkeep
from dflash_moe.store.folder import INDEX, PANELS, PROOFS, SPECS, CacheFolder
from dflash_moe.store.panel_file import (
    PanelGroup,
    PanelHeader,
    StoredExpert,
    encode_header,
    first_offset,
    in_blocks,
    read_header,
)
from dflash_moe.store.panel_index import PanelIndex, index_names, read_index, write_index
from dflash_moe.store.upkeep import KnownLayouts, Removed, StoreEntry, VerifiedFile

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExpertPieces:
    """One expert as a writer hands it in: buffers that follow each other in its piece (panels, gate
    and up's bias, down's bias), and what vouches for them. They are read before the next expert is
    asked for.
    """

    pieces: Sequence[Any]
    content_checksum: int  # of its source, 64 bits
    panels_sum: int  # of the whole piece, 32 bits
    source: str  # BLAKE3 of its source's bytes, in hexadecimal


class OpenPanels:
    """An open file of panels, whose header was checked. It is not removed as long as its
    descriptor, or a copy of that, is open.
    """

    def __init__(self, descriptor: int, path: Path, header: PanelHeader) -> None:
        """Owns the descriptor until `take`."""
        self._descriptor = descriptor
        self.path = path
        self.header = header
        status = os.fstat(descriptor)
        # A file of the same contents may have its name one day.
        self._inode = status.st_dev, status.st_ino

    @property
    def descriptor(self) -> int:
        """The descriptor for reading, -1 once it was taken or closed."""
        return self._descriptor

    def is_there(self, status: os.stat_result) -> bool:
        """Says whether the file with this status is the one that was opened."""
        return (status.st_dev, status.st_ino) == self._inode

    def has_on_disk(self, number: int, sum_of: Callable[[memoryview], int]) -> bool:
        """Reads a piece past the page cache, and says whether the disk has it as it was written;
        False where the file is gone or cannot be read so. `sum_of` returns the sum of a piece.
        """
        one = self.header.experts[number]
        with contextlib.suppress(OSError, ValueError):
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                # The memory of a mapping is aligned as such reads need it, and freed with its view.
                memory = mmap.mmap(-1, in_blocks(one.num_bytes))
                num_bytes = os.preadv(descriptor, [memory], one.offset)
                if self.is_there(os.fstat(descriptor)) and num_bytes >= one.num_bytes:
                    return sum_of(memoryview(memory)[: one.num_bytes]) == one.panels_sum
            finally:
                os.close(descriptor)
        return False

    def take(self) -> int:
        """Hands the descriptor over to the caller, who closes it when nothing reads the file."""
        taken, self._descriptor = self._descriptor, -1
        return taken

    def close(self) -> None:
        """Closes the file, unless its descriptor was taken."""
        if (descriptor := self.take()) >= 0:
            os.close(descriptor)

    def __enter__(self) -> OpenPanels:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()


class PanelStore:
    """The panels that this machine keeps. Any thread may call; `close` ends it."""

    def __init__(self, folder: CacheFolder, max_bytes: int | None) -> None:
        """Takes the folder over. Use `open`."""
        self.folder = folder
        self._max_bytes = max_bytes
        self._said: set[str] = set()
        # Of the files that this process has written.
        self.written_bytes = 0

    @classmethod
    def open(cls, path: Path, *, max_bytes: int | None, allow_network: bool) -> PanelStore:
        """Opens the store in a folder, and removes what a killed writer has left. `max_bytes` are
        all that it may take; None is half of what it takes and what is free. Raises ConfigError as
        `CacheFolder.open`, and DflashError where the folder cannot be read.
        """
        folder = CacheFolder.open(path, allow_network=allow_network)
        try:
            if folder.is_writable and folder.has_orphans():
                with folder.writing(lambda: True):  # a writer who runs has the lock, and is left alone
                    pass
        except BaseException:
            folder.close()
            raise
        return cls(folder, max_bytes)

    def close(self) -> None:
        """Closes the store. Panels that were opened stay open."""
        self.folder.close()

    def budget(self) -> int:
        """Returns how many bytes the files of panels, specs and proofs may take."""
        if self._max_bytes is not None:
            return self._max_bytes
        return (self.folder.free_bytes() + self.num_bytes()) // 2

    def num_bytes(self) -> int:
        """Returns how many bytes the files of panels, specs and proofs take on disk."""
        return sum(size for inside in (PANELS, SPECS, PROOFS) for size in self.folder.sizes(inside).values())

    def of_checkpoint(self, seen: SeenFiles, model_fingerprint: str, path: Path) -> CheckpointPanels:
        """Returns the panels of a checkpoint as its files were `seen`. `path` is where it is."""
        return CheckpointPanels(self, seen, model_fingerprint, path)

    def entries(self) -> list[StoreEntry]:
        """As `upkeep.entries`."""
        return upkeep.entries(self.folder)

    def verify(self, sum_of: Callable[[memoryview], int]) -> Iterator[VerifiedFile]:
        """As `upkeep.verify`."""
        return upkeep.verify(self.folder, sum_of)

    def collect(
        self, max_bytes: int | None = None, *, known: KnownLayouts | None = None, is_over: Callable[[], bool]
    ) -> Removed:
        """As `upkeep.collect`; None leaves what the budget allows. Raises DflashError where another
        process writes until `is_over`.
        """
        with self._changing(is_over):
            return upkeep.collect(self.folder, self.budget() if max_bytes is None else max_bytes, known=known)

    def remove(self, which: str | None, *, is_over: Callable[[], bool]) -> Removed:
        """As `upkeep.remove`. Raises DflashError where another process writes until `is_over`."""
        with self._changing(is_over):
            return upkeep.remove(self.folder, which)

    @contextlib.contextmanager
    def _changing(self, is_over: Callable[[], bool]) -> Iterator[None]:
        if not self.folder.is_writable:
            raise DflashError(f"cache folder {self.folder.path} belongs to root, who alone may change it: run this with sudo")
        with self.folder.writing(is_over) as has_lock:
            if not has_lock:
                raise DflashError(f"cache folder {self.folder.path}: another process writes to it; try again", code="timeout")
            yield

    def make_room(self, num_bytes: int, kept: set[str]) -> str:
        """Removes files, but none in `kept`, so that a further one fits the budget. Returns why it
        does not, empty where it does. The caller holds the lock of the one writer.
        """
        budget, held = self.budget(), self.num_bytes()
        if held + num_bytes > budget:
            held -= upkeep.collect(self.folder, budget - num_bytes, known=None, kept=kept, is_thorough=False).num_bytes
        if held + num_bytes <= budget:
            return ""
        return (
            f"{format_bytes(num_bytes)} more do not fit the budget of {format_bytes(budget)}, of which {format_bytes(held)} "
            "are taken; raise `cache.max_bytes`, or remove models by `dflash-moe store rm`"
        )

    def may_write(self) -> bool:
        """Says whether panels can be kept here, and once in the log why not."""
        if not self.folder.is_writable:
            self.say_once("write", "cache folder %s belongs to root, and is only read", self.folder.path)
        return self.folder.is_writable

    def say_once(self, about: str, text: str, *values: object) -> None:
        """Logs a line, unless one about the same thing was logged before."""
        if about not in self._said:
            self._said.add(about)
            log.warning(text, *values)


class CheckpointPanels:
    """The panels of one checkpoint. Any thread may call."""

    def __init__(self, store: PanelStore, seen: SeenFiles, model: str, path: Path) -> None:
        self._store, self._folder = store, store.folder
        self._seen, self._model = seen, model
        # Links are left in it: a hub's cache has links to files of other names.
        self._empty = PanelIndex(model, os.path.abspath(path), seen.states)
        self._name = self._empty.name
        # The index as it was read last, and the state of its file before that.
        self._known: tuple[object, PanelIndex] | None = None
        self._is_touched = False

    def find(self, group: PanelGroup) -> OpenPanels | None:
        """Returns the panels of a group, which the caller closes, None where there are none. A file
        that is damaged is set aside.
        """
        name = self._index().panels.get(group.key)
        found = self._open(name, group) if name is not None else None
        if found is not None and not self._is_touched:
            self._is_touched = True
            self._folder.touch(INDEX, self._name)
        return found

    def candidates(self, group: PanelGroup) -> Iterator[OpenPanels]:
        """Yields panels of the group that were made from other states of files with this model's
        fingerprint: the caller compares the BLAKE3 of the source bytes and then calls `adopt`, and
        closes each.
        """
        tried = {self._index().panels.get(group.key)}
        for index_name in index_names(self._folder, self._model):
            index = read_index(self._folder, index_name) if index_name != self._name else None
            name = index.panels.get(group.key) if index is not None else None
            if name not in tried:
                tried.add(name)
                if name is not None and (found := self._open(name, group)) is not None:
                    yield found

    def adopt(self, group: PanelGroup, panels: OpenPanels, *, is_over: Callable[[], bool]) -> None:
        """Notes that a file of `candidates` holds the group's panels. Without a line in the log it
        does nothing where `is_over` said so first, or the folder is only read.
        """
        if not self._folder.is_writable:
            return
        try:
            with self._folder.writing(is_over) as has_lock:
                if has_lock:
                    self._enter(group, panels.path.name)
        except DflashError as error:
            self._store.say_once("adopt", "panels that were found are not noted: %s", str(error))

    def write(
        self, group: PanelGroup, experts: Callable[[int], ExpertPieces], *, is_over: Callable[[], bool]
    ) -> OpenPanels | None:
        """Writes the panels of a group, and returns them opened, or those that another process has
        written meanwhile. `experts` is called with the id of each expert, ascending; what it raises
        ends the writing, and a DflashError with the code "system" counts as a disk that fails.
        Returns None where `is_over` says so, and, after a line in the log, where they cannot be
        kept. Nothing half written is left.
        """
        if not self._store.may_write():
            return None
        try:
            with self._folder.writing(is_over) as has_lock:
                if not has_lock:
                    return None
                return self.find(group) or self._write(group, experts, is_over)
        except DflashError as error:
            if error.code != "system":
                raise
            self._store.say_once("write", "panels are not kept: %s", str(error))
            return None

    def set_aside(self, panels: OpenPanels) -> None:
        """Renames a file that was found damaged, so that nobody finds it any more, and closes it.
        Indexes lose its name when they are next written. A whole file that was written in its place
        meanwhile stays.
        """
        with contextlib.suppress(FileNotFoundError):
            if panels.is_there(os.stat(panels.path, follow_symlinks=False)):
                self._set_aside(panels.path.name, "its panels differ from their sum")
        panels.close()

    def _write(
        self, group: PanelGroup, experts: Callable[[int], ExpertPieces], is_over: Callable[[], bool]
    ) -> OpenPanels | None:
        begin = first_offset(group, self._model)
        size = begin + group.count * group.stride_bytes
        if reason := self._store.make_room(size, set(self._index().panels.values())):
            self._store.say_once("room", "panels are not kept: %s", reason)
            return None
        with self._folder.new_file(PANELS, size) as file:
            stored = []
            for number in range(group.count):
                if is_over():
                    return None
                one = experts(group.first + number)
                offset = at = begin + number * group.stride_bytes
                for piece in one.pieces:
                    file.write_at(at, piece)
                    at += memoryview(piece).nbytes
                stored.append(StoredExpert(offset, at - offset, one.content_checksum, one.panels_sum, one.source))
            header = PanelHeader(group.layout, group.shape, self._model, group.layer, group.first, tuple(stored))
            name, begins = encode_header(header)
            file.write_at(0, begins)
            if not self._seen.are_unchanged():
                self._store.say_once("changed", "panels are not kept: checkpoint %s has changed", self._empty.path)
                return None
            file.publish(name)
            self._store.written_bytes += size
        self._enter(group, name)
        return self._open(name, group)

    def _enter(self, group: PanelGroup, name: str) -> None:
        """Adds a file to the index, and leaves out those that are gone. The caller holds the lock
        of the one writer.
        """
        there = self._folder.sizes(PANELS)
        index = self._index()
        panels = {key: known for key, known in index.panels.items() if known in there}
        write_index(self._folder, replace(index, panels={**panels, group.key: name}))

    def _index(self) -> PanelIndex:
        """Returns the index as it is on disk now, an empty one where there is none."""
        state, known = self._folder.state_of(INDEX, self._name), self._known
        if state is None:
            return self._empty
        if known is None or known[0] != state:
            known = self._known = (state, read_index(self._folder, self._name) or self._empty)
        return known[1]

    def _open(self, name: str, group: PanelGroup) -> OpenPanels | None:
        """Opens a file of panels. One that is damaged is set aside."""
        path = self._folder.path / PANELS / name
        try:
            descriptor = self._folder.open_file(PANELS, name)
            try:
                header = read_header(descriptor, path)
            except BaseException:
                os.close(descriptor)
                raise
        except FileNotFoundError:
            return None
        except CheckpointError as error:
            self._set_aside(name, str(error))
            return None
        if difference := header.difference(group, self._model):
            os.close(descriptor)
            log.warning("%s does not hold what an index says: %s", path, difference)
            return None
        return OpenPanels(descriptor, path, header)

    def _set_aside(self, name: str, reason: str) -> None:
        log.warning("panels are damaged and set aside: %s: %s", self._folder.path / PANELS / name, reason)
        if self._folder.is_writable:
            try:
                self._folder.rename(PANELS, name, name + upkeep.DAMAGED)
            except DflashError as error:
                self._store.say_once("aside", "%s", str(error))
