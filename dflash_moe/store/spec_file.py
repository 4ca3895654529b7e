"""The file of what was derived of a checkpoint's model, so that the next host need not derive it:
found by all that it was derived from, and by what derived it.

The values themselves are checked by who uses them (`kept_spec`), so that workers and `upkeep` need
nothing of the model's code.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from blake3 import blake3

from dflash_moe import model
from dflash_moe.errors import CheckpointError
from dflash_moe.model.checkpoint_files import FileState, checkpoint_files
from dflash_moe.store import closed_json
from dflash_moe.store.closed_file import DIGEST, derived_name, read_derived, write_derived
from dflash_moe.store.folder import SPECS, CacheFolder
from dflash_moe.store.panel_index import FILES, MODEL_PATH
from dflash_moe.version import __version__

SPEC_VERSION = 1
# A layer takes 700 bytes, and a model has 4,096 at most.
MAX_SPEC_BYTES = 8 << 20

VERSION = closed_json.matching(r"[!-~]{1,128}")
_DERIVED_BY = {"dflash_moe": VERSION, "code": DIGEST, "transformers": VERSION, "torch": VERSION}
_SCHEMA = {
    "version": closed_json.whole(SPEC_VERSION, SPEC_VERSION),
    "path": MODEL_PATH,
    "files": FILES,
    "asked_dtype": closed_json.matching(r"[a-z0-9]{0,16}"),
    "derived_by": lambda value: bool(closed_json.fields(value, _DERIVED_BY, "derived_by")),
    "spec": lambda value: type(value) is dict,
}


@dataclass(frozen=True)
class SpecKey:
    """What a spec was derived from, and by what. `files` are all that were read: the weights, the
    index and every JSON file beside them, among which is config.json. `asked_dtype` is empty where
    the checkpoint's own was asked for.
    """

    path: str  # absolute, with its links, because a hub's cache has links to files of other names
    files: tuple[FileState, ...]
    asked_dtype: str
    derived_by: dict[str, str]

    @classmethod
    def of(cls, path: Path, dtype: str | None) -> SpecKey | None:
        """Returns the key of a checkpoint as its files are now, None where that cannot be said: a
        file is missing, or the installed transformers may change without another version.
        """
        try:
            derived_by, files = deriving_code(), checkpoint_states(path)
        except (OSError, ValueError, CheckpointError):
            return None  # who opens the checkpoint says what is wrong with it
        return None if derived_by is None else cls(os.path.abspath(path), files, dtype or "", derived_by)

    @cached_property
    def name(self) -> str:
        """The name of the file."""
        return derived_name(self._fields())

    def is_current(self) -> bool:
        """Says whether the same would be derived again: the files are as they were, and so is the
        code. Where the system does not say, it counts as that.
        """
        return self.derived_by == deriving_code() and are_as_kept(self.path, self.files)

    def _fields(self) -> dict[str, Any]:
        return {**asdict(self), "files": [list(one) for one in self.files], "version": SPEC_VERSION}


@dataclass(frozen=True, slots=True)
class SpecFile:
    """A file that is whole and of this form. What stands in `spec` is not checked yet."""

    key: SpecKey
    spec: dict[str, Any]


def deriving_code() -> dict[str, str] | None:
    """Returns what decides, beside the checkpoint, which spec is derived: the versions of this
    package, transformers and torch, none of which it imports, and the BLAKE3 of this package's own
    code for it, which changes without another version where somebody works on it. None as
    `installed_versions`.
    """
    versions = installed_versions("transformers", "torch")
    if versions is None:
        return None
    return {"code": sources_digest(Path(next(iter(model.__path__)))), **versions}


def installed_versions(*packages: str) -> dict[str, str] | None:
    """Returns the versions of this package and of others, which are not imported. None where one is
    not installed, or transformers is a version under development, whose code changes without
    another version.
    """
    import importlib.metadata  # which workers, who import this file, would pay for and not use

    try:
        versions = {name: importlib.metadata.version(name) for name in packages}
    except importlib.metadata.PackageNotFoundError:
        return None
    if ".dev" in versions.get("transformers", ""):
        return None
    return {"dflash_moe": __version__, **versions}


def sources_digest(room: Path) -> str:
    """Returns the BLAKE3 of all Python code in a folder. Raises OSError."""
    digest = blake3()
    for source in sorted(room.rglob("*.py")):
        text = source.read_bytes()
        digest.update(f"{source.relative_to(room)} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()


def read_spec(folder: CacheFolder, name: str) -> SpecFile | None:
    """Returns a file, None where there is none. One that is damaged counts as none; a line of the
    log says so, and the next writer replaces it.
    """

    def made_of(kept: dict[str, Any]) -> tuple[str, SpecFile]:
        files = tuple(FileState(*row) for row in kept["files"])
        key = SpecKey(kept["path"], files, kept["asked_dtype"], kept["derived_by"])
        return key.name, SpecFile(key, kept["spec"])

    return read_derived(folder, SPECS, name, MAX_SPEC_BYTES, _SCHEMA, made_of)


def write_spec(folder: CacheFolder, kept: SpecFile) -> None:
    """Writes or replaces a file, unless nobody would read it for its length. The caller holds the
    lock of the one writer. Raises DflashError.
    """
    fields = {**kept.key._fields(), "spec": kept.spec}
    if FILES(fields["files"]):
        write_derived(folder, SPECS, kept.key.name, MAX_SPEC_BYTES, fields)


def are_as_kept(path: str, files: tuple[FileState, ...]) -> bool:
    """Says whether the files of the checkpoint at `path` are as they were looked at. Where the
    system does not say, they are.
    """
    try:
        return checkpoint_states(Path(path)) == files
    except (FileNotFoundError, NotADirectoryError, CheckpointError):
        return False
    except OSError:
        return True


def checkpoint_states(path: Path) -> tuple[FileState, ...]:
    """Looks at all files of which a host reads more than a tokenizer: the weights, the index and
    every JSON file beside them. Raises CheckpointError and OSError."""
    files = checkpoint_files(path)
    beside = sorted(path.glob("*.json")) if path.is_dir() else []
    return tuple(FileState.of(file) for file in dict.fromkeys((*files, *beside)))
