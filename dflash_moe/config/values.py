"""What values of settings may look like: a parser for each kind of value, amounts of memory, and
the near misses of misspelt words.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import difflib
import operator
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_moe.config.cache import NO_PATH

# This is 1 PiB: more is a typing error.
MAX_BYTES = 1 << 50
MAX_TIMEOUT_S = 86_400.0
MAX_SPIN_US = 1_000_000
# A worker that is tried once in ten minutes is as good as left alone.
MAX_BACKOFF_MS = 600_000
# A holder that shows no progress for a minute is lost by any sensible stall timeout.
MAX_GRACE_MS = 60_000
# Below the first size every message takes many turns. A buffer above the second is a typing error.
SOCKET_BUFFER_BYTES = (4 << 10, 1 << 30)

_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-z]*)", re.ASCII)
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%", re.ASCII)
SIZE_FORMS = "bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB"
BUDGET_FORMS = f"0%..100%, {SIZE_FORMS}"

# So many letters of a misspelt word are compared: the work grows with their number squared.
MAX_COMPARED = 100

# What may be done where a worker is lost, in the order in which it is by default.
REPLICA, RECONNECT, HOST_FALLBACK = REMEDIES = ("replica", "reconnect", "host")

# A parser raises ValueError on a value that is not allowed.
Parser = Callable[[Any], Any]


def parse_bytes(value: object) -> int:
    """Returns the bytes that an integer or a text such as "8GiB", "1.5 GB" or "512 MiB" means.
    Raises ValueError for anything else, and for more than MAX_BYTES.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        num_bytes = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value.strip().lower())) and match[2] in _UNITS:
        unit = _UNITS[match[2]]
        num_bytes = int(match[1]) * unit if "." not in match[1] else round(float(match[1]) * unit)
    else:
        raise ValueError(SIZE_FORMS)
    if not 0 <= num_bytes <= MAX_BYTES:
        raise ValueError(f"0..{MAX_BYTES} bytes")
    return num_bytes


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """An amount of memory: bytes, or where `fraction` is set that part of a whole, which the caller
    of `resolve` names.
    """

    num_bytes: int = 0
    fraction: float | None = None

    def resolve(self, whole_bytes: int) -> int:
        """Returns the bytes of the budget when the whole is `whole_bytes`."""
        return self.num_bytes if self.fraction is None else int(self.fraction * whole_bytes)


def parse_budget(value: object) -> MemoryBudget:
    """Returns the budget that an amount of memory means (`parse_bytes`), or a percentage such as
    "12.5%" of a whole. Raises ValueError for anything else.
    """
    if isinstance(value, MemoryBudget):
        return value
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value.strip())):
        if float(match[1]) > 100:
            raise ValueError(BUDGET_FORMS)
        return MemoryBudget(fraction=float(match[1]) / 100)
    return MemoryBudget(parse_bytes(value))


def format_bytes(num_bytes: float) -> str:
    """Returns a text such as "12.4 GiB" for messages, in the largest unit that fits."""
    size, unit = float(num_bytes), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Returns the first and the last of each run of neighbours among ascending numbers."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        begin = runs.pop()[0] if runs and number == runs[-1][1] + 1 else number
        runs.append((begin, number))
    return runs


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" where a known word is close to `word`, else an empty text."""
    close = difflib.get_close_matches(word[:MAX_COMPARED], list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def choice(*allowed: str) -> Parser:
    def parse(value: object) -> str:
        word = value.strip().lower() if isinstance(value, str) else ""
        if word not in allowed:
            raise ValueError
        return word

    return parse


def whole(low: int, high: int) -> Parser:
    def parse(value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,15}", value.strip(), re.ASCII):
            value = int(value)
        if isinstance(value, bool | str):
            raise ValueError
        try:
            # Integers of NumPy count as integers here.
            number = operator.index(value)
        except TypeError:
            raise ValueError from None
        if not low <= number <= high:
            raise ValueError
        return int(number)

    return parse


def whole_or_auto(low: int, high: int) -> Parser:
    """Returns a parser of a whole number, or of the word auto."""
    parse = whole(low, high)

    def parse_or_auto(value: object) -> int | str:
        return "auto" if isinstance(value, str) and value.strip().lower() == "auto" else int(parse(value))

    return parse_or_auto


def seconds(value: object) -> float:
    number = _number(value, 0, MAX_TIMEOUT_S)
    if not number:
        raise ValueError
    return number


def seconds_or_zero(value: object) -> float:
    is_zero = not isinstance(value, bool) and isinstance(value, int | float | str) and str(value).strip() in ("0", "0.0")
    return 0.0 if is_zero else seconds(value)


def milliseconds_from_to(value: object) -> tuple[float, float]:
    """Returns two numbers of milliseconds, of which the second is no less than the first."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError
    first, second = value
    if any(isinstance(one, bool) or not isinstance(one, int | float) for one in (first, second)):
        raise ValueError
    if not 1 <= first <= second <= MAX_BACKOFF_MS:
        raise ValueError
    return float(first), float(second)


def milliseconds_or_zero(value: object) -> float:
    return _number(value, 0, MAX_GRACE_MS)


def milliseconds(value: object) -> float:
    return _number(value, 1, MAX_GRACE_MS)


def share(value: object) -> float:
    return _number(value, 0, 1)


def _number(value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    try:
        number = float(value)
    except OverflowError:
        # The integer is beyond what a float can hold.
        raise ValueError from None
    if not low <= number <= high:
        raise ValueError
    return number


def remedies_in_order(value: object) -> tuple[str, ...]:
    """Parses `failure.order`. A replica is asked at once, so that nothing can come before it.
    Raises ValueError.
    """
    words = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise ValueError
    found = tuple(word.strip().lower() for word in words)
    if len(set(found)) < len(found) or not set(found) <= set(REMEDIES) or REPLICA in found[1:]:
        raise ValueError
    return found


class CpuShare(float):
    """A part of a core, read from a text. A bare number is refused, since 0.2 could mean 0.2 % as
    well as a fifth; a value of this type was read before and is taken as it is.
    """


def cpu_share(value: object) -> CpuShare:
    """Returns the part of a core that a text such as "0.2%" means, 0 for off."""
    if isinstance(value, CpuShare):
        return value
    # YAML 1.1 reads the word off as false.
    if value is False or (isinstance(value, str) and value.strip().lower() == "off"):
        return CpuShare(0.0)
    match = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or float(match[1]) > 100:
        raise ValueError
    return CpuShare(round(float(match[1]) / 100, 8))


def switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value in (0, 1, "0", "1") and not isinstance(value, float):
        return value in (1, "1")
    raise ValueError


def on_off(value: object) -> bool:
    # YAML 1.1 reads the words on and off as true and false.
    if isinstance(value, bool):
        return value
    return str(choice("on", "off")(value)) == "on"


def choice_with_off(*allowed: str) -> Parser:
    """Returns a parser of one of the words, of which one is off; YAML 1.1 reads that as false."""
    parse = choice("off", *allowed)
    return lambda value: "off" if value is False else parse(value)


def on_off_or_auto(value: object) -> str:
    # YAML 1.1 reads the words on and off as true and false.
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(choice("auto", "on", "off")(value))


def file_path(value: object) -> Path:
    if isinstance(value, str | os.PathLike) and (text := os.fspath(value)) and isinstance(text, str) and "\0" not in text:
        try:
            return Path(text).expanduser()
        except RuntimeError:
            # The path begins with ~NAME for a user that this machine does not have.
            raise ValueError from None
    raise ValueError


def cache_folder(value: object) -> Path | str:
    """Returns an absolute path, or the word NO_PATH. A relative path would mean another folder for
    each folder that a command is called in.
    """
    if isinstance(value, str) and value.strip().lower() == NO_PATH:
        return NO_PATH
    path = file_path(value)
    if not path.is_absolute():
        raise ValueError
    return path


def used_bytes(value: object) -> int:
    """Returns an amount of memory (`parse_bytes`), which must not be nothing."""
    num_bytes = parse_bytes(value)
    if not num_bytes:
        raise ValueError
    return num_bytes


def socket_buffer(value: object) -> int:
    num_bytes = parse_bytes(int(value) if isinstance(value, str) and value.strip().isdigit() else value)
    low, high = SOCKET_BUFFER_BYTES
    if not low <= num_bytes <= high:
        raise ValueError
    return num_bytes


def inherited(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9]{1,9}:[0-9]{1,19}", value, re.ASCII):
        raise ValueError
    return value


def used_budget(value: object) -> MemoryBudget:
    """Returns the budget (`parse_budget`), which must not be nothing."""
    budget = parse_budget(value)
    if budget.resolve(MAX_BYTES) == 0:
        raise ValueError
    return budget


def choice_or_auto(*allowed: str) -> Parser:
    """Returns a parser of one of the words, or of auto, which is None."""
    parse = choice("auto", *allowed)

    def parse_or_auto(value: object) -> str | None:
        word = str(parse(value))
        return None if word == "auto" else word

    return parse_or_auto


def halves(value: object) -> str:
    """Returns auto, 1 or 2; YAML reads the latter two as numbers."""
    return str(choice("auto", "1", "2")(value if isinstance(value, bool) or not isinstance(value, int) else str(value)))


def spin(value: object) -> int | None:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return None
    return int(whole(0, MAX_SPIN_US)(value))
