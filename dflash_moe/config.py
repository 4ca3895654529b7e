"""The settings are one table, from which flags, environment variables, YAML keys, their checks and
the documents follow.

A Python argument or flag wins over the environment, that over the topology's `ipc:`, and that over
the default. A value that is not allowed is a `ConfigError` that names where it came from, the value
and what is allowed; nothing falls back silently.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import difflib
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_moe.errors import ConfigError, shown

PREFIX = "DFLASH_MOE_"
DTYPES = ("f32", "f16", "bf16")
MODES = ("auto", "batched", "stream")
NUMERICS = ("exact", "close")
TRANSPORTS = ("auto", "shared", "stream")
# These words are known, so that the error says "not built" and not "misspelt".
TRANSPORTS_TO_COME = ("fabric",)
ISAS = ("reference", "scalar", "neon", "neon_dotprod", "neon_i8mm", "neon_bf16", "avx2", "avx512", "avx512vnni", "avx512bf16")
# The largest slice has so many tokens. The bound is one of slots, not of calls.
MAX_TOKENS = 4096
MAX_THREADS = 1024
# This is 1 PiB: more is a typing error.
MAX_BYTES = 1 << 50
MAX_TIMEOUT_S = 86_400.0
MAX_SPIN_US = 1_000_000
# Linux numbers no descriptor higher (fs.nr_open).
# Below the first size every message takes many turns. A buffer above the second is a typing error.
SOCKET_BUFFER_BYTES = (4 << 10, 1 << 30)

_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-z]*)", re.ASCII)
SIZE_FORMS = "bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB"

# So many letters of a misspelt word are compared: the work grows with their number squared.
_MAX_COMPARED = 100

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


def format_bytes(num_bytes: float) -> str:
    """Returns a text such as "12.4 GiB" for messages, in the largest unit that fits."""
    size, unit = float(num_bytes), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" where a known word is close to `word`, else an empty text."""
    close = difflib.get_close_matches(word[:_MAX_COMPARED], list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


class _NotBuiltError(ValueError):
    """The value is known, but this version cannot serve it."""


def _choice(*allowed: str, to_come: tuple[str, ...] = ()) -> Parser:
    def parse(value: object) -> str:
        word = value.strip().lower() if isinstance(value, str) else ""
        if word in to_come:
            raise _NotBuiltError
        if word not in allowed:
            raise ValueError
        return word

    return parse


def _whole(low: int, high: int) -> Parser:
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


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    try:
        number = float(value)
    except OverflowError:
        # The integer is beyond what a float can hold.
        raise ValueError from None
    if not (math.isfinite(number) and 0 < number <= MAX_TIMEOUT_S):
        raise ValueError
    return number


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value in (0, 1, "0", "1") and not isinstance(value, float):
        return value in (1, "1")
    raise ValueError


def _path(value: object) -> Path:
    if isinstance(value, str | os.PathLike) and (text := os.fspath(value)) and isinstance(text, str) and "\0" not in text:
        try:
            return Path(text).expanduser()
        except RuntimeError:
            # The path begins with ~NAME for a user that this machine does not have.
            raise ValueError from None
    raise ValueError


def _socket_buffer(value: object) -> int:
    num_bytes = parse_bytes(int(value) if isinstance(value, str) and value.strip().isdigit() else value)
    low, high = SOCKET_BUFFER_BYTES
    if not low <= num_bytes <= high:
        raise ValueError
    return num_bytes


def _inherited(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9]{1,9}:[0-9]{1,19}", value, re.ASCII):
        raise ValueError
    return value


def _spin(value: object) -> int | None:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return None
    return int(_whole(0, MAX_SPIN_US)(value))


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. `flag`, `environment` and `yaml` are None where the setting cannot be
    given that way.
    """

    name: str
    flag: str | None
    environment: str | None
    # The key is dotted. Keys outside `ipc.` are read by the topology itself.
    yaml: str | None
    parse: Parser
    allowed: str
    default: Any
    default_text: str
    help: str
    metavar: str = "TEXT"

    @property
    def ipc_key(self) -> str | None:
        """The key below `ipc:`, None for settings that do not live there."""
        return self.yaml.removeprefix("ipc.") if self.yaml and self.yaml.startswith("ipc.") else None

    def check(self, value: object, origin: str) -> Any:
        """Returns the parsed value. Raises ConfigError that names `origin` (flag, variable, key or
        argument), the value and what is allowed.
        """
        try:
            return self.parse(value)
        except _NotBuiltError:
            raise ConfigError(f"{origin}: {shown(value)} is not built into this version; allowed: {self.allowed}") from None
        except ValueError:
            found = shown(value) if isinstance(value, str | int | float | bool | None) else repr(type(value).__name__)
            raise ConfigError(f"{origin}: {found} is not allowed; allowed: {self.allowed}") from None


_EXPERT = f"{PREFIX}EXPERT_COMPUTE_"
_IPC = f"{_EXPERT}IPC_"
_SECONDS = f"seconds, above 0 and at most {MAX_TIMEOUT_S:.0f}"

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "mode", "--mode", f"{_IPC}MODE", "ipc.mode", _choice(*MODES), "auto, batched, stream (any case)", "auto", "auto",
        "How a call is cut: whole chunks (batched), small slices (stream), or chosen per worker (auto)", "MODE",
    ),
    Setting(
        "transport", "--transport", f"{_IPC}TRANSPORT", "ipc.transport",
        _choice(*TRANSPORTS, to_come=TRANSPORTS_TO_COME), ", ".join(TRANSPORTS), "auto",
        "auto: shared on the same host, else stream",
        "Data path to the workers; a named one fails where it cannot be had (fabric is not built into this version)",
        "NAME",
    ),
    Setting(
        "dtype", "--dtype", f"{_IPC}DTYPE", "ipc.dtype", _choice(*DTYPES), "f32, f16, bf16", None, "the model's own",
        "Wire dtype of requests, prefill and decode alike", "DTYPE",
    ),
    Setting(
        "reply_dtype", "--reply-dtype", f"{_IPC}REPLY_DTYPE", "ipc.reply_dtype", _choice(*DTYPES), "f32, f16, bf16", None,
        "as requests", "Wire dtype of replies", "DTYPE",
    ),
    Setting(
        "numerics", "--numerics", f"{PREFIX}NUMERICS", "ipc.numerics", _choice(*NUMERICS), "exact, close", "exact", "exact",
        "Whether the holders of one layer's experts must compute in one numerics class; close allows several and reports it",
        "exact|close",
    ),
    Setting(
        "batch_capacity", "--batch-capacity", f"{_IPC}BATCH_CAPACITY", "ipc.batch_capacity", _whole(1, MAX_TOKENS),
        f"1..{MAX_TOKENS} tokens", 1024, "1024 tokens", "Most tokens of one slice in batched mode", "TOKENS",
    ),
    Setting(
        "stream_tokens", "--stream-tokens", f"{_EXPERT}BATCH", "ipc.stream_tokens", _whole(1, MAX_TOKENS),
        f"1..{_EXPERT}BATCH_MAX (at most {MAX_TOKENS}) tokens", 4, "4 tokens", "Tokens of one slice in stream mode", "TOKENS",
    ),
    Setting(
        "stream_tokens_max", None, f"{_EXPERT}BATCH_MAX", "ipc.stream_tokens_max", _whole(1, MAX_TOKENS),
        f"1..{MAX_TOKENS} tokens", 32, "32 tokens", "Upper bound of the tokens of one slice in stream mode", "TOKENS",
    ),
    Setting(
        "shared_bytes", None, f"{_IPC}SHARED_BYTES", "ipc.shared_bytes", parse_bytes, SIZE_FORMS, None, "computed",
        "Raises the size of the shared segments, never lowers it", "BYTES",
    ),
    Setting(
        "socket_buffer_bytes", None, f"{_IPC}SOCKET_BUFFER_BYTES", "ipc.socket_buffer_bytes", _socket_buffer,
        "4 KiB to 1 GiB, in bytes or with KiB, MiB, GiB", None, "the system's own, which it tunes",
        "Send and receive buffers of stream data connections, both ends; doctor shows what the system grants", "BYTES",
    ),
    Setting(
        "required", None, f"{_IPC}REQUIRED", "ipc.required", _switch, "0, 1", False, "0",
        "1 forbids computing a lost worker's experts at the host; until this version can do that, 0 and 1 mean the same", "0|1",
    ),
    Setting(
        "profile", "--profile", f"{_IPC}PROFILE", "ipc.profile", _switch, "0, 1", False, "0",
        "1 records a timeline of every call on both sides", "0|1",
    ),
    Setting(
        "threads", "--threads", f"{_EXPERT}THREADS", "workers[].threads", _whole(1, MAX_THREADS), f"1..{MAX_THREADS} threads",
        None, "physical cores / local CPU workers, 1..8", "Compute threads of each worker that the host starts", "N",
    ),
    Setting(
        "key_file", "--key-file", f"{PREFIX}KEY_FILE", "ipc.key_file", _path, "path of a file with mode 0600", None, "none",
        "Key shared with workers that are already running", "FILE",
    ),
    Setting(
        "call_timeout_s", None, None, "ipc.call_timeout_s", _seconds, _SECONDS, 30.0, "30 s",
        "Least deadline of one call", "SECONDS",
    ),
    Setting(
        "start_timeout_s", None, None, "ipc.start_timeout_s", _seconds, _SECONDS, 60.0, "60 s",
        "Longest time without progress while a worker starts and loads", "SECONDS",
    ),
    Setting(
        "stall_timeout_s", None, None, "ipc.stall_timeout_s", _seconds, _SECONDS, 2.0, "2 s",
        "Longest time a worker's progress counter may stand still while work is queued", "SECONDS",
    ),
    Setting(
        "spin_us", None, None, "ipc.spin_us", _spin, f"auto, 0..{MAX_SPIN_US} microseconds", None, "auto",
        "Polling before a waiting thread sleeps; auto is 0 where threads outnumber cores", "MICROSECONDS",
    ),
    Setting(
        "cpu_isa", None, f"{PREFIX}CPU_ISA", None, _choice(*ISAS), ", ".join(ISAS), None, "best of this CPU",
        "Forces a CPU kernel set, for tests", "ISA",
    ),
    Setting(
        "handover", None, f"{PREFIX}HANDOVER", None, _path, "path of a Unix socket", None, "none",
        "Where a program started by dflash-moe llama takes the workers over; set by that command, for its program only",
        "PATH",
    ),
    Setting(
        "handover_token_fd", None, f"{PREFIX}HANDOVER_TOKEN_FD", None, _inherited,
        "DESCRIPTOR:INODE, two numbers", None, "none",
        "Pipe from which that program reads its token, once; set by the same command", "DESCRIPTOR:INODE",
    ),
)  # fmt: skip

SETTINGS_BY_NAME: Mapping[str, Setting] = {setting.name: setting for setting in SETTINGS}


def _default(name: str) -> Any:
    return SETTINGS_BY_NAME[name].default


@dataclass(frozen=True, slots=True)
class Settings:
    """The resolved settings of one runtime, by default those of the table. None: derived later
    (from the model, the machine or the geometry).
    """

    mode: str = _default("mode")
    transport: str = _default("transport")
    dtype: str | None = _default("dtype")
    reply_dtype: str | None = _default("reply_dtype")
    numerics: str = _default("numerics")
    batch_capacity: int = _default("batch_capacity")
    stream_tokens: int = _default("stream_tokens")
    stream_tokens_max: int = _default("stream_tokens_max")
    shared_bytes: int | None = _default("shared_bytes")
    socket_buffer_bytes: int | None = _default("socket_buffer_bytes")
    required: bool = _default("required")
    profile: bool = _default("profile")
    threads: int | None = _default("threads")
    key_file: Path | None = _default("key_file")
    call_timeout_s: float = _default("call_timeout_s")
    start_timeout_s: float = _default("start_timeout_s")
    stall_timeout_s: float = _default("stall_timeout_s")
    spin_us: int | None = _default("spin_us")
    cpu_isa: str | None = _default("cpu_isa")
    handover: Path | None = _default("handover")
    handover_token_fd: str | None = _default("handover_token_fd")


def on_worker_loss(settings: Settings) -> str:
    """Returns a sentence that says what becomes of the experts of a worker that is lost. A runtime
    logs it when it starts, and `doctor` shows it.
    """
    if settings.required:
        return "ipc.required is 1: calls to a lost worker's experts raise WorkerLost, and nobody else computes them"
    return (
        "ipc.required is 0: calls to a lost worker's experts raise WorkerLost, as with 1, because computing them at the host "
        "is not built into this version"
    )


def resolve_settings(
    topology_ipc: Mapping[str, Any] | None = None, *, environ: Mapping[str, str] = os.environ, **overrides: Any
) -> Settings:
    """Resolves the settings: `overrides` win over `environ`, that wins over `topology_ipc` (the
    keys below `ipc:`), and that over the defaults. An override of None counts as not given.

    Raises ConfigError for a value that is not allowed, an unknown argument or key, or an unknown
    DFLASH_MOE_ variable.
    """
    ipc = dict(topology_ipc or {})
    check_environment(environ)
    for name in overrides:
        if name not in SETTINGS_BY_NAME:
            raise ConfigError(f"unknown setting {shown(name)}{did_you_mean(name, SETTINGS_BY_NAME)}")
    keys = {setting.ipc_key for setting in SETTINGS if setting.ipc_key}
    for key in ipc:
        if key not in keys:
            raise ConfigError(f"unknown key {shown(f'ipc.{key}')}{did_you_mean(str(key), keys)}")
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in SETTINGS:
        found = _find(setting, overrides, environ, ipc)
        if found is not None:
            values[setting.name] = setting.check(*found)
            origins[setting.name] = found[1]
    return _bounded(values, origins)


def check_environment(environ: Mapping[str, str]) -> None:
    """Raises ConfigError for a DFLASH_MOE_ variable that is no setting, because a misspelt one
    would otherwise silently do nothing.
    """
    known = [setting.environment for setting in SETTINGS if setting.environment]
    for variable in environ:
        if variable.startswith(PREFIX) and variable not in known:
            # The common prefix would make all variables close to each other.
            suffixes = {name.removeprefix(PREFIX): name for name in known}
            close = difflib.get_close_matches(variable.removeprefix(PREFIX)[:_MAX_COMPARED], suffixes, n=1)
            hint = f"; did you mean {suffixes[close[0]]!r}?" if close else "; unset it"
            raise ConfigError(f"environment variable {variable} is not a setting{hint}")


def _find(
    setting: Setting, overrides: Mapping[str, Any], environ: Mapping[str, str], ipc: Mapping[str, Any]
) -> tuple[Any, str] | None:
    """Returns raw value and origin of the source that wins, None when only the default is left."""
    if overrides.get(setting.name) is not None:
        return overrides[setting.name], f"{setting.name}=" if setting.flag is None else f"{setting.name} ({setting.flag})"
    if setting.environment and setting.environment in environ:
        return environ[setting.environment], setting.environment
    if setting.ipc_key and ipc.get(setting.ipc_key) is not None:
        return ipc[setting.ipc_key], f"ipc.{setting.ipc_key}"
    return None


def _bounded(values: dict[str, Any], origins: Mapping[str, str]) -> Settings:
    """Applies the one bound between two settings: a stream's slice is at most its maximum. A
    default follows a lowered maximum, and a stated value beyond it raises ConfigError.
    """
    stated = Settings(**values)
    if stated.stream_tokens <= stated.stream_tokens_max:
        return stated
    if "stream_tokens" not in values:
        return Settings(**values | {"stream_tokens": stated.stream_tokens_max})
    bound = SETTINGS_BY_NAME["stream_tokens_max"]
    raise ConfigError(
        f"{origins['stream_tokens']}: {stated.stream_tokens} is not allowed; allowed: 1..{stated.stream_tokens_max} tokens "
        f"({bound.environment}, {bound.yaml})"
    )
