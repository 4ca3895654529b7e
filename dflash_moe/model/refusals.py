"""Turns what other libraries raise over a user's checkpoint into errors of ours.

transformers, torch and tokenizers raise whatever suits them (ValueError, KeyError, RecursionError,
validation errors of their own) when a configuration is wrong, and no list of these kinds stays
complete. So every call into them on behalf of a checkpoint goes through `refusing`.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_moe.errors import CheckpointError, DflashError, UnsupportedError, shown

# At most so many characters of a foreign message are quoted, because some print a whole
# configuration.
_MAX_QUOTED = 400


@contextmanager
def refusing(what: str, kind: type[DflashError] = UnsupportedError) -> Iterator[None]:
    """Turns any exception in the block that is not ours into `kind`, whose text begins with `what`
    and quotes the exception in one line.
    """
    try:
        yield
    except DflashError:
        raise
    except Exception as error:
        raise kind(f"{what}: {in_one_line(error)}") from error


def in_one_line(error: BaseException) -> str:
    """Returns the text of a foreign exception, cut to a length that fits a message. Its type is
    there too where it has no text, or is a KeyError, whose text is only the key.
    """
    text = " ".join(str(error).split())
    if not text or isinstance(error, KeyError):
        text = f"{type(error).__name__} {text}".rstrip()
    return text if len(text) <= _MAX_QUOTED else text[: _MAX_QUOTED - 3] + "..."


def is_file(path: Path) -> bool:
    """Says whether `path` is a file. Raises CheckpointError where the system refuses to say, for
    which `Path.is_file` raises OSError: the name is too long, or a folder may not be searched.
    """
    return stat.S_ISREG(_mode(path))


def is_folder(path: Path) -> bool:
    """Says whether `path` is a folder, with the errors of `is_file`."""
    return stat.S_ISDIR(_mode(path))


def _mode(path: Path) -> int:
    """Returns the mode of the file, 0 where there is none."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except (OSError, ValueError) as error:
        # A zero byte in the name is a ValueError.
        raise CheckpointError(f"checkpoint {shown(str(path))}: {getattr(error, 'strerror', None) or error}") from None
