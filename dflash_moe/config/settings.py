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
from dflash_moe.config.cache import NO_PATH, CacheSettings
from dflash_moe.config.setting import Setting
from dflash_moe.config.values import (
    MAX_BACKOFF_MS,
    MAX_GRACE_MS,
    MAX_SPIN_US,
    MAX_TIMEOUT_S,
    REMEDIES,
    SIZE_FORMS,
    MemoryBudget,
    cache_folder,
    choice,
    choice_or_auto,
    choice_with_off,
    cpu_share,
    file_path,
    halves,
    inherited,
    milliseconds,
    milliseconds_from_to,
    milliseconds_or_zero,
    on_off,
    on_off_or_auto,
    parse_bytes,
    remedies_in_order,
    seconds,
    seconds_or_zero,
    share,
    socket_buffer,
    spin,
    switch,
    used_budget,
    used_bytes,
    whole,
    whole_or_auto,
)

PREFIX = "DFLASH_MOE_"
# No setting, but the file in which commands find some (cli/config_file.py).
CONFIG_VARIABLE = f"{PREFIX}CONFIG"
DTYPES = ("f32", "f16", "bf16")
MODES = ("auto", "batched", "stream")
NUMERICS = ("exact", "close")
TRANSPORTS = ("auto", "shared", "stream", "fabric")
ISAS = ("reference", "scalar", "neon", "neon_dotprod", "neon_i8mm", "neon_bf16", "avx2", "avx512", "avx512vnni", "avx512bf16")
# The largest slice has so many tokens. The bound is one of slots, not of calls.
MAX_TOKENS = 4096
MAX_THREADS = 1024
OPERATORS = ("auto", "torch")
ORDERS = ("fifo", "packing")
SPECULATIONS = ("prompt", "auto")
PRESETS = ("exact", "fast")
FALLBACKS = ("mapped", "none")
# A block of the paged KV cache has so many tokens: those of a page of the attention kernels.
BLOCK_TOKENS = 16
# More tokens of one step, requests or waiting requests than these are typing errors.
MAX_BATCH_TOKENS = 1 << 16
MAX_REQUESTS = 4096
MAX_QUEUE = 1 << 20
# A worker that dies more often than this within the window is not kept running by more patience.
MAX_DEATHS = 100_000
# A layer table has at most so many layers, and no model has so many positions.
MAX_LAYERS = 4096
MAX_CONTEXT = 1 << 24


_EXPERT = f"{PREFIX}EXPERT_COMPUTE_"
_IPC = f"{_EXPERT}IPC_"
_SECONDS = f"seconds, above 0 and at most {MAX_TIMEOUT_S:.0f}"

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "preset", "--preset", f"{PREFIX}PRESET", "preset", choice(*PRESETS), ", ".join(PRESETS), "exact", "exact",
        "Exact, or faster: what activations and host.activations are where nobody states them: f32 (exact), or per layer "
        "int8, else bf16, where every holder takes the layer's weights so (fast)",
        "exact|fast",
    ),
    Setting(
        "experts_on_card", "--experts-on-card", f"{PREFIX}EXPERTS_ON_CARD", None, whole_or_auto(0, MAX_LAYERS),
        f"auto, 0..{MAX_LAYERS} layers", None, "auto",
        "Layers with experts on cards: how many where no topology is given, the last ones first; auto: as many as leave memory "
        "for --max-context",
        "N|auto",
    ),
    Setting(
        "mode", "--mode", f"{_IPC}MODE", "ipc.mode", choice(*MODES), "auto, batched, stream (any case)", "auto", "auto",
        "How a call is cut: whole chunks (batched), small slices (stream), or chosen per worker (auto)", "MODE",
    ),
    Setting(
        "transport", "--transport", f"{_IPC}TRANSPORT", "ipc.transport",
        choice(*TRANSPORTS), ", ".join(TRANSPORTS), "auto",
        "auto: shared on the same host, else stream; fabric where a worker allows it and hardware is there",
        "Data path to the workers: a named one fails where it cannot be had; fabric is libfabric", "NAME",
    ),
    Setting(
        "dtype", "--dtype", f"{_IPC}DTYPE", "ipc.dtype", choice(*DTYPES), "f32, f16, bf16", None, "the model's own",
        "Wire dtype of requests: prefill and decode alike", "DTYPE",
    ),
    Setting(
        "reply_dtype", "--reply-dtype", f"{_IPC}REPLY_DTYPE", "ipc.reply_dtype", choice(*DTYPES), "f32, f16, bf16", None,
        "as requests", "Wire dtype of replies", "DTYPE",
    ),
    Setting(
        "numerics", "--numerics", f"{PREFIX}NUMERICS", "ipc.numerics", choice(*NUMERICS), "exact, close", "exact", "exact",
        "Numerics classes of a layer: all holders of its experts compute in one (exact), or several are allowed and reported "
        "(close)",
        "exact|close",
    ),
    Setting(
        "batch_capacity", "--batch-capacity", f"{_IPC}BATCH_CAPACITY", "ipc.batch_capacity", whole(1, MAX_TOKENS),
        f"1..{MAX_TOKENS} tokens", 1024, "1024 tokens", "Tokens of a batched slice: the most of one in mode batched", "TOKENS",
    ),
    Setting(
        "stream_tokens", "--stream-tokens", f"{_EXPERT}BATCH", "ipc.stream_tokens", whole(1, MAX_TOKENS),
        f"1..{_EXPERT}BATCH_MAX (at most {MAX_TOKENS}) tokens", 4, "4 tokens",
        "Tokens of a stream slice: those of one in mode stream", "TOKENS",
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
        "1 forbids computing a lost worker's experts at the host, whatever host.fallback says", "0|1",
    ),
    Setting(
        "profile", "--profile", f"{_IPC}PROFILE", "ipc.profile", switch, "0, 1", False, "0",
        "1 records a timeline of calls: every one, on both sides", "0|1",
    ),
    Setting(
        "threads", "--threads", f"{_EXPERT}THREADS", "workers[].threads", whole(1, MAX_THREADS), f"1..{MAX_THREADS} threads",
        None, "physical cores / local CPU workers, 1..8",
        "Compute threads: of each worker that the host starts, or of its own where it holds all experts",
        "N",
    ),
    Setting(
        "key_file", "--key-file", f"{PREFIX}KEY_FILE", "ipc.key_file", file_path, "path of a file with mode 0600", None, "none",
        "Key shared with workers already running", "FILE",
    ),
    Setting(
        "engine_topology", None, f"{PREFIX}TOPOLOGY", None, file_path, "path of a topology", None, "none",
        "Topology whose workers compute the routed experts of a model that vLLM or SGLang serves; their plug-in does nothing "
        "without it", "FILE",
    ),
    Setting(
        "encryption", "--encryption", f"{_IPC}ENCRYPTION", "ipc.encryption", on_off_or_auto, "auto, on, off", "auto",
        "auto: on beyond loopback",
        "TLS 1.3 to workers over TCP: with the key file's key; both ends must agree", "auto|on|off",
    ),
    Setting(
        "call_timeout_s", None, None, "ipc.call_timeout_s", seconds, _SECONDS, 30.0, "30 s",
        "Least deadline of one call; a worker that owes answers and gives none for twice as long is lost", "SECONDS",
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
        "restart", None, None, "failure.restart", on_off, "on, off, or the keys of failure.restart", True, "on",
        "Whether lost workers come back: those the host started are started again, others are dialled again", "on|off",
    ),
    Setting(
        "restart_backoff_ms", None, None, "failure.restart.backoff_ms", milliseconds_from_to,
        f"[FIRST, LONGEST] with 1 <= FIRST <= LONGEST <= {MAX_BACKOFF_MS} milliseconds", (100.0, 5000.0), "[100, 5000] ms",
        "Pauses before a lost worker is tried again, which double from the first to the longest, each drawn from 20 % around",
        "FIRST LONGEST",
    ),
    Setting(
        "restart_deaths", None, None, "failure.restart.deaths", whole(1, MAX_DEATHS), f"1..{MAX_DEATHS} deaths", 5, "5 deaths",
        "Deaths of one worker within the window after which it is left alone until it is released", "N",
    ),
    Setting(
        "restart_window_s", None, None, "failure.restart.window_s", seconds, _SECONDS, 60.0, "60 s",
        "The window in which deaths are counted", "SECONDS",
    ),
    Setting(
        "failure_order", None, None, "failure.order", remedies_in_order,
        f"a list of {', '.join(REMEDIES)}, each once at most, replica before the others", REMEDIES, f"[{', '.join(REMEDIES)}]",
        "What is done where a worker is lost, in order: another worker with its experts, the worker itself once it is back, "
        "the host's processor; what is left out is not done", "WORDS",
    ),
    Setting(
        "hedge", None, None, "failure.hedge", share, "0 to 1, 0 for none", 0.05, "0.05",
        "Second requests to another holder for slices that are merely slow, per slice that arrives", "SHARE",
    ),
    Setting(
        "suspect_ms", None, None, "failure.suspect_ms", milliseconds, f"milliseconds, 1 to {MAX_GRACE_MS}", 300.0, "300 ms",
        "What a worker owes that shows no progress for so long is asked of another holder too", "MILLISECONDS",
    ),
    Setting(
        "reconnect_grace_ms", None, None, "failure.reconnect_grace_ms", milliseconds_or_zero,
        f"milliseconds, 0 to {MAX_GRACE_MS}", 50.0, "50 ms",
        "How long after its loss a worker that is brought back is waited for before the host computes instead", "MILLISECONDS",
    ),
    Setting(
        "park_s", None, None, "failure.park_s", seconds_or_zero, f"seconds, 0 to {MAX_TIMEOUT_S:.0f}", 2.0, "2 s",
        "How long calls wait for a lost worker that is on its way back, where nobody else holds its experts", "SECONDS",
    ),
    Setting(
        "host_fallback", None, f"{PREFIX}HOST_FALLBACK", "host.fallback", choice(*FALLBACKS), ", ".join(FALLBACKS), None,
        "mapped where the host's processor computes the bits of a lost worker",
        "Whether the host's processor computes a lost worker's experts, from the mapped checkpoint and without memory of their "
        "own; mapped that it cannot keep for every shard is an error", "NAME",
    ),
    Setting(
        "audit_cpu", None, None, "audit.cpu", cpu_share, "0%..100%, off", 0.002, "0.2%",
        "Part of a core with which this host computes rows again that workers have computed, to find one that goes wrong",
        "PERCENT",
    ),
    Setting(
        "scrub_s", None, None, "audit.scrub_s", seconds_or_zero, f"seconds, 0 to {MAX_TIMEOUT_S:.0f}", 3600.0, "3600 s",
        "Time in which a worker sums all its weights up again, to find what has changed in memory; never with 0", "SECONDS",
    ),
    Setting(
        "host_operators", "--host-operators", f"{PREFIX}HOST_OPERATORS", "host.operators", choice(*OPERATORS),
        ", ".join(OPERATORS), "auto", "auto",
        "The host's operators: who computes its own part of a model, ours where they are proven to compute the same (auto), or "
        "torch",
        "NAME",
    ),
    Setting(
        "host_activations", "--host-activations", f"{PREFIX}HOST_ACTIVATIONS", "host.activations", choice(*ACTIVATIONS),
        ", ".join(ACTIVATIONS), None, "the workers', where they agree, else f32",
        "Rounding of the host's inputs: those of the experts it keeps, and of its own operators", "NAME",
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
        "Most tokens of a request: its prompt included; the KV cache has no more than max_requests of them take", "TOKENS",
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
        "Keeps keys and values of requests, for prompts that begin alike", "on|off",
    ),
    Setting(
        "cache_path", None, f"{PREFIX}CACHE_PATH", "cache.path", cache_folder,
        f"an absolute path, which may begin with ~, or {NO_PATH}", None, "$XDG_CACHE_HOME/dflash-moe, else ~/.cache/dflash-moe",
        "Folder of what is kept on disk for the next start, on the machine of whoever keeps it; none: nothing is kept and "
        "nothing read",
        "DIR",
    ),
    Setting(
        "cache_max_bytes", None, f"{PREFIX}CACHE_MAX_BYTES", "cache.max_bytes", used_bytes, f"above 0, {SIZE_FORMS}", None,
        "half of what is free there", "Most bytes that are kept in that folder", "BYTES",
    ),
    Setting(
        "cache_panels", None, f"{PREFIX}CACHE_PANELS", "cache.panels", on_off_or_auto, "auto, on, off", "auto", "auto",
        "Packed experts kept on disk, so that the next start maps them instead of packing: where packing took over a second "
        "and a fifth of the disk stays free (auto), always (on), never (off)",
        "auto|on|off",
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
    engine_topology: Path | None = _default("engine_topology")
    encryption: str = _default("encryption")
    call_timeout_s: float = _default("call_timeout_s")
    start_timeout_s: float = _default("start_timeout_s")
    stall_timeout_s: float = _default("stall_timeout_s")
    spin_us: int | None = _default("spin_us")
    failure_order: tuple[str, ...] = _default("failure_order")
    hedge: float = _default("hedge")
    suspect_ms: float = _default("suspect_ms")
    reconnect_grace_ms: float = _default("reconnect_grace_ms")
    park_s: float = _default("park_s")
    restart: bool = _default("restart")
    restart_backoff_ms: tuple[float, float] = _default("restart_backoff_ms")
    restart_deaths: int = _default("restart_deaths")
    restart_window_s: float = _default("restart_window_s")
    host_fallback: str | None = _default("host_fallback")
    audit_cpu: float = _default("audit_cpu")
    scrub_s: float = _default("scrub_s")
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
    # A folder, NO_PATH where nothing is kept, or None where nothing was said.
    cache_path: Path | str | None = _default("cache_path")
    cache_max_bytes: int | None = _default("cache_max_bytes")
    cache_panels: str = _default("cache_panels")
    cpu_isa: str | None = _default("cpu_isa")
    handover: Path | None = _default("handover")
    handover_token_fd: str | None = _default("handover_token_fd")

    @property
    def cache(self) -> CacheSettings:
        """The settings of what is kept on disk, as one value that can be handed over."""
        path = self.cache_path if isinstance(self.cache_path, Path) else None
        return CacheSettings(path, self.cache_path == NO_PATH, self.cache_max_bytes, self.cache_panels)
