"""The files of `dflash-moe chat`: texts that are put before a question, conversations that were
saved, and the file with what was typed before.

A person names them, so that whatever lies there gets one sentence: a pipe that nobody writes into
is refused before it is read, and a conversation has the fields below and no others.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from dflash_moe.cli import options
from dflash_moe.errors import ConfigError, shown
from dflash_moe.named_files import open_named, read_named

# A longest context of a million tokens has about 4 MB of text.
MAX_TEXT_BYTES = 16 << 20
FORMAT, VERSION = "dflash-moe conversation", 1
FIELDS = ("format", "version", "messages")
MESSAGE_FIELDS = ("role", "content")
# What was typed is cut back to the newer half when a chat begins and the file is larger.
MAX_TYPED_BYTES = 1 << 20
TYPED_PLACE = Path("dflash-moe") / "chat_history"
# An entry of the file begins with this line (prompt_toolkit.history.FileHistory).
_ENTRY = b"\n# "
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def decoded(raw: bytes, origin: str) -> str:
    """Returns bytes as text. Those that are no UTF-8 are replaced, which is said."""
    text = raw.decode("utf-8", "replace")
    count = text.count(_REPLACEMENT) - raw.count(_REPLACEMENT.encode())
    if count:
        places = f"in {count:,} places" if count > 1 else "in one place"
        options.say(f"{origin}: not UTF-8 text {places}, where {_REPLACEMENT} stands now")
    return text


def read_text(path: Path) -> str:
    """Returns the text of a file. Raises ConfigError for what is none, cannot be read or is larger
    than any context.
    """
    return decoded(_read(path), str(path)).removeprefix("\N{BYTE ORDER MARK}")


def named_path(named: str) -> Path:
    """Returns the path that was typed, with or without quotes, where ~ stands for a home. Raises
    ConfigError for a user who is not there.
    """
    if len(named) > 1 and named[0] == named[-1] and named[0] in "\"'":
        named = named[1:-1]
    try:
        return Path(named).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{shown(named)}: {error}") from None


def save_conversation(path: Path, messages: Sequence[Mapping[str, Any]]) -> None:
    """Writes a conversation that nobody but this user may read. A file that is there is replaced
    only where it is a saved conversation too. Raises ConfigError.
    """
    path = Path(os.path.realpath(path))
    if os.path.lexists(path):
        try:
            load_conversation(path)
        except ConfigError as error:
            raise ConfigError(f"{error}; it is left as it is: choose another name") from None
    text = json.dumps({"format": FORMAT, "version": VERSION, "messages": list(messages)}, ensure_ascii=False, indent=1)
    try:
        # The mode of such a file is 0600.
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text.encode("utf-8", "replace") + b"\n")
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except (OSError, ValueError) as error:
        raise _refused(path, "written", error) from None


def load_conversation(path: Path) -> list[dict[str, str]]:
    """Returns the messages of a saved conversation, each with a role and a content. Raises
    ConfigError that names the file, and the field which is wrong.
    """
    try:
        found = json.loads(_read(path).decode("utf-8"), object_pairs_hook=lambda pairs: _without_twins(path, pairs))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: no saved conversation: not JSON ({error})") from None
    _check_fields(f"{path}: no saved conversation", found, FIELDS)
    if found["format"] != FORMAT or type(found["version"]) is not int:
        raise ConfigError(f"{path}: no saved conversation: format is {shown(found['format'])}, expected {FORMAT!r}")
    if found["version"] != VERSION:
        raise ConfigError(f"{path}: a conversation of version {shown(found['version'])}; this program reads version {VERSION}")
    if not isinstance(found["messages"], list):
        raise ConfigError(f"{path}: messages is {shown(found['messages'])}, expected a list")
    for number, message in enumerate(found["messages"], start=1):
        _check_fields(f"{path}: message {number}", message, MESSAGE_FIELDS)
        for name in MESSAGE_FIELDS:
            if not isinstance(message[name], str):
                raise ConfigError(f"{path}: message {number}: {name} is {shown(message[name])}, expected a text")
    return list(found["messages"])


def typed_file(environ: Mapping[str, str]) -> Path:
    """Returns the file for what this user types at chats, made if need be, which nobody else may
    read. Raises ConfigError where there can be none.
    """
    home = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = Path(home) / TYPED_PLACE
    if not path.is_absolute():
        raise ConfigError(f"{path}: no place for what is typed: XDG_STATE_HOME is no absolute path")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open_named(path, to_keep=True) as file:
            os.fchmod(file.fileno(), 0o600)
            _cut_back(file)
    except OSError as error:
        raise _refused(path, "used", error) from None
    return path


def _cut_back(file: IO[bytes]) -> None:
    size = os.fstat(file.fileno()).st_size
    if size <= MAX_TYPED_BYTES:
        return
    file.seek(size - MAX_TYPED_BYTES // 2)
    _, mark, kept = file.read().partition(_ENTRY)
    file.seek(0)
    file.truncate()
    file.write(mark + kept)


def _read(path: Path) -> bytes:
    try:
        raw = read_named(path, MAX_TEXT_BYTES)
    except OSError as error:
        raise _refused(path, "read", error) from None
    if len(raw) > MAX_TEXT_BYTES:
        raise ConfigError(f"{path}: the file is larger than {MAX_TEXT_BYTES >> 20} MiB, more than any model reads; name a part")
    return raw


def _refused(path: Path, done: str, error: Exception) -> ConfigError:
    return ConfigError(f"{shown(str(path))} cannot be {done}: {getattr(error, 'strerror', None) or error}")


def _check_fields(what: str, found: Any, allowed: Sequence[str]) -> None:
    if not isinstance(found, dict):
        raise ConfigError(f"{what}: {shown(found)} is no object with {' and '.join(allowed)}")
    for name in (*allowed, *found):
        if name not in found or name not in allowed:
            state = "missing" if name not in found else "not known"
            raise ConfigError(f"{what}: field {shown(name)} is {state}; it has {', '.join(allowed)} and nothing else")


def _without_twins(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ConfigError(f"{path}: no saved conversation: a field is there twice")
    return found
