"""Files of JSON of one form (`closed_json`) in the folder: read whole, or counted as missing. What
is derived of a checkpoint is in files that have a digest of themselves, so that a wrong bit counts
as damage and not as another answer.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from blake3 import blake3

from dflash_moe.config.cache import CacheSettings
from dflash_moe.errors import CheckpointError, DflashError
from dflash_moe.store import closed_json
from dflash_moe.store.folder import CacheFolder, default_path
from dflash_moe.store.panel_file import read_at

log = logging.getLogger(__name__)

Found = TypeVar("Found")

JSON_SUFFIX = ".json"
DIGEST = closed_json.matching(r"[0-9a-f]{64}")
# Half of a BLAKE3, which nobody finds a second text for, names what a file was derived from.
_DIGITS = 32
# Whoever works on this package makes another file of each model with each change of its code. Those
# used last stay, of more models than anybody starts in turn.
MAX_DERIVED = 64


def read_closed(
    folder: CacheFolder, inside: str, name: str, max_bytes: int, made_of: Callable[[Any], Found],
) -> Found | None:  # fmt: skip
    """Returns what `made_of` makes of the JSON in a file, None where there is no file. One that
    nobody but its owner should have changed and somebody could, that is longer than `max_bytes`, or
    of which `made_of` raises ValueError counts as none; a line of the log says so, and the next
    writer replaces it.
    """
    try:
        descriptor = folder.open_file(inside, name)
    except FileNotFoundError:
        return None
    except (CheckpointError, OSError) as error:
        log.warning("a file of the cache is left alone: %s", str(error))
        return None
    try:
        num_bytes = os.fstat(descriptor).st_size
        if num_bytes > max_bytes:
            raise ValueError(f"it has {num_bytes} bytes, at most {max_bytes} are read")
        return made_of(closed_json.decode(bytes(read_at(descriptor, num_bytes, 0))))
    except (ValueError, OSError) as error:
        log.warning("%s counts as missing, and is written anew: %s", folder.path / inside / name, str(error))
        return None
    finally:
        os.close(descriptor)


def write_closed(folder: CacheFolder, inside: str, name: str, text: bytes) -> None:
    """Writes or replaces a file with what `closed_json.encode` gave. The caller holds the lock of
    the one writer. Raises DflashError.
    """
    with folder.new_file(inside, len(text)) as file:
        file.write_at(0, text)
        file.publish(name)


def derived_name(key: Mapping[str, Any]) -> str:
    """Returns the name of the file of what was derived from all that `key` says."""
    return blake3(closed_json.encode(key)).hexdigest()[:_DIGITS] + JSON_SUFFIX


def derived_names(folder: CacheFolder, inside: str) -> list[str]:
    """Returns the names of all files of a subfolder that was written by `write_derived`. Raises
    DflashError.
    """
    return sorted(name for name in folder.sizes(inside) if name.endswith(JSON_SUFFIX))


def read_derived(
    folder: CacheFolder, inside: str, name: str, max_bytes: int, schema: Mapping[str, closed_json.Check],
    made_of: Callable[[dict[str, Any]], tuple[str, Found]],
) -> Found | None:  # fmt: skip
    """As `read_closed`, of a file by `write_derived`. `made_of` gets its fields, which pass the
    schema, and returns with what it makes of them the name that such a file has.
    """

    def checked(value: Any) -> Found:
        kept = closed_json.fields(value, {**schema, "digest": DIGEST}, "it")
        digest = kept.pop("digest")
        if (sum_found := blake3(closed_json.encode(kept)).hexdigest()) != digest:
            raise ValueError(f"the BLAKE3 of what it says is {sum_found}, expected {digest}")
        own_name, found = made_of(kept)
        if own_name != name:
            raise ValueError(f"it is that of {own_name}")
        return found

    return read_closed(folder, inside, name, max_bytes, checked)


def write_derived(folder: CacheFolder, inside: str, name: str, max_bytes: int, fields: Mapping[str, Any]) -> None:
    """Writes or replaces a file, unless nobody would read it for its length, and removes those used
    least recently. The caller holds the lock of the one writer. Raises DflashError.
    """
    text = closed_json.encode({**fields, "digest": blake3(closed_json.encode(fields)).hexdigest()})
    if len(text) > max_bytes:
        return
    write_closed(folder, inside, name, text)
    for old in sorted(derived_names(folder, inside), key=lambda one: folder.used_at(inside, one))[:-MAX_DERIVED]:
        folder.remove(inside, old)


@contextmanager
def opened_for_derived(cache: CacheSettings) -> Iterator[CacheFolder | None]:
    """Gives the block the folder, None where it will not do. Whoever keeps panels there says aloud
    why; without it a host is late by seconds, and nothing else.
    """
    try:
        folder = CacheFolder.open(cache.path or default_path(), allow_network=cache.panels == "on")
    except DflashError as error:
        log.info("what is derived of a model is not kept: %s", str(error))
        yield None
        return
    try:
        yield folder
    finally:
        folder.close()
