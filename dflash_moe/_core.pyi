"""The C++ core: transports, worker loop, client, CPU kernels. Every call that can block releases
the GIL.

Errors arrive as the classes of `dflash_moe.errors` (table in csrc/bindings/errors.cc).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__version__: str

# -- machine ---------------------------------------------------------------------------------------
# best last, e.g. ["reference", "scalar", "avx2", "avx512", "avx512vnni", "avx512bf16"]
def supported_isas() -> list[str]: ...
def best_isa() -> str: ...
def parse_isa(name: str) -> str: ...  # ConfigError listing the supported ones
def cpu_features() -> list[str]: ...

class NumericsFacts:
    """A row of the table of numerics classes, csrc/compute/numerics.h."""

    name: str
    activations: str  # how a topology asks for it
    inputs: str  # what inputs are rounded to: none, bf16, int8, f16
    group_inputs: int  # inputs of a row that share a scale; 0: none do
    weights: str  # what weights are rounded to: none, bf16, f16
    is_bounded: bool  # its bits are those of a card's architecture, within a bound of the reference
    offered_by: list[str]  # of cpu (processors of this build's kind), cuda, hip

def numerics_table() -> list[NumericsFacts]: ...  # the default first
def numerics_classes(isa: str) -> list[str]: ...  # that this kernel set computes, the default first

# UnsupportedError naming the formats the class takes
def check_numerics(numerics: str, weight_dtype: str) -> None: ...

# every constant of wire/limits.h and transport/channel.h, by its snake_case name
def wire_limits() -> dict[str, int]: ...
def error_codes() -> dict[str, tuple[int, type[BaseException]]]: ...

# -- codec (tests, tools) --------------------------------------------------------------------------
def checksum(data: bytes) -> int: ...

# field names of wire/frame.h, payload_checksum included
def encode_frame_header(fields: Mapping[str, int]) -> bytes: ...
def decode_frame_header(data: bytes) -> dict[str, int]: ...  # ProtocolError
def request_layout(num_rows: int, num_pairs: int, row_width: int, dtype: str) -> dict[str, int]: ...
def reply_layout(num_rows: int, row_width: int, dtype: str) -> dict[str, int]: ...
def floor_bytes(num_rows: int, num_pairs: int, in_width: int, request_dtype: str, out_width: int, reply_dtype: str) -> int: ...

# -- transports ------------------------------------------------------------------------------------
class Geometry:
    num_slots: int
    request_bytes: int
    reply_bytes: int
    def __init__(self, num_slots: int, request_bytes: int, reply_bytes: int) -> None: ...

class PathTerms:
    """What both ends know of a data path before it exists (csrc/transport/kinds.h)."""

    def __init__(
        self,
        geometry: Geometry,
        generation: int,
        *,
        is_open: bool = False,  # replies that a device of the host may register for writing
        socket_buffer_bytes: int = 0,  # each way; 0: the system's
        user_timeout_ms: int = 0,  # of TCP; 0: the system's
    ) -> None: ...

class Channel:
    """Opaque; consumed by `Client.add_worker`, `Client.replace_channel`, `Worker.serve` or another
    decorator.
    """

    kind: str

class TransportKind:
    """A row of the table of transports."""

    name: str
    setting: str  # the value of the setting `transport` that means this kind
    # "started", "started, unix", "started, tcp", "unix path", "tcp host"
    reaches: list[str]
    # its connections are dialled: the data connection is the only descriptor of both ends
    is_dialled: bool
    # makes a path within this process; DflashError with what this machine lacks
    def try_here(self) -> None: ...

def transport_kinds() -> list[TransportKind]: ...  # `auto` takes the first that serves an address

class PathOffer:
    """The host's end between its offer and the worker's answer."""

    payload: bytes
    descriptors: list[int]  # stay the offer's
    # once; takes ownership of the descriptors, whatever happens
    def complete(self, answer: bytes, descriptors: Sequence[int]) -> Channel: ...

class Acceptance:
    """The worker's end once it has accepted an offer."""

    payload: bytes
    descriptors: list[int]  # stay the acceptance's
    def take_channel(self) -> Channel: ...

def offer_path(kind: str, terms: PathTerms) -> PathOffer: ...
def accept_path(  # takes ownership of the descriptors, whatever happens
    kind: str, terms: PathTerms, offered: bytes, descriptors: Sequence[int]
) -> Acceptance: ...
def make_loopback(geometry: Geometry) -> tuple[Channel, Channel]: ...  # (host, worker)
def make_emulated(
    channel: Channel, *, delay_ms: float = 0, jitter_ms: float = 0, mbit_s: float = 0, seed: int = 1
) -> Channel: ...
def make_faulty(
    channel: Channel, *, kind: str, point: str, nth: int, delay_ms: float = 0, seed: int = 1
) -> Channel: ...  # kind: fail delay truncate corrupt drop; point: publish poll

# -- weights ---------------------------------------------------------------------------------------
class MappedFile:
    def __init__(self, path: str) -> None: ...  # CheckpointError
    size: int
    def read(self, offset: int, num_bytes: int) -> bytes: ...
    # madvise(MADV_DONTNEED): resident file pages leave this process
    def drop_pages(self) -> None: ...

# (file, byte offset of element (0,0), dtype, outputs, inputs, output_stride, input_stride) strides
# in elements
MatrixSource = tuple[MappedFile, int, str, int, int, int, int]
# (file, byte offset, dtype, count, stride)
VectorSource = tuple[MappedFile, int, str, int, int]

# -- backends --------------------------------------------------------------------------------------
# built, reason, devices: [{name, vendor, arch, memory_bytes, reason}]
def probe_backend(name: str) -> dict[str, Any]: ...

class BackendDevice:
    """An opened device of a backend. While a worker serves with it, only the worker may use it."""

    label: str  # "cuda:0 (NVIDIA H200)"
    arch: str
    # ConfigError: no such device; UnsupportedError: the backend or device cannot be used, and why
    def __init__(self, *, backend: str, device: int = 0, simulate: str = "", num_threads: int = 1, seed: int = 1) -> None: ...
    def numerics_classes(self) -> list[str]: ...
    def free_bytes(self) -> int: ...  # of the device's memory, now
    def layer_bytes(  # that such a layer will hold on the device
        self, *, spec: Mapping[str, Any], num_experts: int, weight_dtype: str, numerics: str = ...
    ) -> int: ...
    # num_cases, elements, differing, kernel, formats
    def self_test(self, test_case: int) -> dict[str, Any]: ...

class StagingBlock:
    """Memory of the host that a device copies from and to fastest; goes back to the device's pool
    when it dies.
    """

    address: int

class HostDevice:
    """The device that a host's own tensors live on. Any thread."""

    name: str  # "cuda 0 (NVIDIA H200)"
    dlpack_device: tuple[int, int]  # of its tensors; a simulated card's are the processor's, (1, 0)
    stream: int  # of its queue, for `__dlpack__(stream=...)`; 0: none
    # ConfigError: it does not exist; UnsupportedError, why
    def __init__(self, *, backend: str, device: int = 0) -> None: ...
    # why it cannot use such memory; not in a step
    def refuses_replies(self, *, is_open: bool) -> str: ...
    def staging(self, num_bytes: int) -> StagingBlock: ...
    # Both take (device's address, host's address, bytes) and return when all is copied.
    def copy_in(self, pieces: Sequence[tuple[int, int, int]]) -> None: ...
    def copy_out(self, pieces: Sequence[tuple[int, int, int]]) -> None: ...

class StepLease:
    """The data paths of a client, handed over to a device step."""

class StepReport:
    """How a device step went. `code`: of `error_codes()`, 0 without failure; where, which token or
    detail; a worker's words.
    """

    code: int
    layer: int
    detail: int
    worker: str
    text: str

class DeviceStep:
    """Exchanges on the host's device, without the host in between. One thread, but for `abort`."""

    def __init__(
        self, device: HostDevice, lease: StepLease, *, budget_s: float, stream: int | None = None, nap_ns: int = 0
    ) -> None: ...  # UnsupportedError: the device cannot use the data paths' memory
    @staticmethod
    def define_layer(
        device: HostDevice,
        *,
        layer: int,
        in_size: int,
        out_size: int,
        num_experts: int,
        # as of Client.define_layer, ascending ids
        shards: Sequence[tuple[int, int, int, Sequence[int]]],
    ) -> None: ...
    def add(self, layer: int, batch: TokenBatch) -> None: ...  # the device's addresses
    def wait(self, timeout_s: float) -> bool: ...
    def abort(self) -> None: ...
    def give_up(self) -> None: ...
    def end(self) -> StepReport: ...

# -- worker ----------------------------------------------------------------------------------------
class ShardStore:
    """The shards that this process has resident, by weights fingerprint."""

    def __init__(
        self,
        *,
        isa: str,
        num_threads: int,
        cpus: Sequence[int] = (),
        device: BackendDevice | None = None,  # computes there instead of with the kernels of `isa`
        weights_layout: str = "packed",  # or "mapped": computes from the files, which it keeps open
        memory_limit: int = 0,  # bytes that weights may take; 0: no limit
    ) -> None: ...
    # ConfigError where the memory limit does not allow it, or somebody else loads it
    def borrow(
        self,
        # keys of FfnSpec, enums by lower-case name ("silu", "gated", "clamped_swiglu"), missing =
        # default
        spec: Mapping[str, Any],
        num_local_experts: int,
        weight_dtype: str,
        weights_fingerprint: int,
        numerics: str = ...,
    ) -> ResidentShard: ...
    def drop_unborrowed(self) -> None: ...
    def resident_bytes(self) -> int: ...
    def num_shards(self) -> int: ...

class ResidentShard:
    """The loan of a shard: complete when others use it, to be loaded when it is new."""

    is_complete: bool
    def load_expert(  # any thread, different experts
        self,
        local_expert_id: int,
        *,
        gate: MatrixSource | None,
        up: MatrixSource,
        down: MatrixSource,
        gate_bias: VectorSource | None = None,
        up_bias: VectorSource | None = None,
        down_bias: VectorSource | None = None,
    ) -> None: ...
    # (content checksum, None as long as it is unchecked; experts read whole); CheckpointError
    def content(self) -> tuple[int | None, int]: ...
    def give_back(self) -> None: ...

class ContentReader:
    """Reads the source bytes of one expert for its content checksum, in steps."""

    def __init__(
        self,
        *,
        gate: MatrixSource | None,
        up: MatrixSource,
        down: MatrixSource,
        gate_bias: VectorSource | None = None,
        up_bias: VectorSource | None = None,
        down_bias: VectorSource | None = None,
    ) -> None: ...
    def read(self, num_bytes: int) -> bool: ...  # True once all is read; CheckpointError
    def value(self) -> int: ...  # once all is read

def shard_checksum(experts: Sequence[int]) -> int: ...  # of the experts' values, ascending

class Worker:
    def __init__(self, *, name: str, spin_ns: int = 0, slowdown: float = 1.0) -> None: ...
    # requests for (layer, shard) are computed with the loan, which the worker keeps
    def hold(self, layer: int, shard: int, loan: ResidentShard) -> None: ...
    # as ResidentShard.content; None where nothing is held
    def content(self, layer: int, shard: int) -> tuple[int | None, int] | None: ...
    def give_back(self) -> None: ...
    def start_pulse(self, fd: int) -> None: ...  # takes ownership
    def stop_pulse(self) -> None: ...
    def serve(self, channel: Channel, generation: int) -> None: ...  # blocks without the GIL
    def stop(self, generation: int) -> None: ...  # also when serve() has not begun yet
    def progress(self) -> int: ...
    def stats(self) -> dict[str, int]: ...

# -- client ----------------------------------------------------------------------------------------
class TokenBatch:
    """The tensors of one call, made once; keeps `owners` alive while the core may touch them."""

    hidden_states: int  # addresses
    row_stride_bytes: int
    dtype: str
    num_tokens: int
    top_k: int
    topk_ids: int
    ids_are_64bit: bool
    topk_weights: int
    weights_dtype: str
    output: int
    owners: object
    def __init__(
        self,
        hidden_states: int,
        row_stride_bytes: int,
        dtype: str,
        num_tokens: int,
        top_k: int,
        topk_ids: int,
        ids_are_64bit: bool,
        topk_weights: int,
        weights_dtype: str,
        output: int,
        owners: object,
    ) -> None: ...

class Call:
    """A submitted call. Any thread, any number of them."""

    # ConfigError, WorkerLost
    def __init__(self, client: Client, layer: int, batch: TokenBatch) -> None: ...
    def is_done(self) -> bool: ...
    def wait(self, timeout_s: float) -> bool: ...
    def result(self) -> None: ...  # raises how the call ended
    def abandon(self) -> None: ...

class ShardShape:
    """What one shard of one layer asks of its holder's slots."""

    def __init__(self, in_size: int, out_size: int, top_k: int, num_experts: int) -> None: ...

class SlicePlan:
    """A mode, resolved. `is_measured`: slices and window are upper bounds."""

    mode: str
    slice_tokens: int
    window: int
    slot_rows: int
    is_measured: bool

class SlotPlan:
    """The slots of one worker's data path, and the rows that they were made for."""

    num_slots: int
    rows: int
    request_bytes: int
    reply_bytes: int
    arena_bytes: int
    geometry: Geometry
    def __init__(self, num_slots: int, rows: int, request_bytes: int, reply_bytes: int) -> None: ...
    def holds(self, other: SlotPlan) -> bool: ...

DEFAULT_ARENA_BYTES: int  # of all workers together; `ipc.shared_bytes` raises it
SPARE_SLOTS: int  # beyond the window

# ConfigError
def plan_slices(mode: str, *, batch_capacity: int, stream_tokens: int, stream_tokens_max: int) -> SlicePlan: ...
def plan_slots(shards: Sequence[ShardShape], rows: int, num_slots: int, request_dtype: str, reply_dtype: str) -> SlotPlan: ...
def plan_arena(
    workers: Sequence[Sequence[ShardShape]],
    slices: SlicePlan,
    request_dtype: str,
    reply_dtype: str,
    shared_bytes: int = 0,
) -> list[SlotPlan]: ...

class Client:
    def __init__(self, *, spin_ns: int, call_timeout_s: float, stall_timeout_s: float, max_calls: int = 1024) -> None: ...
    # every later use is a ConfigError; threads inside end as they will
    def close(self) -> None: ...
    def add_worker(
        self,
        *,
        name: str,
        channel: Channel,
        generation: int,
        pulse_fd: int,
        slice_tokens: int,
        window: int,
        request_dtype: str,
        reply_dtype: str,
        is_measured: bool = False,
    ) -> int: ...
    def define_layer(
        self,
        *,
        layer: int,
        name: str,
        in_size: int,
        out_size: int,
        num_experts: int,
        # (shard, worker, fingerprint, experts ascending)
        shards: Sequence[tuple[int, int, int, Sequence[int]]],
        cost_class: int = 0,  # layers of equal class share a cost curve
    ) -> None: ...
    def set_policy(  # is_measured: both are upper bounds, the worker's model chooses
        self, worker: int, slice_tokens: int, window: int, is_measured: bool = False
    ) -> None: ...
    def set_dtypes(self, worker: int, request_dtype: str, reply_dtype: str) -> None: ...
    def mark_lost(self, worker: int, reason: str) -> None: ...
    # submits, waits, raises the call's error: one crossing for the hot path
    def run(self, layer: int, batch: TokenBatch) -> None: ...
    # Calls are parked from now on, and none is under way; until resume(). WorkerTimeout.
    def hold(self, timeout_s: float) -> None: ...
    def resume(self) -> None: ...
    # readable while a data path waits to be renewed; the client's own
    # readable while a data path waits to be renewed, and after wake_renewer(); the client's own
    def worn_fd(self) -> int: ...
    def wake_renewer(self) -> None: ...
    # (worker, reason): the caller renews them
    def retire_worn_paths(self) -> list[tuple[int, str]]: ...
    def retire_path(self, worker: int, reason: str) -> None: ...  # ConfigError, WorkerLost
    def renew_path(self, worker: int, channel: Channel, generation: int) -> None: ...  # likewise
    # holds the client; WorkerTimeout, WorkerLost; UnsupportedError: not in shared memory
    def begin_step(self, num_calls: int, timeout_s: float) -> StepLease: ...
    def judge_step(self) -> None: ...  # WorkerLost; to be called every few milliseconds of a step
    # resumes; None: it is not known how far the step came, and no path of it is used again
    def end_step(self, report: StepReport | None) -> None: ...
    def counters(self) -> dict[tuple[int, int], dict[str, int]]: ...  # (worker, layer) -> Counters
    def workers(self) -> list[dict[str, Any]]: ...
    # per worker: cost curves; chunks chosen, predicted and measured
    def forecasts(self) -> list[dict[str, Any]]: ...
    def set_profile(self, on: bool) -> None: ...
    def take_traces(self) -> list[dict[str, int]]: ...

# -- array views -----------------------------------------------------------------------------------
class DlpackView:
    """A borrowed tensor from any `__dlpack__` object; UnsupportedError for another device,
    ConfigError for a bad dtype.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements
    dtype: str  # f32 f16 bf16 i32 i64
    # DLPack's type and number of a device
    def __init__(self, capsule: object, device: tuple[int, int] = (1, 0)) -> None: ...

# -- oracle (tests, verify) ------------------------------------------------------------------------
class FfnOracle:
    """Experts loaded like a worker's, computed in-process by one kernel set ("reference" ...
    "avx512").
    """

    def __init__(
        self,
        *,
        spec: Mapping[str, Any],
        num_experts: int,
        weight_dtype: str,
        isa: str,
        num_threads: int = 1,
        numerics: str = ...,
    ) -> None: ...
    # 2-D / 1-D float32 arrays, rounded to weight_dtype; or (format, bytes, outputs, inputs, scales
    # or b"")
    def load_expert(
        self,
        expert_id: int,
        *,
        gate: object,
        up: object,
        down: object,
        gate_bias: object = None,
        up_bias: object = None,
        down_bias: object = None,
    ) -> None: ...
    def forward(  # NumPy: f32, or uint16 bit patterns for 16-bit dtypes
        self,
        rows: object,
        row_counts: object,
        local_expert_ids: object,
        weights: object,
        *,
        row_dtype: str = "f32",
        reply_dtype: str = "f32",
    ) -> object: ...
    def forward_float64(self, rows: object, row_counts: object, local_expert_ids: object, weights: object) -> object: ...

# -- weight formats --------------------------------------------------------------------------------
# FormatFacts of csrc/compute/formats/weight_format.h by format name, and the size of a record
def weight_formats() -> dict[str, dict[str, int]]: ...
def dequantize(  # float32 NumPy [outputs, inputs]; contiguous buffers
    weight_format: str, data: object, outputs: int, inputs: int, scales: object = b""
) -> object: ...
def packed_bytes(  # what a CPU worker holds for these experts, biases aside
    *, spec: Mapping[str, Any], num_experts: int, weight_dtype: str, isa: str
) -> int: ...

# the values an int8_g32 or int4_g32 worker computes with
def requantize(weight_format: str, values: object) -> object: ...
