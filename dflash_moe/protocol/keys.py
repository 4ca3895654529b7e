"""Files that hold the shared key: 64 hexadecimal digits, readable by their owner only. A key never
appears in arguments or YAML, which other users of the machine can see.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from dflash_moe.errors import ConfigError
from dflash_moe.named_files import open_named
from dflash_moe.protocol.auth import KEY_BYTES

# A key that was drawn has fewer different bytes with a chance of 2^-122.
LEAST_DIFFERENT = 8


def write_key_file(path: Path) -> None:
    """Creates `path` with a fresh random key and mode 0600. Raises ConfigError when it exists or
    cannot be created.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"key file {path} exists; remove it first if its key shall be replaced") from None
    except OSError as error:
        raise ConfigError(f"key file {path} cannot be created: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o600)
            file.write(secrets.token_hex(KEY_BYTES) + "\n")
    except OSError as error:
        # Half a key would stand in the way of the next attempt.
        with contextlib.suppress(OSError):
            path.unlink()
        raise ConfigError(f"key file {path} cannot be written: {error.strerror}") from None


def read_key_file(path: Path) -> bytes:
    """Returns the key of 32 bytes. Raises ConfigError when the file is missing, readable by others,
    of another user, or does not hold 64 hexadecimal digits, or so few different ones that they
    were not drawn.
    """
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
            text = file.read(2 * KEY_BYTES + 64).strip()
        except OSError as error:
            raise ConfigError(f"key file {path} cannot be read: {error.strerror}") from None
    try:
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        digits = 2 * KEY_BYTES
        raise ConfigError(f"key file {path} must hold {digits} hexadecimal digits; `dflash-moe key make FILE` writes one")
    if len(set(key)) < LEAST_DIFFERENT:
        raise ConfigError(
            f"key file {path} repeats a few digits, which anybody can guess; `dflash-moe key make FILE` writes a random key"
        )
    return key
