"""The index of a checkpoint: which file of panels holds which experts. There is one for each model
fingerprint and state of the checkpoint's files, so that who finds an index of the files as they are
now has found the panels without reading a weight.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from dflash_moe.model.checkpoint_files import FileState
from dflash_moe.store import closed_json
from dflash_moe.store.closed_file import read_closed, write_closed
from dflash_moe.store.folder import INDEX, CacheFolder

INDEX_VERSION = 1
INDEX_SUFFIX = ".json"
# An entry takes 250 bytes; panels of 4 TB have 65,536.
MAX_INDEX_BYTES = 32 << 20
# Half of a BLAKE3, which nobody finds a second text for, names models and states of files.
_DIGITS = 32

_NUMBER = closed_json.whole(-(1 << 63), (1 << 64) - 1)
_FILE_NAME = closed_json.matching(r"(?!\.{1,2}\Z)[^/\0]{1,255}")
MODEL_PATH = closed_json.matching(r"/[^\0]{0,4095}")
# The states of a checkpoint's files.
FILES = closed_json.list_of(closed_json.row_of(_FILE_NAME, *[_NUMBER] * 5), 1, 1024)
_PANELS = {
    "key": closed_json.matching(r"[0-9a-f]{64}/[0-9]{1,8}\+[0-9]{1,4}/[0-9a-z_-]{1,160}"),
    "name": closed_json.matching(r"[0-9a-f]{64}\.panels"),
}
_SCHEMA = {
    "version": closed_json.whole(INDEX_VERSION, INDEX_VERSION),
    "model": closed_json.matching(r"[!-~]{1,128}"),
    "path": MODEL_PATH,
    "files": FILES,
    "panels": lambda value: (
        type(value) is dict and all(map(_PANELS["key"], value)) and all(map(_PANELS["name"], value.values()))
    ),
}


@dataclass(frozen=True, slots=True)
class PanelIndex:
    """The panels of one checkpoint as its files are, or were. `path` is where it was found, for
    people and to see whether it is still there.
    """

    model: str
    path: str
    files: tuple[FileState, ...]
    # Names of files by the keys of groups.
    panels: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the file that holds this."""
        states = blake3(closed_json.encode([list(one) for one in self.files])).hexdigest()
        return f"{model_digits(self.model)}-{states[:_DIGITS]}{INDEX_SUFFIX}"

    def is_current(self) -> bool:
        """Says whether the checkpoint's files are as they were. Where the system does not say, they
        count as that.
        """
        path = Path(self.path)
        folder = path if path.is_dir() else path.parent
        try:
            return all(FileState.of(folder / one.name) == one for one in self.files)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True


def model_digits(model: str) -> str:
    """Returns that with which the names of all indexes of a model begin."""
    return blake3(model.encode()).hexdigest()[:_DIGITS]


def index_names(folder: CacheFolder, model: str | None = None) -> list[str]:
    """Returns the names of all indexes, or those of a model. Raises DflashError."""
    begin = "" if model is None else f"{model_digits(model)}-"
    return sorted(name for name in folder.sizes(INDEX) if name.startswith(begin) and name.endswith(INDEX_SUFFIX))


def read_index(folder: CacheFolder, name: str) -> PanelIndex | None:
    """Returns an index, None where there is none. One that is damaged counts as none; a line of the
    log says so, and the next writer replaces it.
    """

    def made_of(value: Any) -> PanelIndex:
        kept = closed_json.fields(value, _SCHEMA, "it")
        found = PanelIndex(kept["model"], kept["path"], tuple(FileState(*row) for row in kept["files"]), kept["panels"])
        if found.name != name:
            raise ValueError(f"it is that of {found.name}")
        return found

    return read_closed(folder, INDEX, name, MAX_INDEX_BYTES, made_of)


def read_all(folder: CacheFolder) -> Iterator[tuple[str, PanelIndex]]:
    """Yields each index that can be read with its name."""
    for name in index_names(folder):
        if (found := read_index(folder, name)) is not None:
            yield name, found


def write_index(folder: CacheFolder, index: PanelIndex) -> None:
    """Writes or replaces an index. The caller holds the lock of the one writer. Raises
    DflashError.
    """
    fields = {**asdict(index), "version": INDEX_VERSION, "files": [list(one) for one in index.files]}
    write_closed(folder, INDEX, index.name, closed_json.encode(fields))
