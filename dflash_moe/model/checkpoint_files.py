"""Finds the files that make up a checkpoint: safetensors with or without an index, a GGUF file, or
a GGUF file split into several.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from dflash_moe.errors import CheckpointError, DflashError, shown
from dflash_moe.model.formats.gguf_header import is_gguf
from dflash_moe.model.formats.safetensors_header import MAX_HEADER_BYTES
from dflash_moe.model.refusals import is_file
from dflash_moe.named_files import read_named

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_SPLITS = 999
# No file system of Linux takes a longer name.
MAX_NAME_BYTES = 255

# A file that was changed so recently may change again without another time of change: the kernel
# dates changes by ticks of 1 to 10 ms.
SETTLED_NS = 50_000_000

_SPLIT = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")


def find_gguf(path: Path) -> tuple[Path, ...]:
    """Returns the GGUF files that `path` means: itself and the other parts of a split file, or
    those of a directory without safetensors, or none.

    Raises CheckpointError when a part of a split file is missing, or a directory has several
    models.
    """
    if is_file(path):
        if not is_gguf(path):
            raise CheckpointError(f"checkpoint {path}: not a GGUF file; pass one, or the directory that holds config.json")
        return _with_sisters(path)
    if is_file(path / INDEX_NAME) or is_file(path / SINGLE_NAME):
        return ()
    models = sorted({_with_sisters(found) for found in _matching(path, "*.gguf") if is_file(found)})
    if len(models) > 1:
        names = ", ".join(model[0].name for model in models[:4]) + (", ..." if len(models) > 4 else "")
        raise CheckpointError(f"checkpoint {path}: has {len(models)} GGUF models ({names}); pass the path of one file")
    return models[0] if models else ()


def checkpoint_path(path: Path) -> Path:
    """Returns the `Checkpoint.path` of what somebody calls `path`: the folder, or the first part of
    a GGUF model. Raises CheckpointError as `find_gguf`.
    """
    parts = find_gguf(path)
    return parts[0] if parts else path


def checkpoint_files(path: Path) -> tuple[Path, ...]:
    """Returns every file with weights, and the index where there is one. Raises CheckpointError
    where one is missing.
    """
    if parts := find_gguf(path):
        return parts
    files, listed = list_safetensors(path)
    return (*files, path / INDEX_NAME) if listed else files


def list_safetensors(directory: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
    """Returns the weight files, and for each tensor the file that the index names, which is empty
    without an index. Raises CheckpointError.
    """
    if is_file(directory / INDEX_NAME):
        listed = read_json(directory / INDEX_NAME, MAX_HEADER_BYTES).get("weight_map")
        if type(listed) is not dict or not listed:
            raise CheckpointError(f"{directory / INDEX_NAME}: weight_map is missing or empty")
        for name, file_name in listed.items():
            if not _is_file_name(file_name):
                raise CheckpointError(
                    f"{directory / INDEX_NAME}: tensor {shown(name)} is in {shown(file_name)}, not a file name"
                )
        names = sorted(set(listed.values()))
        missing = [name for name in names if not is_file(directory / name)]
        if missing:
            raise CheckpointError(
                f"checkpoint {directory}: {len(missing)} of {len(names)} weight files are missing, first {missing[0]}; "
                "download or copy them again"
            )
        return tuple(directory / name for name in names), listed
    if is_file(directory / SINGLE_NAME):
        return (directory / SINGLE_NAME,), {}
    raise CheckpointError(f"checkpoint {directory}: {_what_is_there(directory)}")


def _is_file_name(value: Any) -> bool:
    """Says whether this can be the name of a file in the checkpoint's folder: it is no path, and no
    longer than Linux takes one.
    """
    if type(value) is not str or value != os.path.basename(value) or value in ("", ".", "..") or "\0" in value:
        return False
    try:
        return len(value.encode("utf-8")) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        # JSON can spell half of a surrogate pair, which no file name can hold.
        return False


def _matching(directory: Path, pattern: str) -> list[Path]:
    """Returns the entries of a folder that match this pattern. Raises CheckpointError where the
    folder cannot be listed, which `glob` would take for an empty one.
    """
    try:
        os.listdir(directory)
    except OSError as error:
        raise CheckpointError(f"checkpoint {directory}: cannot be listed: {error.strerror}") from None
    return list(directory.glob(pattern))


def read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """Reads a JSON map from a file of at most `max_bytes`. Raises CheckpointError naming the
    file.
    """
    try:
        text = read_named(path, max_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(text) > max_bytes:
        raise CheckpointError(f"{path}: over {max_bytes} bytes, which no such file needs; it is not what its name says")
    try:
        value = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if type(value) is not dict:
        raise CheckpointError(f"{path}: found a {type(value).__name__}, expected a map")
    return value


def _with_sisters(path: Path) -> tuple[Path, ...]:
    """Returns all parts of the split file to which `path` belongs, in order."""
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return (path,)
    count = int(split[3])
    if not 1 <= count <= MAX_SPLITS or not 1 <= int(split[2]) <= count:
        raise CheckpointError(f"checkpoint {path}: a part {int(split[2])} of {count} cannot be; parts are numbered from 1")
    parts = tuple(path.with_name(f"{split[1]}-{number:05}-of-{split[3]}.gguf") for number in range(1, count + 1))
    missing = [part.name for part in parts if not is_file(part)]
    if missing:
        raise CheckpointError(
            f"checkpoint {path}: {len(missing)} of {count} parts are missing, first {missing[0]}; download them into the same "
            "folder, and leave the parts their names, by which they are found"
        )
    return parts


def _what_is_there(directory: Path) -> str:
    if not _matching(directory, "*"):
        return "the folder is empty; pass the folder that config.json and *.safetensors are in, or a GGUF file"
    wanted = f"neither {SINGLE_NAME} nor {INDEX_NAME} nor a GGUF file found"
    if _matching(directory, "*.safetensors"):
        return f"{wanted}; there are other safetensors files, but without the index it is not known what belongs together"
    if any(_matching(directory, pattern) for pattern in ("pytorch_model*.bin", "*.pt", "*.pth")):
        return f"{wanted}, only pickled weights, which are never read; save the model again with safe_serialization"
    if is_file(directory / "config.json"):
        return f"{wanted}: config.json is there without the weights; download the whole folder again"
    return f"{wanted}; pass the folder that config.json and *.safetensors are in, or a GGUF file"


class FileState(NamedTuple):
    """What tells one state of a file from another. Nobody can set when its entry was changed last.
    The times are in nanoseconds since 1970.
    """

    name: str  # without its folder
    device: int
    inode: int
    num_bytes: int
    contents_ns: int
    entry_ns: int

    @classmethod
    def of(cls, file: Path) -> FileState:
        """Looks at a file, without opening it. Raises OSError."""
        one = os.stat(file)
        return cls(file.name, one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns)


def are_settled(states: Iterable[FileState]) -> bool:
    """Says whether every change after these states, which were looked at just now, will show in
    others.
    """
    now = time.time_ns()
    return all(state.entry_ns <= now - SETTLED_NS for state in states)


class SeenFiles:
    """The files of a checkpoint as they were at one time: device, inode, size, and when contents
    and entry were changed last. Nobody can set the last of these. Any thread may ask.
    """

    def __init__(self, model: Path) -> None:
        """Looks at every file with weights, and at the index where there is one. Raises
        CheckpointError where one is missing or cannot be read.
        """
        self._model = model
        self._files = checkpoint_files(model)
        seen = self._look()
        if seen is None:
            raise CheckpointError(f"checkpoint {model}: one of its files is gone; copy them again")
        self.states: Final = seen

    def are_unchanged(self) -> bool:
        """Says whether the files are what they were. It opens none of them, and takes no
        descriptor. Raises DflashError where the system does not say, which says nothing about them.
        """
        return self._look() == self.states

    def _look(self) -> tuple[FileState, ...] | None:
        try:
            return tuple(FileState.of(file) for file in self._files)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            text = f"checkpoint {self._model}: {error.filename} cannot be looked at: {error.strerror}"
            raise DflashError(text, code="system") from None
