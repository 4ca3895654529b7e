"""Takes hosts, users, paths and keys out of a result, so that it can be shown to others.

What is known is replaced wherever it stands: this machine's name, its user, and what the caller
names. Beyond that a text loses what looks like an address, a URL's place or an absolute
path, and a variable whose name says that it holds one of these loses its value.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

KEY, HOST, USER, PATH = "<key>", "<host>", "<user>", "<path>"
# What is in a variable, by its name; the first that fits. A key is nothing to take a risk with.
_BY_NAME = (
    (re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE), KEY),
    (re.compile(r"HOST|ADDR|SERVER|PROXY|URL|URI|ENDPOINT|PEER", re.IGNORECASE), HOST),
    (re.compile(r"USER|LOGNAME", re.IGNORECASE), USER),
    (re.compile(r"PATH|HOME|DIR$|FOLDER|FILE|TOPOLOGY|PRELOAD", re.IGNORECASE), PATH),
)
_HEX = "[0-9A-Fa-f]{1,4}"
_PATTERNS = (
    (re.compile(r"\bunix:///[^\s'\",;]+"), f"unix://{PATH}"),
    # All of a URL but its scheme.
    (re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?!/|<path>)[^\s'\",;]+"), rf"\g<scheme>{HOST}"),
    (re.compile(r"\[[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%\w+)?\]"), HOST),
    (re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])"), HOST),
    # Eight groups, or fewer with a double colon: a time of day has three.
    (re.compile(rf"(?<![\w:])(?:(?:{_HEX}:){{7}}{_HEX}|(?:{_HEX}:)*{_HEX}::(?:{_HEX}(?::{_HEX})*)?)(?![\w:])"), HOST),
    (re.compile(r"(?<![\w:])[\w.+-]+@[\w.-]+"), f"{USER}@{HOST}"),
    # Of a fraction or a unit, as in "tokens/s", a letter or digit stands before the slash.
    (re.compile(r"(?:(?<![\w/<>.])(?:~\w*|\.{1,2})?/(?!/)|(?<![\w/<>.:])//)[^\s'\",;|]+"), PATH),
)


class Redaction:
    """Replaces what must not be shown. `known` are texts and what stands for each."""

    def __init__(self, known: Mapping[str, str]) -> None:
        found = {**_of_this_machine(), **known}
        # Longer ones first: a full name begins with the short one.
        ordered = sorted((text for text in found if len(text) > 1), key=len, reverse=True)
        self._known = [(re.compile(rf"(?<![\w]){re.escape(text)}(?![\w])"), found[text]) for text in ordered]

    def text(self, value: str) -> str:
        """Returns a text without what is known, or looks like an address or a path."""
        for pattern, stand_in in self._known:
            value = pattern.sub(stand_in.replace("\\", r"\\"), value)
        for pattern, stand_in in _PATTERNS:
            value = pattern.sub(stand_in, value)
        return value

    def environment(self, values: Mapping[str, str]) -> dict[str, str]:
        """Returns variables whose values may be shown. What is empty says nothing and stays."""
        found = {}
        for name, value in values.items():
            stand_in = next((one for pattern, one in _BY_NAME if pattern.search(name)), None)
            found[name] = self.text(value) if stand_in is None or not value else stand_in
        return found

    def all_of(self, value: Any) -> Any:
        """Returns plain values with all their texts redacted, those of keys too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.all_of(key): self.all_of(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.all_of(one) for one in value]
        return value


def _of_this_machine() -> dict[str, str]:
    found = {socket.gethostname(): HOST, socket.gethostname().partition(".")[0]: HOST}
    with suppress(OSError, KeyError):  # a user without a name
        found[getpass.getuser()] = USER
    return found
