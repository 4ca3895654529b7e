"""The settings are one table, from which flags, environment variables, YAML keys, their checks and
the documents follow.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_moe.config.activations import ACTIVATIONS
from dflash_moe.config.values import (
    MAX_SPIN_US,
    MAX_TIMEOUT_S,
    SIZE_FORMS,
    MemoryBudget,
    NotBuiltError,
    Parser,
    choice,
    choice_or_auto,
    choice_with_off,
    file_path,
    halves,
    inherited,
    on_off,
    on_off_or_auto,
    parse_bytes,
    seconds,
    socket_buffer,
    spin,
    switch,
    used_budget,
    whole,
    whole_or_auto,
)
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
OPERATORS = ("auto", "torch")
ORDERS = ("fifo", "packing")
SPECULATIONS = ("prompt", "auto")
PRESETS = ("exact", "fast")
# A block of the paged KV cache has so many tokens: those of a page of the attention kernels.
BLOCK_TOKENS = 16
# The sections of a topology whose keys are settings of the table.
SECTIONS = ("ipc", "host", "engine")
# Keys of the topology itself that are settings of the table.
ROOT_SETTINGS = ("preset",)
# More tokens of one step, requests or waiting requests than these are typing errors.
MAX_BATCH_TOKENS = 1 << 16
MAX_REQUESTS = 4096
MAX_QUEUE = 1 << 20
# A layer table has at most so many layers, and no model has so many positions.
MAX_LAYERS = 4096
MAX_CONTEXT = 1 << 24


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. `flag`, `environment` and `yaml` are None where the setting cannot be
    given that way.
    """

    name: str
    flag: str | None
    environment: str | None
    # The key is dotted. Keys outside of SECTIONS are read by the topology alone.
    yaml: str | None
    parse: Parser
    allowed: str
    default: Any
    default_text: str
    help: str
    metavar: str = "TEXT"

    @property
    def section(self) -> str | None:
        """The one of SECTIONS that has the setting's key, None where none has."""
        section = self.yaml.partition(".")[0] if self.yaml else ""
        return section if section in SECTIONS else None

    @property
    def key(self) -> str | None:
        """The key below `section`, None where there is none."""
        return self.yaml.partition(".")[2] if self.yaml and self.section else None

    @property
    def is_stated(self) -> bool:
        """Whether `Topology.stated_settings` can have its key."""
        return self.section is not None or self.yaml in ROOT_SETTINGS

    def check(self, value: object, origin: str) -> Any:
        """Returns the parsed value. Raises ConfigError that names `origin` (flag, variable, key or
        argument), the value and what is allowed.
        """
        try:
            return self.parse(value)
        except NotBuiltError:
            raise ConfigError(f"{origin}: {shown(value)} is not built into this version; allowed: {self.allowed}") from None
        except ValueError:
            found = shown(value) if isinstance(value, str | int | float | bool | None) else repr(type(value).__name__)
            raise ConfigError(f"{origin}: {found} is not allowed; allowed: {self.allowed}") from None


_EXPERT = f"{PREFIX}EXPERT_COMPUTE_"
_IPC = f"{_EXPERT}IPC_"
_SECONDS = f"seconds, above 0 and at most {MAX_TIMEOUT_S:.0f}"

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "preset", "--preset", f"{PREFIX}PRESET", "preset", choice(*PRESETS), ", ".join(PRESETS), "exact", "exact",
        "What activations and host.activations are where nobody states them: f32 (exact), or per layer int8, else bf16, where "
        "every holder takes the layer's weights so (fast)",
        "exact|fast",
    ),
    Setting(
        "experts_on_card", "--experts-on-card", f"{PREFIX}EXPERTS_ON_CARD", None, whole_or_auto(0, MAX_LAYERS),
        f"auto, 0..{MAX_LAYERS} layers", None, "auto",
        "Without a topology: how many layers have their experts on cards, the last ones first; auto: as many as leave memory "
        "for --max-context",
        "N|auto",
    ),
    Setting(
        "mode", "--mode", f"{_IPC}MODE", "ipc.mode", choice(*MODES), "auto, batched, stream (any case)", "auto", "auto",
        "How a call is cut: whole chunks (batched), small slices (stream), or chosen per worker (auto)", "MODE",
    ),
    Setting(
        "transport", "--transport", f"{_IPC}TRANSPORT", "ipc.transport",
        choice(*TRANSPORTS, to_come=TRANSPORTS_TO_COME), ", ".join(TRANSPORTS), "auto",
        "auto: shared on the same host, else stream",
        "Data path to the workers; a named one fails where it cannot be had (fabric is not built into this version)",
        "NAME",
    ),
    Setting(
        "dtype", "--dtype", f"{_IPC}DTYPE", "ipc.dtype", choice(*DTYPES), "f32, f16, bf16", None, "the model's own",
        "Wire dtype of requests, prefill and decode alike", "DTYPE",
    ),
    Setting(
        "reply_dtype", "--reply-dtype", f"{_IPC}REPLY_DTYPE", "ipc.reply_dtype", choice(*DTYPES), "f32, f16, bf16", None,
        "as requests", "Wire dtype of replies", "DTYPE",
    ),
    Setting(
        "numerics", "--numerics", f"{PREFIX}NUMERICS", "ipc.numerics", choice(*NUMERICS), "exact, close", "exact", "exact",
        "Whether the holders of one layer's experts must compute in one numerics class; close allows several and reports it",
        "exact|close",
    ),
    Setting(
        "batch_capacity", "--batch-capacity", f"{_IPC}BATCH_CAPACITY", "ipc.batch_capacity", whole(1, MAX_TOKENS),
        f"1..{MAX_TOKENS} tokens", 1024, "1024 tokens", "Most tokens of one slice in batched mode", "TOKENS",
    ),
    Setting(
        "stream_tokens", "--stream-tokens", f"{_EXPERT}BATCH", "ipc.stream_tokens", whole(1, MAX_TOKENS),
        f"1..{_EXPERT}BATCH_MAX (at most {MAX_TOKENS}) tokens", 4, "4 tokens", "Tokens of one slice in stream mode", "TOKENS",
    ),
    Setting(
        "stream_tokens_max", None, f"{_EXPERT}BATCH_MAX", "ipc.stream_tokens_max", whole(1, MAX_TOKENS),
        f"1..{MAX_TOKENS} tokens", 32, "32 tokens", "Upper bound of the tokens of one slice in stream mode", "TOKENS",
    ),
    Setting(
        "shared_bytes", None, f"{_IPC}SHARED_BYTES", "ipc.shared_bytes", parse_bytes, SIZE_FORMS, None, "computed",
        "Raises the size of the shared segments, never lowers it", "BYTES",
    ),
    Setting(
        "socket_buffer_bytes", None, f"{_IPC}SOCKET_BUFFER_BYTES", "ipc.socket_buffer_bytes", socket_buffer,
        "4 KiB to 1 GiB, in bytes or with KiB, MiB, GiB", None, "the system's own, which it tunes",
        "Send and receive buffers of stream data connections, both ends; doctor shows what the system grants", "BYTES",
    ),
    Setting(
        "required", None, f"{_IPC}REQUIRED", "ipc.required", switch, "0, 1", False, "0",
        "1 forbids computing a lost worker's experts at the host; until this version can do that, 0 and 1 mean the same", "0|1",
    ),
    Setting(
        "profile", "--profile", f"{_IPC}PROFILE", "ipc.profile", switch, "0, 1", False, "0",
        "1 records a timeline of every call on both sides", "0|1",
    ),
    Setting(
        "threads", "--threads", f"{_EXPERT}THREADS", "workers[].threads", whole(1, MAX_THREADS), f"1..{MAX_THREADS} threads",
        None, "physical cores / local CPU workers, 1..8", "Compute threads of each worker that the host starts", "N",
    ),
    Setting(
        "key_file", "--key-file", f"{PREFIX}KEY_FILE", "ipc.key_file", file_path, "path of a file with mode 0600", None, "none",
        "Key shared with workers that are already running", "FILE",
    ),
    Setting(
        "encryption", "--encryption", f"{_IPC}ENCRYPTION", "ipc.encryption", on_off_or_auto, "auto, on, off", "auto",
        "auto: on beyond loopback",
        "Encrypts the TCP connections to workers by TLS 1.3 with the key file's key; both ends must agree", "auto|on|off",
    ),
    Setting(
        "call_timeout_s", None, None, "ipc.call_timeout_s", seconds, _SECONDS, 30.0, "30 s",
        "Least deadline of one call", "SECONDS",
    ),
    Setting(
        "start_timeout_s", None, None, "ipc.start_timeout_s", seconds, _SECONDS, 60.0, "60 s",
        "Longest time without progress while a worker starts and loads", "SECONDS",
    ),
    Setting(
        "stall_timeout_s", None, None, "ipc.stall_timeout_s", seconds, _SECONDS, 2.0, "2 s",
        "Longest time a worker's progress counter may stand still while work is queued", "SECONDS",
    ),
    Setting(
        "spin_us", None, None, "ipc.spin_us", spin, f"auto, 0..{MAX_SPIN_US} microseconds", None, "auto",
        "Least polling before a waiting thread sleeps; auto is 0 where threads outnumber cores", "MICROSECONDS",
    ),
    Setting(
        "host_operators", "--host-operators", f"{PREFIX}HOST_OPERATORS", "host.operators", choice(*OPERATORS),
        ", ".join(OPERATORS), "auto", "auto",
        "Who computes the host's own part of a model: our operators where they are proven to compute the same (auto), or torch",
        "NAME",
    ),
    Setting(
        "host_activations", "--host-activations", f"{PREFIX}HOST_ACTIVATIONS", "host.activations", choice(*ACTIVATIONS),
        ", ".join(ACTIVATIONS), None, "the workers', where they agree, else f32",
        "What the host rounds its inputs to: those of the experts it keeps, and of its own operators", "NAME",
    ),
    Setting(
        "block_tokens", None, f"{PREFIX}ENGINE_BLOCK_TOKENS", "engine.block_tokens", whole(BLOCK_TOKENS, BLOCK_TOKENS),
        f"{BLOCK_TOKENS}, which is the page of the attention kernels", BLOCK_TOKENS, f"{BLOCK_TOKENS} tokens",
        "Tokens of one block of the paged KV cache", "TOKENS",
    ),
    Setting(
        "kv_memory", None, f"{PREFIX}ENGINE_KV_MEMORY", "engine.kv_memory", used_budget,
        f"above 0% and at most 100%, {SIZE_FORMS}", MemoryBudget(fraction=0.25), "25%",
        "Memory of the paged KV cache; a percentage is one of what is free after the weights, the control group counted",
        "BYTES",
    ),
    Setting(
        "kv_dtype", None, f"{PREFIX}ENGINE_KV_DTYPE", "engine.kv_dtype", choice_or_auto(*DTYPES),
        f"auto, {', '.join(DTYPES)}", None, "auto, which is the model's own",
        "What keys and values are stored as", "DTYPE",
    ),
    Setting(
        "max_context", "--max-context", f"{PREFIX}ENGINE_MAX_CONTEXT", "engine.max_context", whole(1, MAX_CONTEXT),
        f"1..{MAX_CONTEXT} tokens", None, "the model's; a plan without a topology leaves memory for that or 8192, if less",
        "Most tokens of one request, its prompt included; the KV cache has no more than max_requests of them take", "TOKENS",
    ),
    Setting(
        "max_batch_tokens", None, f"{PREFIX}ENGINE_MAX_BATCH_TOKENS", "engine.max_batch_tokens", whole(1, MAX_BATCH_TOKENS),
        f"1..{MAX_BATCH_TOKENS} tokens", 1024, "1024 tokens",
        "Most tokens of one step of the engine; longer prompts are computed in chunks", "TOKENS",
    ),
    Setting(
        "max_requests", None, f"{PREFIX}ENGINE_MAX_REQUESTS", "engine.max_requests", whole(1, MAX_REQUESTS),
        f"1..{MAX_REQUESTS}", 64, "64", "Most requests that the engine computes at a time; the others wait", "N",
    ),
    Setting(
        "max_queue", None, f"{PREFIX}ENGINE_MAX_QUEUE", "engine.max_queue", whole(1, MAX_QUEUE),
        f"1..{MAX_QUEUE}", 1024, "1024", "Most requests that wait; further ones are rejected", "N",
    ),
    Setting(
        "order", None, f"{PREFIX}ENGINE_ORDER", "engine.order", choice(*ORDERS), ", ".join(ORDERS), "fifo", "fifo",
        "Which waiting request comes next: the oldest (fifo), or the longest prompt that fits the step whole (packing)", "NAME",
    ),
    Setting(
        "micro_batches", None, f"{PREFIX}ENGINE_MICRO_BATCHES", "engine.micro_batches", halves, "auto, 1, 2", "auto", "auto",
        "Parts in which a step is computed, so that one computes attention while the other awaits its experts", "auto|1|2",
    ),
    Setting(
        "speculate", None, f"{PREFIX}ENGINE_SPECULATE", "engine.speculate", choice_with_off(*SPECULATIONS),
        f"off, {', '.join(SPECULATIONS)}", "off", "off",
        "Drafts tokens that followed the same words before: always (prompt), or where that has paid (auto)", "NAME",
    ),
    Setting(
        "prefix_cache", None, f"{PREFIX}ENGINE_PREFIX_CACHE", "engine.prefix_cache", on_off, "on, off", True, "on",
        "Keeps keys and values of finished requests for prompts that begin alike", "on|off",
    ),
    Setting(
        "cpu_isa", None, f"{PREFIX}CPU_ISA", None, choice(*ISAS), ", ".join(ISAS), None, "best of this CPU",
        "Forces a CPU kernel set, for tests", "ISA",
    ),
    Setting(
        "handover", None, f"{PREFIX}HANDOVER", None, file_path, "path of a Unix socket", None, "none",
        "Where a program started by dflash-moe llama takes the workers over; set by that command, for its program only",
        "PATH",
    ),
    Setting(
        "handover_token_fd", None, f"{PREFIX}HANDOVER_TOKEN_FD", None, inherited,
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

    preset: str = _default("preset")
    # A number, auto where that was asked for by name, or None where nothing was said.
    experts_on_card: int | str | None = _default("experts_on_card")
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
    encryption: str = _default("encryption")
    call_timeout_s: float = _default("call_timeout_s")
    start_timeout_s: float = _default("start_timeout_s")
    stall_timeout_s: float = _default("stall_timeout_s")
    spin_us: int | None = _default("spin_us")
    host_operators: str = _default("host_operators")
    host_activations: str | None = _default("host_activations")
    block_tokens: int = _default("block_tokens")
    kv_memory: MemoryBudget = _default("kv_memory")
    kv_dtype: str | None = _default("kv_dtype")
    max_context: int | None = _default("max_context")
    max_batch_tokens: int = _default("max_batch_tokens")
    max_requests: int = _default("max_requests")
    max_queue: int = _default("max_queue")
    order: str = _default("order")
    micro_batches: str = _default("micro_batches")
    speculate: str = _default("speculate")
    prefix_cache: bool = _default("prefix_cache")
    cpu_isa: str | None = _default("cpu_isa")
    handover: Path | None = _default("handover")
    handover_token_fd: str | None = _default("handover_token_fd")
