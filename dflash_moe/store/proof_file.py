"""The file of what a host proved of a checkpoint's model, so that the next start need not prove it
again: found by all on which the outcome of a proof depends.

The outcomes themselves are checked by who uses them (forward/kept_proofs.py), so that `upkeep`
needs nothing of the model's code.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from blake3 import blake3

from dflash_moe import _core, model
from dflash_moe.errors import CheckpointError
from dflash_moe.model.checkpoint_files import FileState
from dflash_moe.store import closed_json
from dflash_moe.store.closed_file import DIGEST, derived_name, read_derived, write_derived
from dflash_moe.store.folder import PROOFS, CacheFolder
from dflash_moe.store.panel_index import FILES, MODEL_PATH
from dflash_moe.store.spec_file import VERSION, are_as_kept, checkpoint_states, installed_versions, sources_digest

PROOF_VERSION = 1
# A layer takes 200 bytes and a reason more, and a model has 4,096 layers at most.
MAX_PROOF_BYTES = 8 << 20

_PACKAGES = ("transformers", "torch", "numpy")
_PROVED_BY = {"dflash_moe": VERSION, "code": DIGEST, "machine": DIGEST, **dict.fromkeys(_PACKAGES, VERSION)}
_SCHEMA = {
    "version": closed_json.whole(PROOF_VERSION, PROOF_VERSION),
    "path": MODEL_PATH,
    "model": closed_json.matching(r"[!-~]{1,128}"),
    "files": FILES,
    "proved_by": lambda value: bool(closed_json.fields(value, _PROVED_BY, "proved_by")),
    "under": DIGEST,
    "proofs": lambda value: type(value) is dict,
}
# What the kernel says of a processor, but for what changes from one moment to the next.
_CPU_LINES = (
    "vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags", "bugs", "CPU implementer",
    "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features",
)  # fmt: skip
_CPUS, _MACHINE_ID = Path("/proc/cpuinfo"), Path("/etc/machine-id")


@dataclass(frozen=True)
class ProofKey:
    """What a proof was about, and what made it. `files` are those of a `SpecKey`, and `under` is
    the BLAKE3 of what only the host itself knows: its settings, how torch was built, and what
    became of each module.
    """

    path: str  # absolute, with its links
    model: str  # the fingerprint
    files: tuple[FileState, ...]
    proved_by: dict[str, str]
    under: str = "0" * 64

    @classmethod
    def of(cls, path: Path, fingerprint: str) -> ProofKey | None:
        """Returns the key of a checkpoint as its files are now, without `under`. None where it
        cannot be said, as `SpecKey.of`.
        """
        try:
            proved_by, files = proving_code(), checkpoint_states(path)
        except (OSError, ValueError, CheckpointError):
            return None  # who opens the checkpoint says what is wrong with it
        return None if proved_by is None else cls(os.path.abspath(path), fingerprint, files, proved_by)

    @cached_property
    def name(self) -> str:
        """The name of the file."""
        return derived_name(self.fields())

    def is_current(self) -> bool:
        """Says whether a start on this machine may look for it: the checkpoint's files are as they
        were, and so are code and machine. Where the system does not say, it counts as that.
        """
        return self.proved_by == proving_code() and are_as_kept(self.path, self.files)

    def fields(self) -> dict[str, Any]:
        """Returns all of it for JSON."""
        return {**asdict(self), "files": [list(one) for one in self.files], "version": PROOF_VERSION}


@dataclass(frozen=True, slots=True)
class ProofFile:
    """A file that is whole and of this form. What stands in `proofs` is not checked yet."""

    key: ProofKey
    proofs: dict[str, Any]


def proving_code() -> dict[str, str] | None:
    """Returns what decides, beside the checkpoint and the host's settings, how a proof ends: this
    package's code, compiled and not, the versions of what it computes with, none of which it
    imports, and the machine. None as `installed_versions`. Raises OSError.
    """
    versions = installed_versions(*_PACKAGES)
    if versions is None:
        return None
    code = blake3(sources_digest(Path(next(iter(model.__path__))).parent).encode())
    code.update(Path(_core.__file__).read_bytes())
    return {"code": code.hexdigest(), "machine": machine_digest(), **versions}


def machine_digest() -> str:
    """Returns the BLAKE3 of which machine this is, by its system's id, of which processors it has,
    with their instruction sets and microcode, and of its libc and Python. Empty texts stand for
    what cannot be read.
    """
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    lines = {line for line in _text(_CPUS).splitlines() if line.partition(":")[0].strip() in _CPU_LINES}
    said = [platform.machine(), libc or "", platform.python_version(), _text(_MACHINE_ID), *sorted(lines)]
    return blake3("\n".join(said).encode()).hexdigest()


def read_proofs(folder: CacheFolder, name: str) -> ProofFile | None:
    """Returns a file, None where there is none. One that is damaged counts as none; a line of the
    log says so, and the next writer replaces it.
    """

    def made_of(kept: dict[str, Any]) -> tuple[str, ProofFile]:
        files = tuple(FileState(*row) for row in kept["files"])
        key = ProofKey(kept["path"], kept["model"], files, kept["proved_by"], kept["under"])
        return key.name, ProofFile(key, kept["proofs"])

    return read_derived(folder, PROOFS, name, MAX_PROOF_BYTES, _SCHEMA, made_of)


def write_proofs(folder: CacheFolder, kept: ProofFile) -> None:
    """Writes or replaces a file, unless nobody would read it for its length. The caller holds the
    lock of the one writer. Raises DflashError.
    """
    fields = {**kept.key.fields(), "proofs": kept.proofs}
    if FILES(fields["files"]):
        write_derived(folder, PROOFS, kept.key.name, MAX_PROOF_BYTES, fields)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
