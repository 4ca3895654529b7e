"""The file of keys with which clients ask: one a line, readable by its owner only.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from dflash_moe.errors import ConfigError
from dflash_moe.named_files import open_named

MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 1000
# A shorter one can be guessed.
LEAST_CHARACTERS = 16
# What travels in a header and in the password of Basic as it is.
_KEY = re.compile(rf"[!-~]{{{LEAST_CHARACTERS},512}}", re.ASCII)


def read_api_keys(path: Path) -> list[str]:
    """Returns the keys of a file; empty lines and those that begin with # are none. Raises
    ConfigError that names file and line, and never what stands there.
    """
    try:
        file = open_named(path)
    except OSError as error:
        raise ConfigError(
            f"--api-key-file {path}: {error.strerror}; `(umask 077; openssl rand -hex 32 > FILE)` makes one with a key"
        ) from None
    with file:
        status = os.fstat(file.fileno())
        if status.st_mode & 0o077:
            raise ConfigError(
                f"--api-key-file {path}: it has mode {status.st_mode & 0o777:04o}; only its owner may read it: chmod 600 {path}"
            )
        if status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(f"--api-key-file {path}: it belongs to uid {status.st_uid}, this process runs as {os.geteuid()}")
        raw = file.read(MAX_FILE_BYTES + 1)
    lines = raw.decode("utf-8", "replace").splitlines() if len(raw) <= MAX_FILE_BYTES else []
    found = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        if not _KEY.fullmatch(line):
            raise ConfigError(
                f"--api-key-file {path}: line {number} is no key: one has {LEAST_CHARACTERS}..512 letters, digits and signs of "
                "ASCII"
            )
        found.append(line)
    if not 1 <= len(found) <= MAX_KEYS:
        raise ConfigError(f"--api-key-file {path}: found {len(found)} keys, expected 1..{MAX_KEYS}, one a line")
    return found
