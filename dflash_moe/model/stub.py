"""Writes the stub of a GGUF model: a file of the same apparent size with which a program loads
everything but the experts that workers have (`stub_pages.py` has the layout).

Tensors of experts that no worker can compute (`GgufExperts.left_out`) are kept whole, because the
program computes them. No byte of the others is read but for the fingerprint.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_moe.errors import CheckpointError, ConfigError, DflashError, UnsupportedError
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.formats.stored_tensor import TensorInfo
from dflash_moe.model.formats.stub_pages import LEAST_MARKED_BYTES, holds_experts, page, region
from dflash_moe.model.gguf_architectures.gguf_experts import gguf_experts

STEP_BYTES = 8 << 20
# File systems keep data in blocks of this size, and a short region may lie in two.
BLOCK_BYTES = 4096

_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")
StubReport = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class WrittenStub:
    """What was written: the files, their sizes as file systems list them and as they take them on
    disk, and the tensors of experts that were kept whole, with the reason.
    """

    files: tuple[Path, ...]
    apparent_bytes: int
    disk_bytes: int
    num_tensors: int
    left_out: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Part:
    """One file to write: the tensors of it that become pages, by name."""

    source: Path
    target: Path
    num_bytes: int
    experts: dict[str, TensorInfo]

    def kept(self) -> Iterator[tuple[int, int]]:
        """Yields begin and end of each range of bytes that is copied."""
        at = 0
        for info in sorted(self.experts.values(), key=lambda info: info.offset):
            if at < info.offset:
                yield at, info.offset
            at = info.offset + info.num_bytes
        if at < self.num_bytes:
            yield at, self.num_bytes

    def kept_bytes(self) -> int:
        return sum(end - begin for begin, end in self.kept())

    def page_bytes(self) -> int:
        blocks = (info.shape[0] * (-(-region(info, 0)[1] // BLOCK_BYTES) + 1) for info in self.experts.values())
        return sum(blocks) * BLOCK_BYTES


def write_stub(source: str | Path, target: str | Path, report: StubReport = lambda _done, _total: None) -> WrittenStub:
    """Writes the stub of the model at `source` to `target`, and of a split one all its parts, which
    get `target`'s name with their numbers. `report` is called with the bytes copied and to copy.

    The names appear when their files are complete, the first part last, so that an interrupted stub
    is no model. Errors: CheckpointError and UnsupportedError of `gguf_experts`; ConfigError where
    `target` is there already, is no name for a GGUF file, or the disk has no room; DflashError
    where writing fails.
    """
    found = gguf_experts(source)
    checkpoint = found.checkpoint
    stubbed = {one.name: checkpoint.stored[one.name] for one in found.tensors}
    stubbed = {name: info for name, info in stubbed.items() if holds_experts(name, info)}
    if checkpoint.stub() is not None:
        raise CheckpointError(f"{checkpoint.path}: it is a stub already; copy it, or give the full file")
    if not any(region(info, 0)[1] >= LEAST_MARKED_BYTES for info in stubbed.values()):
        raise UnsupportedError(
            f"{checkpoint.path}: its experts have less than {LEAST_MARKED_BYTES} bytes each, too few to mark them; "
            "use the file itself"
        )
    parts = _plan(checkpoint, Path(target), stubbed)
    _check_room(parts)
    fingerprint = checkpoint.fingerprint()
    _write(parts, fingerprint, report)
    sizes = [os.stat(part.target) for part in parts]
    return WrittenStub(
        tuple(part.target for part in parts),
        sum(size.st_size for size in sizes),
        sum(size.st_blocks * 512 for size in sizes),
        len(stubbed),
        found.left_out,
    )


def _plan(checkpoint: Checkpoint, target: Path, stubbed: dict[str, TensorInfo]) -> list[_Part]:
    parts = []
    for index, (source, name) in enumerate(zip(checkpoint.files, _names(target, len(checkpoint.files)), strict=True)):
        if os.path.lexists(name):
            what = "is the file to make a stub of" if name.exists() and name.samefile(source) else "is there already"
            raise ConfigError(f"{name}: {what}; a stub is never written over a file, choose another name")
        own = {key: info for key, info in stubbed.items() if info.file == index}
        try:
            parts.append(_Part(source, name, source.stat().st_size, own))
        except OSError as error:
            raise CheckpointError(f"{source}: cannot be read: {error.strerror or error}") from None
    return parts


def _names(target: Path, count: int) -> list[Path]:
    if target.suffix != ".gguf":
        raise ConfigError(f"{target}: llama.cpp knows a GGUF file by its name; choose one that ends with .gguf")
    part = _PART.fullmatch(target.name)
    if count == 1:
        if part is not None:
            raise ConfigError(
                f"{target}: it is named like a part of a split model, but the model is one file; choose another name"
            )
        return [target]
    if part is not None and int(part[3]) != count:
        raise ConfigError(
            f"{target}: it is named like one of {int(part[3])} parts, but the model has {count}; choose another name"
        )
    stem = part[1] if part is not None else target.stem
    return [target.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def _check_room(parts: Sequence[_Part]) -> None:
    folder = parts[0].target.parent
    try:
        room = os.statvfs(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; make the folder first, or choose another") from None
    needed = sum(part.kept_bytes() + part.page_bytes() for part in parts)
    free = room.f_bavail * room.f_frsize
    if needed > free:
        raise ConfigError(f"{folder}: the stub takes {needed:,} bytes on disk, and {free:,} are free; choose another folder")


def _write(parts: Sequence[_Part], fingerprint: str, report: StubReport) -> None:
    total, done = sum(part.kept_bytes() for part in parts), 0
    made: list[tuple[Path, Path]] = []
    folder = parts[0].target.parent
    appeared: list[Path] = []
    is_whole = False
    try:
        for part in parts:
            name = folder / f".{part.target.name}.{secrets.token_hex(8)}.unfinished"
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            made.append((name, part.target))
            with open(descriptor, "wb", buffering=0) as out, part.source.open("rb", buffering=0) as source:
                # A hole reads as zeros and takes no room. The pages are all that is written in it.
                os.truncate(out.fileno(), part.num_bytes)
                _write_pages(out.fileno(), part, fingerprint)
                for begin, end in part.kept():
                    for at in range(begin, end, STEP_BYTES):
                        done += _copy(source.fileno(), out.fileno(), at, min(STEP_BYTES, end - at), part.source)
                        report(done, total)
                os.fsync(out.fileno())
        while made:
            name, target = made[-1]
            _appear(name, target)
            appeared.append(target)
            made.pop()
        _sync_folder(folder)
        is_whole = True
    except OSError as error:
        raise DflashError(f"{folder}: the stub cannot be written: {error.strerror or error}") from None
    finally:
        for path in (*(name for name, _ in made), *(() if is_whole else appeared)):
            path.unlink(missing_ok=True)


def _write_pages(descriptor: int, part: _Part, fingerprint: str) -> None:
    for name, info in part.experts.items():
        for expert in range(info.shape[0]):
            begin, length = region(info, expert)
            _put(descriptor, page(fingerprint, name, expert, length), begin)


def _copy(source: int, out: int, at: int, num_bytes: int, path: Path) -> int:
    left = num_bytes
    while left:
        data = os.pread(source, left, at)
        if not data:
            raise CheckpointError(f"{path}: ends at byte {at}; it was cut while the stub was written")
        _put(out, data, at)
        at += len(data)
        left -= len(data)
    return num_bytes


def _put(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count


def _appear(name: Path, target: Path) -> None:
    """Gives the finished file its name. A file that has got this name meanwhile stays what it
    is.
    """
    try:
        os.link(name, target)
    except FileExistsError:
        raise ConfigError(f"{target}: is there already; a stub is never written over a file, choose another name") from None
    except OSError:
        # Some file systems have no links; then only a moment remains in which a file could appear.
        if os.path.lexists(target):
            raise ConfigError(f"{target}: is there already; a stub is never written over a file") from None
        os.rename(name, target)
    else:
        os.unlink(name)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
