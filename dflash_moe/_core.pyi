"""The C++ core: transports, worker loop, client, CPU kernels. Every call that can block releases
the GIL. Errors arrive as the classes of `dflash_moe.errors` (table in csrc/bindings/errors.cc).

Row operators (`rms_norm` ... `add_scaled`) take all by position, because keyword arguments cost 3
us a call, and they are called in every layer. Memory comes as addresses (torch's data_ptr()), with
strides in bytes and dtypes "f32", "f16", "bf16"; the caller keeps it alive and vouches for its
size. An address of 0 says that there is none. Values are computed in float32 and rounded once; a
row's bits depend on that row and on the weights alone. Output rows may be input rows of the same
dtype and stride. Vectors (weights, biases, scales) are float32 and contiguous, rows of cosines and
sines are float32. ConfigError for sizes that do not fit.

`make stubs` writes this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

class NumericsFacts:
    """A row of the table of numerics classes (csrc/compute/numerics.h)."""

    @property
    def activations(self) -> str:
        """A topology asks for the class by this word."""

    @property
    def group_inputs(self) -> int:
        """So many inputs of a row share a scale; 0 means that none do."""

    @property
    def inputs(self) -> str:
        """Inputs are rounded to this: none, bf16, int8 or f16."""

    @property
    def is_bounded(self) -> bool:
        """The bits of a bounded class depend on the architecture of a card, within a bound of the
        reference. All others have the same bits everywhere.
        """

    @property
    def name(self) -> str: ...
    @property
    def offered_by(self) -> list[str]:
        """These offer it, of cpu (processors of this build's kind), cuda and hip."""

    @property
    def weights(self) -> str:
        """Weights are rounded to this: none, bf16 or f16."""

class SecureSocket:
    """One connection under TLS 1.3 with a pre-shared key (csrc/transport/secure). No call blocks.
    Any thread may call; calls of two threads take turns. A channel, a pulse or a relay consumes it.

    WorkerLost where the peer hung up, ProtocolError where the ends do not share a key or a record
    was changed on its way.
    """

    def __init__(self, descriptor: int, *, is_dialling: bool, keys: Sequence[tuple[str, bytes]]) -> None:
        """It takes ownership of `descriptor`, whatever happens. `keys` are (identity, 32 bytes):
        the dialling side offers the first, the accepting side takes any. UnsupportedError without
        libssl.
        """

    def channel_binding(self) -> bytes:
        """32 bytes that only the two ends of this connection know (RFC 9266)."""

    def close(self) -> None: ...
    def fileno(self) -> int:
        """-1 once it is closed or consumed."""

    def flush(self) -> None: ...
    def handshake(self) -> bool:
        """True once it is over. Before that: wait for POLLIN, and for POLLOUT while
        `has_unsent`.
        """

    def hang_up(self) -> None:
        """Ends every wait on the descriptor."""

    def receive(self, num_bytes: int) -> bytes | None:
        """Returns None where nothing has come."""

    def send(self, content: Buffer) -> int:
        """Returns how many bytes were taken."""

    @property
    def has_pending(self) -> bool:
        """receive() may return bytes although the descriptor is not readable."""

    @property
    def has_unsent(self) -> bool: ...
    @property
    def identity(self) -> str:
        """The identity of the key that is used, once the handshake is over."""

class Relay:
    """Decrypts for somebody who has only a descriptor, in a thread of its own. It consumes
    `socket`.
    """

    def __init__(self, socket: SecureSocket) -> None: ...
    def close(self) -> None:
        """Hangs up at both ends. It may be called again."""

    def take_plain(self) -> int:
        """The plain end, once; it becomes the caller's."""

class Geometry:
    """The slots of a data path: their number, and the bytes of a request and of a reply in each."""

    def __init__(self, num_slots: int, request_bytes: int, reply_bytes: int) -> None: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def reply_bytes(self) -> int: ...
    @property
    def request_bytes(self) -> int: ...

class PathTerms:
    """What both ends know of a data path before it exists (csrc/transport/kinds.h)."""

    def __init__(
        self,
        geometry: Geometry,
        generation: int,
        *,
        is_open: bool = False,
        socket_buffer_bytes: int = 0,
        user_timeout_ms: int = 0,
        local_host: str = "",
        is_fast_only: bool = False,
    ) -> None:
        """is_open: The segment of replies stays writable, so that a device of the host may register
        it.
        socket_buffer_bytes: The buffers have this size each way; 0 keeps the system's own.
        user_timeout_ms: TCP takes a peer that acknowledges nothing for so long for gone; 0 keeps
        the system's own.
        local_host: The host's own numeric address on the network of the worker; empty stands for
        one machine.
        is_fast_only: A fabric may only be one behind which hardware moves the bytes.
        """

class Channel:
    """One end of a data path. `Client.add_worker`, `Client.renew_path`, `Client.revive`,
    `Worker.serve` or a decorator such as `make_emulated` consumes it.
    """

    @property
    def kind(self) -> str: ...

class Tap:
    """Copies of exchanges that cross a channel (csrc/transport/tapped.h). Any thread may call.
    DflashError where the system has no descriptor left.
    """

    def __init__(self) -> None: ...
    def arm(self, num_skipped: int, num_exchanges: int, max_bytes: int) -> None:
        """The next `num_exchanges` after `num_skipped` are copied, as long as their requests have
        `max_bytes` at most. They count when they are sent, whether a reply comes or not.
        """

    def fileno(self) -> int:
        """Readable while there are copies to take, and when the last exchange was sent; the tap's
        own.
        """

    def take(self) -> list[tuple[bytes, bytes]]:
        """Pairs of request and reply, whole frames, oldest first."""

    @property
    def is_spent(self) -> bool:
        """All of them were sent: nothing more is copied until the next `arm`."""

class TransportKind:
    """A row of the table of transports (csrc/transport/kinds.h)."""

    def try_here(self) -> None:
        """Makes a path within this process. DflashError says what this machine lacks."""

    @property
    def is_clear(self) -> bool:
        """Messages travel in clear even where those connections are encrypted."""

    @property
    def is_dialled(self) -> bool:
        """The host dials its connections, and the data connection is the only descriptor of both
        ends.
        """

    @property
    def name(self) -> str: ...
    @property
    def reaches(self) -> list[str]:
        """The workers that it reaches: "started", "started, unix", "started, tcp", "unix path" or
        "tcp host".
        """

    @property
    def setting(self) -> str:
        """This value of the setting `transport` means this kind."""

class PathOffer:
    """The host's end between its offer and the worker's answer."""

    def complete(self, answer: bytes, descriptors: Sequence[int], secured: SecureSocket | None = None) -> Channel:
        """Makes the host's channel, once. It takes ownership of the descriptors, whatever happens.
        An encrypted data connection, which it consumes, stands in the place of a descriptor.
        """

    @property
    def descriptors(self) -> list[int]:
        """They stay the offer's own; the peer gets copies."""

    @property
    def payload(self) -> bytes: ...

class Acceptance:
    """The worker's end once it has accepted an offer."""

    def take_channel(self) -> Channel: ...
    @property
    def descriptors(self) -> list[int]:
        """They stay the acceptance's own; the peer gets copies."""

    @property
    def payload(self) -> bytes: ...

class FabricProvider:
    """A provider of libfabric that paths can use here (csrc/transport/fabric/fabric.h)."""

    @property
    def is_fast(self) -> bool:
        """Hardware moves the bytes."""

    @property
    def name(self) -> str: ...
    @property
    def protocol(self) -> int: ...
    @property
    def protocol_version(self) -> int: ...

class MappedFile:
    """A file mapped for reading until the object dies."""

    @staticmethod
    def of_descriptor(descriptor: int, path: str) -> MappedFile:
        """Takes the descriptor, and closes it with the object. `path` is what errors call the
        file.
        """

    def __init__(self, path: str) -> None:
        """CheckpointError is for a file that cannot be mapped."""

    def drop_pages(self) -> None:
        """Resident pages of the file leave this process, by madvise(MADV_DONTNEED)."""

    def read(self, offset: int, num_bytes: int) -> bytes: ...
    def state(self) -> tuple[int, int, int, int, int]:
        """What tells this file from another, and its state now from a later one: (device, inode,
        bytes, and when contents and entry were changed last, in nanoseconds since 1970).
        """

    @property
    def size(self) -> int: ...

class DirectFile:
    """A file that is read into slots, past the page cache where possible."""

    def __init__(self, descriptor: int, path: str) -> None:
        """Takes the descriptor, and closes it with the object."""

class BackendDevice:
    """An opened device of a backend. While a worker serves with it, only the worker may use it."""

    def __init__(self, *, backend: str, device: int = 0, simulate: str = "", num_threads: int = 1, seed: int = 1) -> None:
        """ConfigError is for a device that does not exist, and UnsupportedError says why the
        backend or the device cannot be used.
        """

    def free_bytes(self) -> int:
        """The bytes of the device's memory that are free now."""

    def layer_bytes(self, *, spec: dict[str, Any], num_experts: int, weight_dtype: str, numerics: str = ...) -> int:
        """The bytes that such a layer will hold on the device."""

    def numerics_classes(self) -> list[str]: ...
    def self_test(self, test_case: int) -> dict[str, Any]:
        """The keys are num_cases, elements, differing, kernel and formats."""

    @property
    def arch(self) -> str: ...
    @property
    def label(self) -> str:
        """For example "cuda:0 (NVIDIA H200)"."""

class StagingBlock:
    """Memory of the host that a device copies from and to fastest. It goes back to the pool of the
    device when the object dies.
    """

    @property
    def address(self) -> int: ...

class HostDevice:
    """The device that a host's own tensors live on. Any thread may call."""

    def __init__(self, *, backend: str, device: int = 0) -> None:
        """ConfigError is for a device that does not exist; UnsupportedError says why it cannot be
        used.
        """

    def copy_in(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """This and `copy_out` take pieces of (device's address, host's address, bytes), and return
        when all is copied.
        """

    def copy_out(self, pieces: Sequence[tuple[int, int, int]]) -> None: ...
    def refuses_replies(self, *, is_open: bool) -> str:
        """Says why it cannot use the memory of replies, and is empty where it can. It must not be
        called in a step.
        """

    def staging(self, num_bytes: int) -> StagingBlock: ...
    @property
    def dlpack_device(self) -> tuple[int, int]:
        """DLPack's device type and number of its tensors. A simulated card has those of the
        processor, (1, 0).
        """

    @property
    def name(self) -> str:
        """For example "cuda 0 (NVIDIA H200)"."""

    @property
    def stream(self) -> int:
        """The stream of its queue for `__dlpack__(stream=...)`; 0 means that it has none."""

class HostPool:
    """The compute threads that a host's operators share; the caller is one of them. Any thread may
    call an operator, and jobs run one at a time, first come, first served. ConfigError for threads,
    a CPU or a kernel set that cannot be had.
    """

    def __init__(self, *, threads: int, cpus: Sequence[int] = [], spin_ns: int = 0, isa: str) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...

class OperatorTimes:
    """What the clock found of one operator, or of one packed matrix."""

    @property
    def bytes(self) -> int:
        """Of weights, keys and values that it read."""

    @property
    def calls(self) -> int: ...
    @property
    def lost_ns(self) -> int:
        """Of that, what jobs of a pool took beyond their tasks evenly shared by all threads."""

    @property
    def multiply_adds(self) -> int: ...
    @property
    def numerics(self) -> str:
        """The numerics class of the multiply-adds; empty where there are none."""

    @property
    def operator(self) -> str: ...
    @property
    def own_ns(self) -> int:
        """The time inside it, without the operators that it calls."""

    @property
    def subject(self) -> int:
        """The address of the packed matrix, the first one of those in one call; else 0."""

class ResidentShard:
    """The loan of a shard. A shard that others use is complete; a new one is loaded by the
    borrower.
    """

    def are_packed_as_loaded(self, begin: int, end: int) -> bool:
        """Sums up the packed bytes of the experts again, without the GIL; any threads may take
        different experts. False where one is not what was loaded: the shard is then damaged.
        """

    def compute_rows(
        self,
        rows: bytes,
        row_dtype: str,
        *,
        row_counts: Sequence[int],
        local_expert_ids: Sequence[int],
        weights: Sequence[float],
        reply_dtype: str,
    ) -> bytes:
        """Computes rows [len(row_counts), in_size] on the caller's thread, beside whatever serves
        the shard, and returns those of the reply. Pairs are listed row by row, ids ascend within a
        row. ConfigError for arguments that do not fit; errors of a worker that computes.
        """

    def content(self) -> tuple[int | None, int]:
        """Returns the content checksum, or None as long as the shard is unchecked, and how many
        experts have been read whole. CheckpointError is for files that cannot be read.
        """

    def flip_bit(self, local_expert_id: int, byte: int, bit: int) -> bool:
        """For tests: changes a bit of the packed bytes; False where the expert has none there."""

    def give_back(self) -> None: ...
    def load_expert(
        self,
        local_expert_id: int,
        *,
        gate: tuple[MappedFile, int, str, int, int, int, int] | None,
        up: tuple[MappedFile, int, str, int, int, int, int],
        down: tuple[MappedFile, int, str, int, int, int, int],
        gate_bias: tuple[MappedFile, int, str, int, int] | None = None,
        up_bias: tuple[MappedFile, int, str, int, int] | None = None,
        down_bias: tuple[MappedFile, int, str, int, int] | None = None,
    ) -> None:
        """Any threads may load different experts at the same time.

        A matrix is (file, byte offset of element (0, 0), dtype, outputs, inputs, output_stride,
        input_stride), with strides in elements. Blocks are followed by (file, offset, row stride)
        of scales that lie apart, and those by a tuple of their layout where a checkpoint packs them
        otherwise (csrc/bindings/weight_sources.h). A vector is (file, byte offset, dtype, count,
        stride), with the stride in elements.
        """

    def map_expert(
        self, local_expert_id: int, file: MappedFile, offset: int, *, content_checksum: int, panels_sum: int
    ) -> None:
        """Takes an expert's panels from a file of them instead of packing them, or instead of the
        memory in which they were packed, which is given back. Any threads may map different
        experts. CheckpointError where the file is too short, ConfigError where the loaded expert is
        another one.
        """

    def packed_expert(self, local_expert_id: int) -> tuple[list[memoryview], int, int]:
        """Returns the memory of an expert's panels and biases, which is valid while this loan lasts
        and nobody maps the expert, its content checksum and the sum of that memory. No pieces where
        it is not in memory whole.
        """

    def reload_expert(
        self,
        local_expert_id: int,
        *,
        gate: tuple[MappedFile, int, str, int, int, int, int] | None,
        up: tuple[MappedFile, int, str, int, int, int, int],
        down: tuple[MappedFile, int, str, int, int, int, int],
        gate_bias: tuple[MappedFile, int, str, int, int] | None = None,
        up_bias: tuple[MappedFile, int, str, int, int] | None = None,
        down_bias: tuple[MappedFile, int, str, int, int] | None = None,
    ) -> None:
        """Loads an expert again that a scrub has found changed. ConfigError where it is not,
        CheckpointError where the source is not what it was.
        """

    def slot_expert(
        self, local_expert_id: int, file: DirectFile, offset: int, *, content_checksum: int, panels_sum: int
    ) -> None:
        """Says where an expert lies that is read whenever a call needs it and no slot has it.
        ConfigError where slots hold fewer experts than this shard has, CheckpointError where the
        file is too short, UnsupportedError without slots.
        """

    @property
    def is_complete(self) -> bool: ...
    @property
    def is_shared(self) -> bool:
        """Whether somebody else borrows it too."""

    @property
    def number(self) -> int:
        """What tells the shard from all others that its store has had."""

    @property
    def panel_form(self) -> tuple[int, int, str, str, str, int, int] | None:
        """How experts lie in files of panels: (version, panel width, order, format of gate and up,
        format of down, bytes of an expert's panels, of its biases); None where this shard takes
        none.
        """

class ShardStore:
    """The shards that this process has resident. Any thread may borrow."""

    def __init__(
        self,
        *,
        isa: str,
        num_threads: int,
        cpus: Sequence[int] = [],
        device: BackendDevice | None = None,
        weights_layout: str = "packed",
        memory_limit: int = 0,
        pool: HostPool | None = None,
        slots_bytes: int = 0,
        first_number: int = 1,
    ) -> None:
        """device: This device computes instead of the kernels of `isa`.
        weights_layout: With "mapped" it computes from the files, which it keeps open.
        memory_limit: The weights may take so many bytes; 0 sets no limit.
        pool: These threads compute instead of threads of its own.
        slots_bytes: Experts are read into so many bytes of memory as calls need them
        (ResidentShard.slot_expert); 0: they stay where they were loaded.
        first_number: That of the first shard.
        """

    def batches(self) -> dict[str, int]:
        """What its sessions have computed together: batches, batch_rows (of all) and batch_sessions
        (summed over the batches).
        """

    def borrow(
        self,
        spec: dict[str, Any],
        num_local_experts: int,
        weight_dtype: str,
        weights_fingerprint: int,
        numerics: str = ...,
        free_bytes: int | None = None,
    ) -> ResidentShard:
        """ConfigError is raised where there is no room for the shard, or somebody else is loading
        it.

        free_bytes: So much of the memory in which it will lie is free; with None only the memory
        limit counts. Shards that nobody borrows are freed for it, the oldest first.
        spec: The keys are those of FfnSpec, enums go by their lower-case names ("silu", "gated",
        "clamped_swiglu"), and what is missing has its default.
        """

    def drop_failed(self) -> None: ...
    def drop_unborrowed(self, kept_s: float = 0.0) -> float:
        """Frees the shards that nobody has borrowed for so many seconds, and returns in how many
        the next one will have been, 0 where there is none.
        """

    def num_shards(self) -> int: ...
    def resident_bytes(self) -> int: ...
    def slots(self) -> dict[str, int]:
        """What slots have done so far: hits and misses of calls' experts, read_bytes, and their
        number, slots, and that of threads that read, readers; empty where there are none.
        """

class ContentReader:
    """Reads the source bytes of one expert in steps, for its content checksum."""

    def __init__(
        self,
        *,
        gate: tuple[MappedFile, int, str, int, int, int, int] | None,
        up: tuple[MappedFile, int, str, int, int, int, int],
        down: tuple[MappedFile, int, str, int, int, int, int],
        gate_bias: tuple[MappedFile, int, str, int, int] | None = None,
        up_bias: tuple[MappedFile, int, str, int, int] | None = None,
        down_bias: tuple[MappedFile, int, str, int, int] | None = None,
    ) -> None: ...
    def read(self, num_bytes: int) -> bool:
        """Reads so many bytes more; True means that all is read. CheckpointError is for files that
        cannot be read.
        """

    def value(self) -> int:
        """The checksum of the expert, once all is read."""

class Scrubber:
    """Sums up the weights of a store again and again (csrc/store/scrubber.h)."""

    def __init__(self, store: ShardStore, *, period_s: float) -> None:
        """A pass over all of them takes `period_s` seconds; with 0 there is none, and what calls
        find is handed on.
        """

    def next_damage(self) -> tuple[int, int] | None:
        """Blocks without the GIL until an expert is found changed, and returns (number of the
        shard, local expert), or None once it was stopped. One thread at a time.
        """

    def set_period(self, period_s: float) -> None: ...
    def stats(self) -> dict[str, int]:
        """scrubbed_bytes, scrub_damages."""

    def stop(self) -> None: ...

class Worker:
    """The serving side: it computes the requests of one data path at a time with the shards it
    holds.
    """

    def __init__(self, *, name: str, spin_ns: int = 0, slowdown: float = 1.0) -> None: ...
    def content(self, layer: int, shard: int) -> tuple[int | None, int] | None:
        """Returns what ResidentShard.content returns, or None where nothing is held."""

    def give_back(self) -> None: ...
    def hold(self, layer: int, shard: int, loan: ResidentShard) -> None:
        """Requests for (layer, shard) are computed with the loan, which the worker keeps. One
        thread calls this, and only while serve() does not run.
        """

    def progress(self) -> int: ...
    def serve(self, channel: Channel, generation: int) -> None:
        """It blocks without the GIL until the path ends."""

    def serve_inline(self, geometry: Geometry, generation: int) -> Channel:
        """Returns the host's end of a loopback. Whoever waits there for a reply computes it, one
        thread at a time.
        """

    @overload
    def start_pulse(self, fd: int) -> None:
        """It takes ownership of `fd`, or consumes `socket`."""

    @overload
    def start_pulse(self, socket: SecureSocket) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def stop(self, generation: int) -> None:
        """It holds for this generation also when serve() has not begun yet."""

    def stop_pulse(self) -> None: ...

class ShardShape:
    """What one shard of one layer asks of the slots of its holder."""

    def __init__(self, in_size: int, out_size: int, top_k: int, num_experts: int) -> None: ...

class SlicePlan:
    """A resolved mode. Where `is_measured`, slices and window are upper bounds, within which the
    worker's model chooses.
    """

    @property
    def is_measured(self) -> bool: ...
    @property
    def mode(self) -> str: ...
    @property
    def slice_tokens(self) -> int: ...
    @property
    def slot_rows(self) -> int: ...
    @property
    def window(self) -> int: ...

class SlotPlan:
    """The slots of one worker's data path, and the rows that they were made for."""

    def __init__(self, num_slots: int, rows: int, request_bytes: int, reply_bytes: int) -> None: ...
    def holds(self, other: SlotPlan) -> bool: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def geometry(self) -> Geometry: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def reply_bytes(self) -> int: ...
    @property
    def request_bytes(self) -> int: ...
    @property
    def rows(self) -> int: ...

class TokenBatch:
    """The tensors of one call, made once. It keeps `owners` alive while the core may touch them.
    `hidden_states`, `topk_ids`, `topk_weights` and `output` are addresses.
    """

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
        owners: Any,
    ) -> None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def hidden_states(self) -> int: ...
    @property
    def ids_are_64bit(self) -> bool: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def output(self) -> int: ...
    @property
    def owners(self) -> Any: ...
    @property
    def row_stride_bytes(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def topk_ids(self) -> int: ...
    @property
    def topk_weights(self) -> int: ...
    @property
    def weights_dtype(self) -> str: ...

class StepLease:
    """The data paths of a client that it has handed over to a device step: those of `workers`, by
    index. `holders` names for each layer who answers for its shards, as places in `workers`; leases
    with the same `holders_id` have equal `holders`.
    """

    @property
    def holders(self) -> dict[int, list[int]]: ...
    @property
    def holders_id(self) -> int: ...
    @property
    def workers(self) -> list[int]: ...

class StepReport:
    """How a device step went. `code` is one of `error_codes()`, or 0 without failure. `layer` and
    `worker` say where it failed, `detail` is the token or the device's reason, and `text` holds the
    words of a worker that refused.
    """

    @property
    def code(self) -> int: ...
    @property
    def detail(self) -> int: ...
    @property
    def layer(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def worker(self) -> str: ...

class Client:
    """The host's side of the exchange with all workers. Any thread may call; which worker is meant
    is said by the number that `add_worker` returned.
    """

    def __init__(
        self,
        *,
        spin_ns: int,
        call_timeout_s: float,
        stall_timeout_s: float,
        max_calls: int = 1024,
        suspect_s: float = 0.3,
        park_s: float = 2.0,
        reconnect_grace_s: float = 0.05,
        hedge_share: float = 0.05,
    ) -> None:
        """suspect_s: What a worker owes that shows no progress for so long is asked of another
        holder too.
        park_s: A slice without a usable holder waits so long for one that is on its way back, and
        so long of that before a last resort gets it.
        hedge_share: Second requests for slices that are merely slow, per slice that arrives; 0
        sends none.
        """

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
        is_last_resort: bool = False,
    ) -> int:
        """is_last_resort: It is asked only where no other holder can be."""

    def begin_step(self, num_calls: int, timeout_s: float) -> StepLease:
        """Holds the client and hands over the data paths of one holder for each shard.
        WorkerTimeout, WorkerLost; UnsupportedError names a worker that is not reached in shared
        memory, or has too few slots.
        """

    def close(self) -> None:
        """Every later use is a ConfigError. Threads that are inside end by themselves."""

    def counters(self) -> dict[tuple[int, int], dict[str, int]]:
        """The counters by (worker, layer)."""

    def define_layer(
        self,
        *,
        layer: int,
        name: str,
        in_size: int,
        out_size: int,
        num_experts: int,
        shards: Sequence[tuple[int, int, int, Sequence[int]]],
        cost_class: int = 0,
    ) -> None:
        """shards: Each shard is (shard id, worker, weights fingerprint, ascending expert ids).
        cost_class: Layers of equal class share a cost curve.
        """

    def end_step(self, report: StepReport | None) -> None:
        """Resumes calls. Without a report it is not known how far the step came, and none of its
        paths is used again.
        """

    def event_fd(self) -> int:
        """The descriptor is readable while events wait. It stays the client's own."""

    def forecasts(self) -> list[dict[str, Any]]:
        """For each worker its cost curves, and the chunks that were chosen, predicted and
        measured.
        """

    def hold(self, timeout_s: float) -> None:
        """Parks new calls and returns once none is under way; they go on at resume().
        WorkerTimeout.
        """

    def mark_lost(self, worker: int, reason: str) -> None: ...
    def pulse_age_s(self, worker: int) -> float:
        """Reads the pulses of a worker, and returns how long ago the last one was read."""

    def renew_path(self, worker: int, channel: Channel, generation: int) -> None: ...
    def resume(self) -> None: ...
    def retire_path(self, worker: int, reason: str) -> None:
        """This and `renew_path` raise WorkerLost, and ConfigError where something is in flight on
        the path.
        """

    def retire_worn_paths(self) -> list[tuple[int, str]]:
        """Returns (worker, reason) for each path; the caller renews them."""

    def revive(self, worker: int, channel: Channel, generation: int, pulse_fd: int) -> None:
        """Takes a lost worker back, which another process may serve now. It takes the pulse
        descriptor in every case. ConfigError where the worker is not lost or the generation is the
        former one.
        """

    def run(self, layer: int, batch: TokenBatch) -> None:
        """Submits a call, waits for it and raises its error: the hot path crosses into C++ once."""

    def set_draining(self, worker: int, is_draining: bool) -> None:
        """A worker that drains gets no new slices where another holder can have them."""

    def set_dtypes(self, worker: int, request_dtype: str, reply_dtype: str) -> None: ...
    def set_holders(self, layer: int, shard: int, workers: Sequence[int]) -> None:
        """The workers that hold a shard, preferred first; whoever calls this knows that they
        compute the same bits. ConfigError names layer and shard.
        """

    def set_policy(self, worker: int, slice_tokens: int, window: int, is_measured: bool = False) -> None:
        """Where `is_measured`, both numbers are upper bounds and the worker's model chooses."""

    def set_profile(self, on: bool) -> None: ...
    def set_remedy(self, worker: int, has_remedy: bool) -> None:
        """Whether somebody brings the worker back if it is lost, so that calls wait for that."""

    def set_spinning(self, is_allowed: bool) -> None:
        """Whether waits may spin, where the client was made with time to spin."""

    def set_stand_in(self, worker: int, may_come: bool) -> None:
        """Whether another holder will be named once the worker is suspected, for which a call waits
        beyond its deadline.
        """

    def take_events(self) -> list[dict[str, Any]]:
        """Each is worker, kind (suspect, well, lost, idle) and reason, in the order of what
        happened.
        """

    def take_traces(self) -> list[dict[str, int]]: ...
    def wake_renewer(self) -> None: ...
    def workers(self) -> list[dict[str, Any]]: ...
    def worn_fd(self) -> int:
        """The descriptor is readable while a data path waits to be renewed, and after
        wake_renewer(). It stays the client's own.
        """

class Call:
    """A submitted call. Any number of threads may call."""

    def __init__(self, client: Client, layer: int, batch: TokenBatch) -> None:
        """It submits the call. ConfigError and WorkerLost are raised at once."""

    def abandon(self) -> None: ...
    def is_done(self) -> bool: ...
    def result(self) -> None:
        """Raises the error with which the call ended, if it did."""

    def wait(self, timeout_s: float) -> bool:
        """Says whether the call is done, after at most `timeout_s`."""

class DeviceStep:
    """Exchanges on the host's device, without the host's processor in between. One thread uses it,
    but any may call `abort`.
    """

    @staticmethod
    def define_layer(
        device: HostDevice,
        *,
        layer: int,
        in_size: int,
        out_size: int,
        num_experts: int,
        shards: Sequence[tuple[int, int, int, Sequence[int]]],
    ) -> None:
        """It may be called again.

        shards: Those that Client.define_layer takes, in ascending order of their ids, each with a
        place in StepLease.workers instead of its worker.
        """

    def __init__(
        self,
        device: HostDevice,
        client: Client,
        lease: StepLease,
        *,
        timeout_s: float,
        late: str,
        budget_s: float,
        stream: int | None = None,
        nap_ns: int = 0,
    ) -> None:
        """The step is given up as soon as one of its workers is lost, or `timeout_s` have passed,
        which `late` says then. The kernels give up by themselves after `budget_s`. UnsupportedError
        is for a device that cannot use the memory of the data paths, DflashError for a lack of
        threads.
        """

    def abort(self) -> None: ...
    def add(self, layer: int, batch: TokenBatch) -> None:
        """Queues a call on the stream. The addresses of the batch are the device's."""

    def check(self) -> None:
        """Raises WorkerLost or WorkerTimeout where the step was given up."""

    def end(self) -> StepReport:
        """May be called again and returns the same then."""

    def give_up(self) -> None: ...
    def wait(self, timeout_s: float) -> bool: ...

class DlpackView:
    """A tensor borrowed from any object with `__dlpack__`, for as long as the view lives. It raises
    UnsupportedError for another device and ConfigError for a bad dtype.
    """

    def __init__(self, capsule: Any, device: tuple[int, int] = (1, 0)) -> None:
        """`device` is DLPack's type and number of the device where the tensor must be."""

    @property
    def address(self) -> int: ...
    @property
    def dtype(self) -> str:
        """It is f32, f16, bf16, i32 or i64."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]:
        """They count elements."""

class OpenHandover:
    """Library to supervisor, first: proves with the inherited token that it was meant."""

    def __init__(self, *, version: int, token: bytes, layout: int) -> None: ...
    @property
    def layout(self) -> int: ...
    @property
    def token(self) -> bytes: ...
    @property
    def version(self) -> int: ...

class RefuseHandover:
    """Supervisor to library: why nothing is handed over. The supervisor closes afterwards."""

    def __init__(self, *, text: str) -> None: ...
    @property
    def text(self) -> str: ...

class PlanHead:
    """Supervisor to library: what concerns all calls, and how many messages of each kind follow."""

    def __init__(
        self,
        *,
        num_workers: int,
        num_layers: int,
        num_shards: int,
        num_tensors: int,
        architecture: str,
        fingerprint: str,
        spin_ns: int,
        call_timeout_ns: int,
        stall_timeout_ns: int,
    ) -> None: ...
    @property
    def architecture(self) -> str: ...
    @property
    def call_timeout_ns(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_shards(self) -> int: ...
    @property
    def num_tensors(self) -> int: ...
    @property
    def num_workers(self) -> int: ...
    @property
    def spin_ns(self) -> int: ...
    @property
    def stall_timeout_ns(self) -> int: ...

class PlannedWorker:
    """Supervisor to library: a worker, numbered in the order of these messages."""

    def __init__(
        self, *, name: str, slice_tokens: int, window: int, is_measured: bool, request_dtype: str, reply_dtype: str
    ) -> None: ...
    @property
    def is_measured(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def reply_dtype(self) -> str: ...
    @property
    def request_dtype(self) -> str: ...
    @property
    def slice_tokens(self) -> int: ...
    @property
    def window(self) -> int: ...

class PlannedLayer:
    """Supervisor to library: a layer and its experts' formula (csrc/compute/experts/ffn_spec.h)."""

    def __init__(
        self,
        *,
        layer: int,
        name: str,
        in_size: int,
        intermediate_size: int,
        out_size: int,
        num_experts: int,
        top_k: int,
        cost_class: int,
        activation: int,
        gate: int,
        alpha: float,
        up_offset: float,
        gate_max: float,
        up_limit: float,
        has_gate_up_bias: bool,
        has_down_bias: bool,
    ) -> None: ...
    @property
    def activation(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def cost_class(self) -> int: ...
    @property
    def gate(self) -> int: ...
    @property
    def gate_max(self) -> float: ...
    @property
    def has_down_bias(self) -> bool: ...
    @property
    def has_gate_up_bias(self) -> bool: ...
    @property
    def in_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def layer(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def out_size(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def up_limit(self) -> float: ...
    @property
    def up_offset(self) -> float: ...

class PlannedShard:
    """Supervisor to library: the experts of a layer that one worker holds."""

    def __init__(
        self, *, layer: int, shard: int, worker: int, weights_fingerprint: int, expert_ranges: Sequence[int]
    ) -> None: ...
    @property
    def expert_ranges(self) -> tuple[int, ...]: ...
    @property
    def layer(self) -> int: ...
    @property
    def shard(self) -> int: ...
    @property
    def weights_fingerprint(self) -> int: ...
    @property
    def worker(self) -> int: ...

class PlannedTensor:
    """Supervisor to library: a tensor of the checkpoint that the workers stand in for."""

    def __init__(
        self,
        *,
        layer: int,
        name: str,
        ggml_type: int,
        extents: Sequence[int],
        num_bytes: int,
        file_offset: int,
        has_sample: bool,
        sample: int,
    ) -> None: ...
    @property
    def extents(self) -> tuple[int, ...]: ...
    @property
    def file_offset(self) -> int: ...
    @property
    def ggml_type(self) -> int: ...
    @property
    def has_sample(self) -> bool: ...
    @property
    def layer(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def sample(self) -> int: ...

class PathTermsMessage:
    """Supervisor to library: make the host's end of a data path. The supervisor sends it for every
    worker at the start, in answer to PathWorn, and when a lost worker has come back.
    """

    def __init__(
        self,
        *,
        worker: int,
        generation: int,
        transport: str,
        num_slots: int,
        request_bytes: int,
        reply_bytes: int,
        socket_buffer_bytes: int,
        user_timeout_ms: int,
        local_host: str,
    ) -> None: ...
    @property
    def generation(self) -> int: ...
    @property
    def local_host(self) -> str: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def reply_bytes(self) -> int: ...
    @property
    def request_bytes(self) -> int: ...
    @property
    def socket_buffer_bytes(self) -> int: ...
    @property
    def transport(self) -> str: ...
    @property
    def user_timeout_ms(self) -> int: ...
    @property
    def worker(self) -> int: ...

class PathOffered:
    """Library to supervisor: what the worker needs to make its end, with descriptors."""

    def __init__(self, *, worker: int, generation: int, payload: bytes, num_descriptors: int) -> None: ...
    @property
    def generation(self) -> int: ...
    @property
    def num_descriptors(self) -> int: ...
    @property
    def payload(self) -> bytes: ...
    @property
    def worker(self) -> int: ...

class PathAnswered:
    """Supervisor to library: what completes the host's end. The worker's descriptors come first,
    then a dialled connection of the path where the transport has one, then the pulse.
    """

    def __init__(self, *, worker: int, generation: int, payload: bytes, num_descriptors: int, has_pulse: bool) -> None: ...
    @property
    def generation(self) -> int: ...
    @property
    def has_pulse(self) -> bool: ...
    @property
    def num_descriptors(self) -> int: ...
    @property
    def payload(self) -> bytes: ...
    @property
    def worker(self) -> int: ...

class HandoverReady:
    """Supervisor to library: the plan is complete and every worker has its path."""

    def __init__(self) -> None: ...

class PathWorn:
    """Library to supervisor: a path must be renewed; nothing is under way on it."""

    def __init__(self, *, worker: int, reason: str) -> None: ...
    @property
    def reason(self) -> str: ...
    @property
    def worker(self) -> int: ...

class WorkerGone:
    """Either direction: a worker is lost. The supervisor has seen its process or connection end;
    the library has judged it by its pulse or by a call's deadline.
    """

    def __init__(self, *, worker: int, reason: str) -> None: ...
    @property
    def reason(self) -> str: ...
    @property
    def worker(self) -> int: ...

class TensorSeen:
    """Library to supervisor: the program loads a tensor. Without a reason the workers stand in for
    it; with one the program keeps it.
    """

    def __init__(self, *, name: str, reason: str) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def reason(self) -> str: ...

class Counted:
    """Library to supervisor: counters since the start, sent at most twice a second while they
    change, and at the end.
    """

    def __init__(
        self,
        *,
        calls: int,
        failed_calls: int,
        messages: int,
        rows: int,
        request_bytes: int,
        reply_bytes: int,
        floor_bytes: int,
        call_ns: int,
        compute_ns: int,
    ) -> None: ...
    @property
    def call_ns(self) -> int: ...
    @property
    def calls(self) -> int: ...
    @property
    def compute_ns(self) -> int: ...
    @property
    def failed_calls(self) -> int: ...
    @property
    def floor_bytes(self) -> int: ...
    @property
    def messages(self) -> int: ...
    @property
    def reply_bytes(self) -> int: ...
    @property
    def request_bytes(self) -> int: ...
    @property
    def rows(self) -> int: ...

class FfnOracle:
    """Experts that are loaded like a worker's and computed in this process by one kernel set
    ("reference" ... "avx512").
    """

    def __init__(
        self, *, spec: dict[str, Any], num_experts: int, weight_dtype: str, isa: str, num_threads: int = 1, numerics: str = ...
    ) -> None: ...
    def forward(
        self,
        rows: Annotated[npt.ArrayLike, np.float32],
        row_counts: Annotated[npt.ArrayLike, np.uint16],
        local_expert_ids: Annotated[npt.ArrayLike, np.uint16],
        weights: Annotated[npt.ArrayLike, np.float32],
        *,
        row_dtype: str = "f32",
        reply_dtype: str = "f32",
    ) -> np.ndarray:
        """Rows and result are NumPy arrays of float32, or of uint16 bit patterns for 16-bit
        dtypes.
        """

    def forward_float64(
        self,
        rows: Annotated[npt.ArrayLike, np.float32],
        row_counts: Annotated[npt.ArrayLike, np.uint16],
        local_expert_ids: Annotated[npt.ArrayLike, np.uint16],
        weights: Annotated[npt.ArrayLike, np.float32],
    ) -> npt.NDArray[np.float64]: ...
    def load_expert(
        self,
        expert_id: int,
        *,
        gate: Any,
        up: Any,
        down: Any,
        gate_bias: Any = None,
        up_bias: Any = None,
        down_bias: Any = None,
    ) -> None:
        """Matrices are 2-D and biases 1-D arrays of float32, which are rounded to weight_dtype. A
        matrix may also be (format, bytes, outputs, inputs, scales or b"").
        """

class CallCount:
    """The number of calls of the routed experts of one layer. Any thread may count."""

    def __init__(self) -> None: ...
    def add(self) -> None:
        """Counts a call."""

    @property
    def value(self) -> int: ...

class Program:
    """Calls of operators over fixed memory, which `run` makes one after another without the GIL. A
    method that has the name of a function of this module takes the same arguments and appends its
    call; memory must stay where it is as long as the program, see `keep`. One thread at a time runs
    it.
    """

    def __init__(self, num_rows: int) -> None:
        """A program for steps of so many rows."""

    def add_scaled(
        self,
        pool: HostPool,
        rows_address: int,
        row_stride_bytes: int,
        row_dtype: str,
        num_rows: int,
        width: int,
        out_address: int,
        out_stride_bytes: int,
        out_dtype: str,
        base_address: int = 0,
        base_stride_bytes: int = 0,
        base_dtype: str = "f32",
        gate_address: int = 0,
        gate_stride_bytes: int = 0,
        gate_dtype: str = "f32",
        scale: float = 1.0,
    ) -> None:
        """out = base + rows * s, where s is sigmoid(gate[row]), or `scale` without a gate; gate is
        [num_rows, 1].
        """

    def apply_gate(
        self,
        pool: HostPool,
        form: GateForm,
        gate_address: int,
        gate_stride_bytes: int,
        gate_dtype: str,
        up_address: int,
        up_stride_bytes: int,
        up_dtype: str,
        num_rows: int,
        width: int,
        out_address: int,
        out_stride_bytes: int,
        out_dtype: str,
    ) -> None:
        """out = act(gate) * up for rows of `width`; with gate "none", act(up), and the gate's
        address is 0.
        """

    def argmax(
        self,
        pool: HostPool,
        rows_address: int,
        row_stride_bytes: int,
        row_dtype: str,
        num_rows: int,
        width: int,
        out_address: int,
    ) -> None:
        """Writes the place of each row's largest value to int64 out [num_rows]: the lowest among
        equals.
        """

    def bind_experts(self, place: int, client: Client, layer: int, batch: TokenBatch, count: CallCount | None = None) -> None:
        """Has the call at this place be `client.run(layer, batch)`, counted in `count`. Errors of a
        run are those of Client.run.
        """

    def choose(self, pool: HostPool, vocab_size: int) -> None:
        """Chooses the token behind each row from its logits, as the step's draws say; nothing where
        it has none.
        """

    def copy_rows(
        self, rows_address: int, row_stride_bytes: int, row_bytes: int, num_rows: int, out_address: int, out_stride_bytes: int
    ) -> None:
        """Copies rows of so many bytes as they are."""

    def embed(self, linear: PackedLinear, out_address: int, out_stride_bytes: int, out_dtype: str) -> None:
        """As PackedLinear.gather, of the step's token ids."""

    def experts(self) -> int:
        """Appends a call of routed experts, and returns its place among these, at which
        `bind_experts` is told what to call before it runs.
        """

    def gather_rows(
        self, table_address: int, stride_bytes: int, row_bytes: int, num_rows: int, out_address: int, out_stride_bytes: int
    ) -> None:
        """Copies the rows of a table that the step's token ids name. ConfigError for an id that is
        not there.
        """

    def gather_tables(self, cos_address: int, sin_address: int, width: int) -> None:
        """Copies the cosines and sines of the step's positions to dense float32 [num_rows, width].
        ConfigError for a position that is not there.
        """

    def head(self, linear: PackedLinear, rows_address: int, row_stride_bytes: int, row_dtype: str, num_rows: int) -> None:
        """As PackedLinear.run, into the logits of the step."""

    def keep(self, owner: Any) -> None:
        """Keeps an object alive as long as the program. It must not lead back to the program, which
        would never go.
        """

    def layer_norm(
        self,
        pool: HostPool,
        rows_address: int,
        row_stride_bytes: int,
        row_dtype: str,
        num_rows: int,
        width: int,
        out_address: int,
        out_stride_bytes: int,
        out_dtype: str,
        epsilon: float,
        weight_address: int = 0,
        bias_address: int = 0,
    ) -> None:
        """out = (x - mean) / sqrt(variance + epsilon) * weight + bias, both [width]."""

    def multiply(
        self,
        linear: PackedLinear,
        rows_address: int,
        row_stride_bytes: int,
        row_dtype: str,
        num_rows: int,
        out_address: int,
        out_stride_bytes: int,
        out_dtype: str,
        residual_address: int = 0,
        residual_stride_bytes: int = 0,
        residual_dtype: str = "f32",
    ) -> None:
        """As PackedLinear.run."""

    def paged_attention(
        self,
        pool: HostPool,
        kv_layer: KvLayer,
        q_address: int,
        q_stride_bytes: int,
        q_dtype: str,
        num_heads: int,
        out_address: int,
        out_stride_bytes: int,
        out_dtype: str,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks_address: int = 0,
    ) -> None:
        """As the function of this name, by the plan of the step."""

    def rms_norm(
        self,
        pool: HostPool,
        rows_address: int,
        row_stride_bytes: int,
        row_dtype: str,
        num_rows: int,
        width: int,
        out_address: int,
        out_stride_bytes: int,
        out_dtype: str,
        epsilon: float,
        weight_address: int = 0,
        adds_one: bool = False,
        residual_address: int = 0,
        residual_stride_bytes: int = 0,
        residual_dtype: str = "f32",
        sum_address: int = 0,
        sum_stride_bytes: int = 0,
        sum_dtype: str = "f32",
        normalizes_rounded_sum: bool = False,
    ) -> None:
        """x = rows, or rows + residual, which `sum` keeps, rounded to sum_dtype; with
        normalizes_rounded_sum it is that rounded sum that is normalised. out = x / sqrt(mean(x^2) +
        epsilon) * weight, or * (1 + weight) with adds_one; weight is [width].
        """

    def rotate(
        self,
        pool: HostPool,
        rows_address: int,
        row_stride_bytes: int,
        row_dtype: str,
        num_rows: int,
        num_heads: int,
        head_dim: int,
        out_address: int,
        out_stride_bytes: int,
        out_dtype: str,
        cos_address: int,
        sin_address: int,
        table_stride_bytes: int,
        rotary_dim: int,
        rotary_offset: int = 0,
        layout: str = "halves",
        has_full_tables: bool = False,
    ) -> None:
        """Rows are [num_rows, num_heads, head_dim], heads adjacent. Of each head, rotary_dim values
        from rotary_offset on are rotated and the rest is copied. Cosines and sines are [num_rows,
        rotary_dim / 2] or, with has_full_tables, [num_rows, rotary_dim]. Layouts: "halves",
        "interleaved", "interleaved_to_halves" (read interleaved, written as halves).
        """

    def route(
        self,
        pool: HostPool,
        form: RouterForm,
        logits_address: int,
        logits_stride_bytes: int,
        logits_dtype: str,
        num_rows: int,
        topk_ids_address: int,
        id_type: str,
        topk_weights_address: int,
        bias_address: int = 0,
        expert_scales_address: int = 0,
    ) -> None:
        """Writes topk_ids [num_rows, top_k] ("i32" or "i64") and topk_weights [num_rows, top_k]
        (float32), in descending order of choice. The bias [num_experts] counts for the choice only;
        expert_scales [num_experts] multiply the weights.
        """

    def run(self, inputs: StepInputs, begin: int, end: int) -> tuple[float, float]:
        """Makes the calls begin..end - 1 and returns the seconds in which it waited for routed
        experts, and those in which experts were under way. Raises the error of the call that
        failed; signals are seen every 20 ms.
        """

    def run_together(
        self,
        linears: Sequence[PackedLinear],
        rows_address: int,
        row_stride_bytes: int,
        row_dtype: str,
        num_rows: int,
        outs: Sequence[tuple[int, int, str]],
    ) -> None:
        """As run_together of this module."""

    def store_keys(
        self,
        kv_layer: KvLayer,
        num_rows: int,
        k_address: int,
        k_stride_bytes: int,
        k_dtype: str,
        v_address: int,
        v_stride_bytes: int,
        v_dtype: str,
    ) -> None:
        """As KvLayer.append, at the slots of the step."""

    def submit_experts(self) -> int:
        """As `experts`, but returns before the experts have answered."""

    def wait_for_experts(self) -> None:
        """Waits for what was submitted last."""

    @property
    def failed(self) -> int | None:
        """The place of the call that ended the last run by its error, or None."""

    @property
    def num_calls(self) -> int: ...

class PackedLinear:
    """Matrices with equal inputs, packed for the kernels of the pool, and their products with rows.
    A row's bits depend on nothing but the row and the weights. Any thread may use it.
    """

    def __init__(self, pool: HostPool, parts: Sequence[tuple[Any, ...]], *, numerics: str) -> None:
        """A part is (matrix, bias or None, input_column); a fourth field names the format that is
        kept, where that is not the stored one (int8_g32, int4_g32). The matrix is what
        ResidentShard.load_expert takes, or one in memory: (address, format, outputs, inputs,
        output_stride, input_stride), followed, where scales lie apart, by (address, row stride in
        bytes) of these. Strides of float formats are in elements; other formats have output_stride
        in bytes and input_stride 0. A bias in memory is (address, dtype, count, stride), with the
        stride in elements. Memory and files are not used afterwards. ConfigError, UnsupportedError
        and CheckpointError name the part.
        """

    def gather(self, ids_address: int, num_ids: int, out_address: int, out_stride_bytes: int, out_dtype: str) -> None:
        """Writes the weights of outputs `ids` (int64) as rows [num_ids, inputs], widened exactly
        and rounded once. ConfigError for an id that is not there.
        """

    def run(
        self,
        rows_address: int,
        row_stride_bytes: int,
        row_dtype: str,
        num_rows: int,
        out_address: int,
        out_stride_bytes: int,
        out_dtype: str,
        residual_address: int = 0,
        residual_stride_bytes: int = 0,
        residual_dtype: str = "f32",
    ) -> None:
        """Multiplies rows [num_rows, row_width] and writes [num_rows, outputs], rounded once. The
        residual [num_rows, outputs] is added before that; it may be the output's memory.
        WorkerError names the first row and column of a value that only out_dtype cannot hold.
        """

    @property
    def address(self) -> int:
        """What OperatorTimes.subject names it by."""

    @property
    def formats(self) -> list[str]:
        """Of each part: the format that is kept."""

    @property
    def inputs(self) -> int:
        """Elements of a row that each part reads."""

    @property
    def numerics(self) -> list[str]:
        """Of each part: the numerics class, which is the default one where the wanted one does not
        take the format.
        """

    @property
    def outputs(self) -> int:
        """Of all parts together, side by side in their order."""

    @property
    def resident_bytes(self) -> int: ...
    @property
    def row_width(self) -> int:
        """Elements of a row that are read, from its first on."""

class RouterForm:
    """How a router chooses experts and weighs them (csrc/compute/operators/router.h). ConfigError
    for a word that is not known.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        top_k: int,
        score: str = "softmax",
        weight: str = "score",
        num_groups: int = 1,
        topk_groups: int = 1,
        group_score: str = "top_two_sum",
        excluded: float = ...,
        normalizes: bool = False,
        sum_epsilon: float = 0.0,
        sum_floor: float = ...,
        scale: float = 1.0,
        mixer_threshold: float = 0.0,
    ) -> None:
        """score: softmax, sigmoid or identity.
        weight: score, softmax_of_chosen, sigmoid_of_chosen or sparse_mixer.
        group_score: top_two_sum or max.
        excluded: The choice of experts outside the chosen groups.
        normalizes: Divides by max(sum + sum_epsilon, sum_floor).
        mixer_threshold: Of a sparse mixer.
        """

class GateForm:
    """The activation and gate of an MLP, with the words and limits of an FfnSpec. UnsupportedError
    for a word that is not known or a value that is not supported.
    """

    def __init__(
        self,
        *,
        activation: str = "silu",
        gate: str = "gated",
        alpha: float = 1.0,
        up_offset: float = 0.0,
        gate_max: float = ...,
        up_limit: float = ...,
    ) -> None:
        """gate: or none, clamped_swiglu"""

class KvLayer:
    """The keys and values of one layer in blocks of 16 tokens, in "f32", "f16" or "bf16". Memory
    becomes resident as blocks are written. Nobody may read a block while it is written. ConfigError
    for sizes, blocks and slots that cannot be.
    """

    def __init__(self, num_blocks: int, num_kv_heads: int, key_size: int, value_size: int, dtype: str) -> None: ...
    def append(
        self,
        slots_address: int,
        num_rows: int,
        k_address: int,
        k_stride_bytes: int,
        k_dtype: str,
        v_address: int,
        v_stride_bytes: int,
        v_dtype: str,
    ) -> None:
        """Stores rows [num_rows, num_kv_heads * size] at int64 slots block * 16 + offset, rounded
        once to the layer's dtype; WorkerError where that makes a finite value infinite.
        """

    def copy_block(self, from_block: int, to_block: int) -> None: ...
    def read(self, block: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """For tests: returns keys [num_kv_heads, 16, key_size], values [num_kv_heads, 16,
        value_size].
        """

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...

class AttentionPlan:
    """The rows of one step: for each sequence its block table, the position of its first row and
    the number of its rows, which are packed one sequence after another. It does not change.
    """

    def __init__(self, sequences: Sequence[tuple[npt.NDArray[np.int32], int, int]]) -> None:
        """ConfigError names the sequence that cannot be."""

    @property
    def num_rows(self) -> int: ...
    @property
    def positions(self) -> npt.NDArray[np.int64]: ...

class StepInputs:
    """What differs from step to step for the calls of a Program. Addresses are those of int64
    [num_rows], or 0 where no call reads them; `cos` and `sin` those of dense float32
    [num_positions, table_width], `logits` that of dense float32 [num_rows, vocab_size]. The caller
    keeps all of them alive.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        slots_address: int,
        positions_address: int = 0,
        token_ids_address: int = 0,
        cos_address: int = 0,
        sin_address: int = 0,
        num_positions: int = 0,
        table_width: int = 0,
        logits_address: int = 0,
    ) -> None: ...

class PackedInputs(StepInputs):
    """The inputs of a whole step over pages of 16 tokens, of which tokens are chosen. Slots and
    positions follow from the plan; cosines, sines and logits are as StepInputs has them. A draw for
    each row is (temperature, top_k, top_p, min_p, uniform), see draw_tokens. ConfigError for a
    token id outside the vocabulary, and for other numbers of ids and draws than rows.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        token_ids: Sequence[int],
        vocab_size: int,
        cos_address: int,
        sin_address: int,
        num_positions: int,
        table_width: int,
        logits_address: int,
        draws: Sequence[tuple[float, int, float, float, float]],
    ) -> None: ...
    @property
    def chosen(self) -> list[int]:
        """The token chosen behind each row, -1 where the row's largest logit is not finite."""

def accept_path(
    kind: str, terms: PathTerms, offered: bytes, descriptors: Sequence[int], secured: SecureSocket | None = None
) -> Acceptance:
    """It takes ownership of the descriptors, whatever happens, and consumes `secured`."""

def add_scaled(
    pool: HostPool,
    rows_address: int,
    row_stride_bytes: int,
    row_dtype: str,
    num_rows: int,
    width: int,
    out_address: int,
    out_stride_bytes: int,
    out_dtype: str,
    base_address: int = 0,
    base_stride_bytes: int = 0,
    base_dtype: str = "f32",
    gate_address: int = 0,
    gate_stride_bytes: int = 0,
    gate_dtype: str = "f32",
    scale: float = 1.0,
) -> None:
    """out = base + rows * s, where s is sigmoid(gate[row]), or `scale` without a gate; gate is
    [num_rows, 1].
    """

def apply_gate(
    pool: HostPool,
    form: GateForm,
    gate_address: int,
    gate_stride_bytes: int,
    gate_dtype: str,
    up_address: int,
    up_stride_bytes: int,
    up_dtype: str,
    num_rows: int,
    width: int,
    out_address: int,
    out_stride_bytes: int,
    out_dtype: str,
) -> None:
    """out = act(gate) * up for rows of `width`; with gate "none", act(up), and the gate's address
    is 0.
    """

def argmax(
    pool: HostPool, rows_address: int, row_stride_bytes: int, row_dtype: str, num_rows: int, width: int, out_address: int
) -> None:
    """Writes the place of each row's largest value to int64 out [num_rows]: the lowest among
    equals.
    """

def best_isa() -> str: ...
def check_numerics(numerics: str, weight_dtype: str) -> None:
    """UnsupportedError names the formats that the class takes."""

def checksum(data: Buffer) -> int:
    """The sum of base/checksum.h over contiguous bytes."""

def cpu_features() -> list[str]: ...
def decode_frame_header(data: bytes) -> dict[str, int]:
    """ProtocolError is for bytes that are no header."""

def decode_handover(
    data: bytes,
) -> (
    OpenHandover
    | RefuseHandover
    | PlanHead
    | PlannedWorker
    | PlannedLayer
    | PlannedShard
    | PlannedTensor
    | PathTermsMessage
    | PathOffered
    | PathAnswered
    | HandoverReady
    | PathWorn
    | WorkerGone
    | TensorSeen
    | Counted
):
    """Any bytes give a message whose every field is within its limits, or ProtocolError naming
    message and field.
    """

def dequantize(weight_format: str, data: Buffer, outputs: int, inputs: int, scales: Buffer = b"") -> npt.NDArray[np.float32]:
    """Returns a NumPy array of float32 [outputs, inputs]. Both buffers are contiguous."""

def draw_tokens(
    logits_address: int, stride_bytes: int, dtype: str, width: int, draws: Sequence[tuple[int, float, int, float, float, float]]
) -> list[int]:
    """Returns for each draw (row, temperature, top_k, top_p, min_p, uniform) the token id that
    `uniform` in [0, 1) points at in a row of `width` logits in f32 or f64; -1 where the row's
    largest logit is not finite. csrc/compute/operators/draw.h says what a token weighs; at
    temperature 0 it is the first of the largest. ConfigError for other dtypes and widths, and for a
    temperature below 0.
    """

def encode_frame_header(fields: dict[str, int]) -> bytes:
    """The fields have the names of wire/frame.h, payload_checksum included."""

def encode_handover(
    message: OpenHandover
    | RefuseHandover
    | PlanHead
    | PlannedWorker
    | PlannedLayer
    | PlannedShard
    | PlannedTensor
    | PathTermsMessage
    | PathOffered
    | PathAnswered
    | HandoverReady
    | PathWorn
    | WorkerGone
    | TensorSeen
    | Counted,
) -> bytes:
    """Texts beyond their limit are cut at a character. ProtocolError names another field outside
    its limits.
    """

def error_codes() -> dict[str, tuple[int, type[BaseException]]]:
    """The number and the Python class of every ErrorCode by its name in snake_case."""

def fabric_providers() -> list[FabricProvider]:
    """Those of this machine, with hardware first; the first call takes 0.1 to 0.4 s.
    UnsupportedError where there is no libfabric, or no provider that fits.
    """

def fabric_strangers() -> int:
    """How many messages that were not their peers' have reached this process's endpoints."""

def floor_bytes(num_rows: int, num_pairs: int, in_width: int, request_dtype: str, out_width: int, reply_dtype: str) -> int: ...
def handover_tables() -> list[tuple[str, list[tuple[int, str, str]]]]:
    """For documents: (name, fields) of every message in the order of the types, 1 and up; a field
    is (key, name, what it may hold).
    """

def layer_norm(
    pool: HostPool,
    rows_address: int,
    row_stride_bytes: int,
    row_dtype: str,
    num_rows: int,
    width: int,
    out_address: int,
    out_stride_bytes: int,
    out_dtype: str,
    epsilon: float,
    weight_address: int = 0,
    bias_address: int = 0,
) -> None:
    """out = (x - mean) / sqrt(variance + epsilon) * weight + bias, both [width]."""

def layout_fingerprint() -> int:
    """A number that differs between builds which lay data frames out differently."""

def libssl_version(library: str = "libssl.so.3") -> str:
    """Raises UnsupportedError naming the package and the setting where the library cannot be
    used.
    """

def make_drifting(channel: Channel, *, one_in: int, seed: int = 1) -> Channel:
    """Consumes `channel` and returns one in whose replies every `one_in`-th row has a flipped bit
    in the lowest mantissa byte of one value, with checksums that fit, for tests.
    """

def make_emulated(
    channel: Channel, *, delay_ms: float = 0.0, jitter_ms: float = 0.0, mbit_s: float = 0.0, seed: int = 1
) -> Channel:
    """Consumes `channel` and returns one that delays messages as a slower link would."""

def make_faulty(channel: Channel, *, kind: str, point: str, nth: int, delay_ms: float = 0.0, seed: int = 1) -> Channel:
    """Consumes `channel` and returns one whose nth operation goes wrong, for tests. `kind` is fail,
    delay, truncate, corrupt or drop, and `point` is publish or poll.
    """

def make_loopback(geometry: Geometry) -> tuple[Channel, Channel]:
    """The ends of the host and of the worker."""

def make_tapped(channel: Channel, tap: Tap) -> Channel:
    """Consumes `channel` and returns one whose exchanges the tap copies. Channels may share a
    tap.
    """

def numerics_classes(isa: str) -> list[str]:
    """The names of the classes that this kernel set computes, the default first."""

def numerics_table() -> list[NumericsFacts]:
    """All classes, the default first."""

def offer_path(kind: str, terms: PathTerms) -> PathOffer: ...
def packed_bytes(*, spec: dict[str, Any], num_experts: int, weight_dtype: str, isa: str) -> int:
    """The bytes that a CPU worker holds for these experts, biases aside."""

def paged_attention(
    pool: HostPool,
    kv_layer: KvLayer,
    plan: AttentionPlan,
    q_address: int,
    q_stride_bytes: int,
    q_dtype: str,
    num_heads: int,
    out_address: int,
    out_stride_bytes: int,
    out_dtype: str,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_address: int = 0,
) -> None:
    """Writes the attention of q [num_rows, num_heads * key_size] to out [num_rows, num_heads *
    value_size]. Keys and values of the rows themselves are in `kv_layer` already. A query sees its
    last `window` keys, or all where that is 0; sinks are float32 [num_heads].
    """

def parse_isa(name: str) -> str:
    """Returns the name if it is supported. ConfigError lists the supported ones."""

def plan_arena(
    workers: Sequence[Sequence[ShardShape]], slices: SlicePlan, request_dtype: str, reply_dtype: str, shared_bytes: int = 0
) -> list[SlotPlan]: ...
def plan_slices(mode: str, *, batch_capacity: int, stream_tokens: int, stream_tokens_max: int) -> SlicePlan:
    """ConfigError is raised where `stream_tokens` exceeds `stream_tokens_max`."""

def plan_slots(shards: Sequence[ShardShape], rows: int, num_slots: int, request_dtype: str, reply_dtype: str) -> SlotPlan: ...
def plugin_abi() -> tuple[int, int]: ...
def probe_backend(name: str) -> dict[str, Any]:
    """The keys are built, reason and devices, a list of {name, vendor, arch, memory_bytes,
    reason}.
    """

def reply_layout(num_rows: int, row_width: int, dtype: str) -> dict[str, int]: ...
def requantize(weight_format: str, values: Annotated[npt.ArrayLike, np.float32]) -> npt.NDArray[np.float32]:
    """The values with which a worker that holds int8_g32 or int4_g32 computes."""

def request_layout(num_rows: int, num_pairs: int, row_width: int, dtype: str) -> dict[str, int]: ...
def rms_norm(
    pool: HostPool,
    rows_address: int,
    row_stride_bytes: int,
    row_dtype: str,
    num_rows: int,
    width: int,
    out_address: int,
    out_stride_bytes: int,
    out_dtype: str,
    epsilon: float,
    weight_address: int = 0,
    adds_one: bool = False,
    residual_address: int = 0,
    residual_stride_bytes: int = 0,
    residual_dtype: str = "f32",
    sum_address: int = 0,
    sum_stride_bytes: int = 0,
    sum_dtype: str = "f32",
    normalizes_rounded_sum: bool = False,
) -> None:
    """x = rows, or rows + residual, which `sum` keeps, rounded to sum_dtype; with
    normalizes_rounded_sum it is that rounded sum that is normalised. out = x / sqrt(mean(x^2) +
    epsilon) * weight, or * (1 + weight) with adds_one; weight is [width].
    """

def rotate(
    pool: HostPool,
    rows_address: int,
    row_stride_bytes: int,
    row_dtype: str,
    num_rows: int,
    num_heads: int,
    head_dim: int,
    out_address: int,
    out_stride_bytes: int,
    out_dtype: str,
    cos_address: int,
    sin_address: int,
    table_stride_bytes: int,
    rotary_dim: int,
    rotary_offset: int = 0,
    layout: str = "halves",
    has_full_tables: bool = False,
) -> None:
    """Rows are [num_rows, num_heads, head_dim], heads adjacent. Of each head, rotary_dim values
    from rotary_offset on are rotated and the rest is copied. Cosines and sines are [num_rows,
    rotary_dim / 2] or, with has_full_tables, [num_rows, rotary_dim]. Layouts: "halves",
    "interleaved", "interleaved_to_halves" (read interleaved, written as halves).
    """

def route(
    pool: HostPool,
    form: RouterForm,
    logits_address: int,
    logits_stride_bytes: int,
    logits_dtype: str,
    num_rows: int,
    topk_ids_address: int,
    id_type: str,
    topk_weights_address: int,
    bias_address: int = 0,
    expert_scales_address: int = 0,
) -> None:
    """Writes topk_ids [num_rows, top_k] ("i32" or "i64") and topk_weights [num_rows, top_k]
    (float32), in descending order of choice. The bias [num_experts] counts for the choice only;
    expert_scales [num_experts] multiply the weights.
    """

def run_together(
    linears: Sequence[PackedLinear],
    rows_address: int,
    row_stride_bytes: int,
    row_dtype: str,
    num_rows: int,
    outs: Sequence[tuple[int, int, str]],
) -> None:
    """Does what `run` of each layer does for the same rows, in one job of their one pool; an output
    is (address, stride in bytes, dtype). ConfigError for layers of several pools.
    """

def set_canonical_float_mode() -> None:
    """Gives the calling thread, which must be one of the package's own, the mode in which canonical
    bits are computed: to nearest, nothing flushed to zero.
    """

def shard_checksum(experts: Sequence[int]) -> int:
    """The checksum of a shard, from the values of its experts in ascending order of their ids."""

def start_operator_clock() -> None:
    """Has this thread's operators timed from now on, from zero. `outside` is all that is no
    operator, so that the times add up to the time from start to stop.
    """

def stop_operator_clock() -> list[OperatorTimes]:
    """Ends that, and returns what was found; nothing where the clock does not run."""

def supported_isas() -> list[str]:
    """The kernel sets that this processor can run, the best one last, for example ["reference",
    "scalar", "avx2", "avx512", "avx512vnni", "avx512bf16"].
    """

def take_lowest_priority() -> None:
    """The calling thread yields to all others from now on, on the processor and at the disk, where
    the system allows that.
    """

def transport_kinds() -> list[TransportKind]:
    """All transports of this build. Setting `auto` takes the first that serves an address."""

def weight_formats() -> dict[str, dict[str, int]]:
    """FormatFacts of csrc/compute/formats/weight_format.h by the name of the format, and the size
    of a record.
    """

def wire_dtypes() -> dict[str, int]:
    """The bytes of a value of each dtype that travels, in the order of their numbers in frames."""

def wire_limits() -> dict[str, int]:
    """Every constant of wire/limits.h and transport/channel.h by its name in snake_case."""

DEFAULT_ARENA_BYTES: int

HANDOVER_TOKEN_BYTES: int

HANDOVER_VERSION: int

MAX_HANDOVER_BYTES: int

MAX_PATIENCE: int

REPLY_FRAME: int

REQUEST_FRAME: int

SPARE_SLOTS: int

__version__: str
