"""The C++ core: transports, worker loop, client, CPU kernels. Every call that can block releases
the GIL.

Errors arrive as the classes of `dflash_moe.errors` (table in csrc/bindings/errors.cc). A comment
above a name says what it means, who owns what, and which errors it raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__version__: str

# -- machine ---------------------------------------------------------------------------------------
# The kernel sets that this processor can run, the best one last, for example ["reference",
# "scalar", "avx2", "avx512", "avx512vnni", "avx512bf16"].
def supported_isas() -> list[str]: ...
def best_isa() -> str: ...

# Returns the name if it is supported. ConfigError lists the supported ones.
def parse_isa(name: str) -> str: ...
def cpu_features() -> list[str]: ...

class NumericsFacts:
    """A row of the table of numerics classes (csrc/compute/numerics.h)."""

    name: str
    # A topology asks for the class by this word.
    activations: str
    # Inputs are rounded to this: none, bf16, int8 or f16.
    inputs: str
    # So many inputs of a row share a scale; 0 means that none do.
    group_inputs: int
    # Weights are rounded to this: none, bf16 or f16.
    weights: str
    # The bits of a bounded class depend on the architecture of a card, within a bound of the
    # reference. All others have the same bits everywhere.
    is_bounded: bool
    # These offer it, of cpu (processors of this build's kind), cuda and hip.
    offered_by: list[str]

# All classes, the default first.
def numerics_table() -> list[NumericsFacts]: ...

# The names of the classes that this kernel set computes, the default first.
def numerics_classes(isa: str) -> list[str]: ...

# UnsupportedError names the formats that the class takes.
def check_numerics(numerics: str, weight_dtype: str) -> None: ...

# Every constant of wire/limits.h and transport/channel.h by its name in snake_case.
def wire_limits() -> dict[str, int]: ...

# A number that differs between builds which lay data frames out differently.
def layout_fingerprint() -> int: ...

# The number and the Python class of every ErrorCode by its name in snake_case.
def error_codes() -> dict[str, tuple[int, type[BaseException]]]: ...

# -- codec (tests, tools) --------------------------------------------------------------------------
def checksum(data: bytes) -> int: ...

# The fields have the names of wire/frame.h, payload_checksum included.
def encode_frame_header(fields: Mapping[str, int]) -> bytes: ...

# ProtocolError is for bytes that are no header.
def decode_frame_header(data: bytes) -> dict[str, int]: ...
def request_layout(num_rows: int, num_pairs: int, row_width: int, dtype: str) -> dict[str, int]: ...
def reply_layout(num_rows: int, row_width: int, dtype: str) -> dict[str, int]: ...
def floor_bytes(num_rows: int, num_pairs: int, in_width: int, request_dtype: str, out_width: int, reply_dtype: str) -> int: ...

# -- transports ------------------------------------------------------------------------------------
class Geometry:
    """The slots of a data path: their number, and the bytes of a request and of a reply in each."""

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
        # The segment of replies stays writable, so that a device of the host may register it.
        is_open: bool = False,
        # The buffers have this size each way; 0 keeps the system's own.
        socket_buffer_bytes: int = 0,
        # TCP takes a peer that acknowledges nothing for so long for gone; 0 keeps the system's own.
        user_timeout_ms: int = 0,
    ) -> None: ...

class Channel:
    """One end of a data path. `Client.add_worker`, `Client.renew_path`, `Worker.serve` or a
    decorator such as `make_emulated` consumes it.
    """

    kind: str

class TransportKind:
    """A row of the table of transports (csrc/transport/kinds.h)."""

    name: str
    # This value of the setting `transport` means this kind.
    setting: str
    # The workers that it reaches: "started", "started, unix", "started, tcp", "unix path" or "tcp
    # host".
    reaches: list[str]
    # The host dials its connections, and the data connection is the only descriptor of both ends.
    is_dialled: bool
    # Makes a path within this process. DflashError says what this machine lacks.
    def try_here(self) -> None: ...

# All transports of this build. Setting `auto` takes the first that serves an address.
def transport_kinds() -> list[TransportKind]: ...

class PathOffer:
    """The host's end between its offer and the worker's answer."""

    payload: bytes
    # These stay the offer's own; the peer gets copies.
    descriptors: list[int]
    # Makes the host's channel, once. It takes ownership of the descriptors, whatever happens.
    def complete(self, answer: bytes, descriptors: Sequence[int]) -> Channel: ...

class Acceptance:
    """The worker's end once it has accepted an offer."""

    payload: bytes
    # These stay the acceptance's own; the peer gets copies.
    descriptors: list[int]
    def take_channel(self) -> Channel: ...

def offer_path(kind: str, terms: PathTerms) -> PathOffer: ...

# It takes ownership of the descriptors, whatever happens.
def accept_path(kind: str, terms: PathTerms, offered: bytes, descriptors: Sequence[int]) -> Acceptance: ...

# The ends of the host and of the worker.
def make_loopback(geometry: Geometry) -> tuple[Channel, Channel]: ...

# Consumes `channel` and returns one that delays messages as a slower link would.
def make_emulated(
    channel: Channel, *, delay_ms: float = 0, jitter_ms: float = 0, mbit_s: float = 0, seed: int = 1
) -> Channel: ...

# Consumes `channel` and returns one whose nth operation goes wrong, for tests. `kind` is fail,
# delay, truncate, corrupt or drop, and `point` is publish or poll.
def make_faulty(channel: Channel, *, kind: str, point: str, nth: int, delay_ms: float = 0, seed: int = 1) -> Channel: ...

# -- weights ---------------------------------------------------------------------------------------
class MappedFile:
    """A file mapped for reading until the object dies."""

    # CheckpointError is for a file that cannot be mapped.
    def __init__(self, path: str) -> None: ...
    size: int
    def read(self, offset: int, num_bytes: int) -> bytes: ...
    # Resident pages of the file leave this process, by madvise(MADV_DONTNEED).
    def drop_pages(self) -> None: ...

# A matrix is (file, byte offset of element (0, 0), dtype, outputs, inputs, output_stride,
# input_stride), with strides in elements.
MatrixSource = tuple[MappedFile, int, str, int, int, int, int]
# A vector is (file, byte offset, dtype, count, stride), with the stride in elements.
VectorSource = tuple[MappedFile, int, str, int, int]

# -- backends --------------------------------------------------------------------------------------
# The keys are built, reason and devices, a list of {name, vendor, arch, memory_bytes, reason}.
def probe_backend(name: str) -> dict[str, Any]: ...

class BackendDevice:
    """An opened device of a backend. While a worker serves with it, only the worker may use it."""

    # For example "cuda:0 (NVIDIA H200)".
    label: str
    arch: str
    # ConfigError is for a device that does not exist, and UnsupportedError says why the backend or
    # the device cannot be used.
    def __init__(self, *, backend: str, device: int = 0, simulate: str = "", num_threads: int = 1, seed: int = 1) -> None: ...
    def numerics_classes(self) -> list[str]: ...
    # The bytes of the device's memory that are free now.
    def free_bytes(self) -> int: ...
    # The bytes that such a layer will hold on the device.
    def layer_bytes(self, *, spec: Mapping[str, Any], num_experts: int, weight_dtype: str, numerics: str = ...) -> int: ...
    # The keys are num_cases, elements, differing, kernel and formats.
    def self_test(self, test_case: int) -> dict[str, Any]: ...

class StagingBlock:
    """Memory of the host that a device copies from and to fastest. It goes back to the pool of the
    device when the object dies.
    """

    address: int

class HostDevice:
    """The device that a host's own tensors live on. Any thread may call."""

    # For example "cuda 0 (NVIDIA H200)".
    name: str
    # DLPack's device type and number of its tensors. A simulated card has those of the processor,
    # (1, 0).
    dlpack_device: tuple[int, int]
    # The stream of its queue for `__dlpack__(stream=...)`; 0 means that it has none.
    stream: int
    # ConfigError is for a device that does not exist; UnsupportedError says why it cannot be used.
    def __init__(self, *, backend: str, device: int = 0) -> None: ...
    # Says why it cannot use the memory of replies, and is empty where it can. It must not be called
    # in a step.
    def refuses_replies(self, *, is_open: bool) -> str: ...
    def staging(self, num_bytes: int) -> StagingBlock: ...
    # Both take pieces of (device's address, host's address, bytes), and return when all is copied.
    def copy_in(self, pieces: Sequence[tuple[int, int, int]]) -> None: ...
    def copy_out(self, pieces: Sequence[tuple[int, int, int]]) -> None: ...

class StepLease:
    """The data paths of a client that it has handed over to a device step."""

class StepReport:
    """How a device step went. `code` is one of `error_codes()`, or 0 without failure. `layer` and
    `worker` say where it failed, `detail` is the token or the device's reason, and `text` holds the
    words of a worker that refused.
    """

    code: int
    layer: int
    detail: int
    worker: str
    text: str

class DeviceStep:
    """Exchanges on the host's device, without the host's processor in between. One thread uses it,
    but any may call `abort`.
    """

    # The kernels give up by themselves after `budget_s`. UnsupportedError is for a device that
    # cannot use the memory of the data paths.
    def __init__(
        self, device: HostDevice, lease: StepLease, *, budget_s: float, stream: int | None = None, nap_ns: int = 0
    ) -> None: ...
    @staticmethod
    def define_layer(
        device: HostDevice,
        *,
        layer: int,
        in_size: int,
        out_size: int,
        num_experts: int,
        # These are the shards that Client.define_layer takes, in ascending order of their ids.
        shards: Sequence[tuple[int, int, int, Sequence[int]]],
    ) -> None: ...
    # Queues a call on the stream. The addresses of the batch are the device's.
    def add(self, layer: int, batch: TokenBatch) -> None: ...
    def wait(self, timeout_s: float) -> bool: ...
    def abort(self) -> None: ...
    def give_up(self) -> None: ...
    def end(self) -> StepReport: ...

# -- worker ----------------------------------------------------------------------------------------
class ShardStore:
    """The shards that this process has resident, by weights fingerprint. Any thread may borrow."""

    def __init__(
        self,
        *,
        isa: str,
        num_threads: int,
        cpus: Sequence[int] = (),
        # This device computes instead of the kernels of `isa`.
        device: BackendDevice | None = None,
        # With "mapped" it computes from the files, which it keeps open.
        weights_layout: str = "packed",
        # The weights may take so many bytes; 0 sets no limit.
        memory_limit: int = 0,
        # These threads compute instead of threads of its own.
        pool: HostPool | None = None,
    ) -> None: ...
    # ConfigError is raised where the memory limit does not allow the shard, or somebody else is
    # loading it.
    def borrow(
        self,
        # The keys are those of FfnSpec, enums go by their lower-case names ("silu", "gated",
        # "clamped_swiglu"), and what is missing has its default.
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
    """The loan of a shard. A shard that others use is complete; a new one is loaded by the
    borrower.
    """

    is_complete: bool
    # Any threads may load different experts at the same time.
    def load_expert(
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
    # Returns the content checksum, or None as long as the shard is unchecked, and how many experts
    # have been read whole. CheckpointError is for files that cannot be read.
    def content(self) -> tuple[int | None, int]: ...
    def give_back(self) -> None: ...

class ContentReader:
    """Reads the source bytes of one expert in steps, for its content checksum."""

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
    # Reads so many bytes more; True means that all is read. CheckpointError is for files that
    # cannot be read.
    def read(self, num_bytes: int) -> bool: ...
    # The checksum of the expert, once all is read.
    def value(self) -> int: ...

# The checksum of a shard, from the values of its experts in ascending order of their ids.
def shard_checksum(experts: Sequence[int]) -> int: ...

class Worker:
    """The serving side: it computes the requests of one data path at a time with the shards it
    holds.
    """

    def __init__(self, *, name: str, spin_ns: int = 0, slowdown: float = 1.0) -> None: ...
    # Requests for (layer, shard) are computed with the loan, which the worker keeps. One thread
    # calls this, and only while serve() does not run.
    def hold(self, layer: int, shard: int, loan: ResidentShard) -> None: ...
    # Returns what ResidentShard.content returns, or None where nothing is held.
    def content(self, layer: int, shard: int) -> tuple[int | None, int] | None: ...
    def give_back(self) -> None: ...
    # It takes ownership of `fd`.
    def start_pulse(self, fd: int) -> None: ...
    def stop_pulse(self) -> None: ...
    # It blocks without the GIL until the path ends.
    def serve(self, channel: Channel, generation: int) -> None: ...
    # Returns the host's end of a loopback. Whoever waits there for a reply computes it, one thread
    # at a time.
    def serve_inline(self, geometry: Geometry, generation: int) -> Channel: ...
    # It holds for this generation also when serve() has not begun yet.
    def stop(self, generation: int) -> None: ...
    def progress(self) -> int: ...
    def stats(self) -> dict[str, int]: ...

# -- client ----------------------------------------------------------------------------------------
class TokenBatch:
    """The tensors of one call, made once. It keeps `owners` alive while the core may touch them.
    `hidden_states`, `topk_ids`, `topk_weights` and `output` are addresses.
    """

    hidden_states: int
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
    """A submitted call. Any number of threads may call."""

    # It submits the call. ConfigError and WorkerLost are raised at once.
    def __init__(self, client: Client, layer: int, batch: TokenBatch) -> None: ...
    def is_done(self) -> bool: ...
    # Says whether the call is done, after at most `timeout_s`.
    def wait(self, timeout_s: float) -> bool: ...
    # Raises the error with which the call ended, if it did.
    def result(self) -> None: ...
    def abandon(self) -> None: ...

class ShardShape:
    """What one shard of one layer asks of the slots of its holder."""

    def __init__(self, in_size: int, out_size: int, top_k: int, num_experts: int) -> None: ...

class SlicePlan:
    """A resolved mode. Where `is_measured`, slices and window are upper bounds, within which the
    worker's model chooses.
    """

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

# The slots of all workers together take at most so many bytes; `ipc.shared_bytes` raises it.
DEFAULT_ARENA_BYTES: int
# A data path has so many slots more than the window has slices.
SPARE_SLOTS: int

# ConfigError is raised where `stream_tokens` exceeds `stream_tokens_max`.
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
    """The host's side of the exchange with all workers. Any thread may call; which worker is meant
    is said by the number that `add_worker` returned.
    """

    def __init__(self, *, spin_ns: int, call_timeout_s: float, stall_timeout_s: float, max_calls: int = 1024) -> None: ...
    # Every later use is a ConfigError. Threads that are inside end by themselves.
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
        # Each shard is (shard id, worker, weights fingerprint, ascending expert ids).
        shards: Sequence[tuple[int, int, int, Sequence[int]]],
        # Layers of equal class share a cost curve.
        cost_class: int = 0,
    ) -> None: ...
    # Where `is_measured`, both numbers are upper bounds and the worker's model chooses.
    def set_policy(self, worker: int, slice_tokens: int, window: int, is_measured: bool = False) -> None: ...
    def set_dtypes(self, worker: int, request_dtype: str, reply_dtype: str) -> None: ...
    def mark_lost(self, worker: int, reason: str) -> None: ...
    # Submits a call, waits for it and raises its error: the hot path crosses into C++ once.
    def run(self, layer: int, batch: TokenBatch) -> None: ...
    # Parks new calls and returns once none is under way; they go on at resume(). WorkerTimeout.
    def hold(self, timeout_s: float) -> None: ...
    def resume(self) -> None: ...
    # The descriptor is readable while a data path waits to be renewed, and after wake_renewer(). It
    # stays the client's own.
    def worn_fd(self) -> int: ...
    def wake_renewer(self) -> None: ...
    # Returns (worker, reason) for each path; the caller renews them.
    def retire_worn_paths(self) -> list[tuple[int, str]]: ...
    # Both raise WorkerLost, and ConfigError where something is in flight on the path.
    def retire_path(self, worker: int, reason: str) -> None: ...
    def renew_path(self, worker: int, channel: Channel, generation: int) -> None: ...
    # Holds the client and hands its data paths over. WorkerTimeout, WorkerLost; UnsupportedError
    # names a worker that is not reached in shared memory.
    def begin_step(self, num_calls: int, timeout_s: float) -> StepLease: ...
    # Raises WorkerLost for a worker that hung up or froze. It is to be called every few
    # milliseconds of a step.
    def judge_step(self) -> None: ...
    # Resumes calls. Without a report it is not known how far the step came, and none of its paths
    # is used again.
    def end_step(self, report: StepReport | None) -> None: ...
    # The counters by (worker, layer).
    def counters(self) -> dict[tuple[int, int], dict[str, int]]: ...
    def workers(self) -> list[dict[str, Any]]: ...
    # For each worker its cost curves, and the chunks that were chosen, predicted and measured.
    def forecasts(self) -> list[dict[str, Any]]: ...
    def set_profile(self, on: bool) -> None: ...
    def take_traces(self) -> list[dict[str, int]]: ...

# -- array views -----------------------------------------------------------------------------------
class DlpackView:
    """A tensor borrowed from any object with `__dlpack__`, for as long as the view lives. It raises
    UnsupportedError for another device and ConfigError for a bad dtype.
    """

    address: int
    shape: tuple[int, ...]
    # They count elements.
    strides: tuple[int, ...]
    # It is f32, f16, bf16, i32 or i64.
    dtype: str
    # `device` is DLPack's type and number of the device where the tensor must be.
    def __init__(self, capsule: object, device: tuple[int, int] = (1, 0)) -> None: ...

# -- oracle (tests, verify) ------------------------------------------------------------------------
class FfnOracle:
    """Experts that are loaded like a worker's and computed in this process by one kernel set
    ("reference" ... "avx512").
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
    # Matrices are 2-D and biases 1-D arrays of float32, which are rounded to weight_dtype. A matrix
    # may also be (format, bytes, outputs, inputs, scales or b"").
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
    # Rows and result are NumPy arrays of float32, or of uint16 bit patterns for 16-bit dtypes.
    def forward(
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
# FormatFacts of csrc/compute/formats/weight_format.h by the name of the format, and the size of a
# record.
def weight_formats() -> dict[str, dict[str, int]]: ...

# Returns a NumPy array of float32 [outputs, inputs]. Both buffers are contiguous.
def dequantize(weight_format: str, data: object, outputs: int, inputs: int, scales: object = b"") -> object: ...

# The bytes that a CPU worker holds for these experts, biases aside.
def packed_bytes(*, spec: Mapping[str, Any], num_experts: int, weight_dtype: str, isa: str) -> int: ...

# The values with which a worker that holds int8_g32 or int4_g32 computes.
def requantize(weight_format: str, values: object) -> object: ...

# -- operators of the host -------------------------------------------------------------------------
class HostPool:
    """The compute threads that a host's operators share; the caller is one of them. Any thread may
    call an operator, and jobs run one at a time, first come, first served. ConfigError for threads,
    a CPU or a kernel set that cannot be had.
    """

    threads: int
    isa: str
    def __init__(self, *, threads: int, cpus: Sequence[int] = (), spin_ns: int = 0, isa: str) -> None: ...
