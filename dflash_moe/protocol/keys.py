"""Files that hold a key: 64 hexadecimal digits, readable by their owner only. A key never appears
in arguments or YAML, which other users of the machine can see.

A group's key is shared by a host and all its workers. A worker that registers may have a key of its
own, which comes from the group's and its name; a second line of its file then says `worker NAME`.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from dflash_moe.errors import ConfigError, shown
from dflash_moe.named_files import open_named
from dflash_moe.protocol.auth import KEY_BYTES
from dflash_moe.protocol.encryption import derive
from dflash_moe.topology.spec import NAME_FORM, is_worker_name

# A key that was drawn has fewer different bytes with a chance of 2^-122.
LEAST_DIFFERENT = 8
# A name has at most 63 characters, so that a file which is longer than this is no key file.
MAX_FILE_BYTES = 2 * KEY_BYTES + 128
_OWN_KEY = b"dflash_moe worker key v1"
_OWNER_LINE = "worker "


@dataclass(frozen=True, slots=True)
class FileKey:
    """The key of a file. `worker` names whose own it is; it is empty for a group's key."""

    key: bytes = field(repr=False)
    worker: str


def worker_key(group_key: bytes, worker: str) -> bytes:
    """Returns the 32 bytes of the key that is `worker`'s own in a group. Nobody can find the
    group's key, or another worker's, from it.
    """
    return derive(group_key, _OWN_KEY + b"\0" + worker.encode())


def write_key_file(path: Path) -> None:
    """Creates `path` with a fresh random key and mode 0600. Raises ConfigError when it exists or
    cannot be created.
    """
    _write(path, secrets.token_hex(KEY_BYTES) + "\n")


def write_worker_key_file(path: Path, *, worker: str, group: Path) -> None:
    """Creates `path` with the key that is `worker`'s own in the group whose key file is `group`.
    Raises ConfigError as `write_key_file` and `read_key_file` do, and for what is no worker's name.
    """
    if not is_worker_name(worker):
        raise ConfigError(f"--worker {shown(worker)} is no name of a worker; allowed: {NAME_FORM}")
    _write(path, own_key_text(read_key_file(group), worker))


def own_key_text(group_key: bytes, worker: str) -> str:
    """Returns what the file says that holds the key which is `worker`'s own in a group."""
    return f"{worker_key(group_key, worker).hex()}\n{_OWNER_LINE}{worker}\n"


def _write(path: Path, text: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"key file {path} exists; remove it first if its key shall be replaced") from None
    except OSError as error:
        raise ConfigError(f"key file {path} cannot be created: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o600)
            file.write(text)
    except OSError as error:
        # Half a key would stand in the way of the next attempt.
        with contextlib.suppress(OSError):
            path.unlink()
        raise ConfigError(f"key file {path} cannot be written: {error.strerror}") from None


def read_key_file(path: Path) -> bytes:
    """Returns a group's key of 32 bytes. Raises ConfigError when the file is missing, readable by
    others, of another user, holds the key of a worker alone, or does not hold 64 hexadecimal
    digits, or so few different ones that they were not drawn.
    """
    found = read_any_key_file(path)
    if found.worker:
        raise ConfigError(
            f"key file {path} is worker {found.worker}'s own, which is good for `dflash-moe worker --register` under "
            "that name alone; give the group's key file, from which it was made"
        )
    return found.key


def read_any_key_file(path: Path) -> FileKey:
    """Returns a group's key or a worker's own. Errors are those of `read_key_file`."""
    try:
        file = open_named(path)
    except OSError as error:
        to_make = path if isinstance(error, FileNotFoundError) else "FILE"
        raise ConfigError(
            f"key file {path} cannot be read: {error.strerror}; `dflash-moe key make {to_make}` makes one"
        ) from None
    with file:
        status = os.fstat(file.fileno())
        if status.st_mode & 0o077:
            mode = f"{status.st_mode & 0o777:04o}"
            raise ConfigError(f"key file {path} has mode {mode}; only its owner may read it: chmod 600 {path}")
        if status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(f"key file {path} belongs to uid {status.st_uid}, this process runs as {os.geteuid()}")
        try:
            text = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"key file {path} cannot be read: {error.strerror}") from None
    key, worker = _parse(text)
    if len(key) != KEY_BYTES:
        digits = 2 * KEY_BYTES
        raise ConfigError(f"key file {path} must hold {digits} hexadecimal digits; `dflash-moe key make FILE` writes one")
    if len(set(key)) < LEAST_DIFFERENT:
        raise ConfigError(
            f"key file {path} repeats a few digits, which anybody can guess; `dflash-moe key make FILE` writes a random key"
        )
    return FileKey(key, worker)


def _parse(text: bytes) -> tuple[bytes, str]:
    """Returns the key of a file's text, empty where that is no key file's, and whose it is."""
    try:
        digits, _, rest = text.decode("ascii").strip().partition("\n")
        key = bytes.fromhex(digits)
    except ValueError:
        return b"", ""
    worker = rest.removeprefix(_OWNER_LINE)
    if len(text) > MAX_FILE_BYTES or (rest and (worker == rest or not is_worker_name(worker))):
        return b"", ""
    return key, worker
