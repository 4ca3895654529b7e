"""Opens the files that a user names: topologies, keys, options, prompts, receipts, results,
checkpoints.

A name may lead to anything. Opening a FIFO would wait for its writer for ever, and a device may
have no end, so that only regular files are read.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_named(path: str | os.PathLike[str], *, to_keep: bool = False) -> BinaryIO:
    """Opens a regular file for reading, without waiting whatever it is; the caller closes it.
    With `to_keep` it is opened for writing too and made where it is missing, for this user alone.
    Raises OSError, whose `strerror` says what is there where that is no regular file, or that no
    file can have this path.
    """
    flags = os.O_RDWR | os.O_CREAT if to_keep else os.O_RDONLY
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
    except OSError as error:
        if error.errno == errno.ENXIO:  # nobody can open a socket by its name
            raise _is_no_file(stat.S_IFSOCK, path) from None
        raise
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "r+b" if to_keep else "rb")
    os.close(descriptor)
    raise _is_no_file(stat.S_IFMT(mode), path)


def read_named(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Reads a file of `open_named`, but no more than one byte beyond `max_bytes`, by which the
    caller knows that it is too large. Errors are those of `open_named`.
    """
    with open_named(path) as file:
        return file.read(max_bytes + 1)


def _is_no_file(kind: int, path: str | os.PathLike[str]) -> OSError:
    return OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')} and not a regular file", os.fspath(path))
