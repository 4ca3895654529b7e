"""What benchmarks need in C++: peaks of this machine, layers without anything around them, round
trips of transports, doorbells of cards. Imported by `dflash_moe.bench` alone.

Errors are those of `_core`, whose channels and devices it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_moe._core import BackendDevice, Channel

# -- transports (bench ipc) ------------------------------------------------------------------------
def ipc_round_trip(  # the other end, a thread or a process, runs `ipc_echo`
    channel: Channel, payload_bytes: int, rounds: int, warmup: int, spin_ns: int, timeout_s: float, cpu: int = -1
) -> list[int]: ...  # ns of each round trip: copy in, publish, wait, copy out
def ipc_echo(  # copies request to reply; returns rounds
    channel: Channel, spin_ns: int, idle_timeout_s: float, cpu: int = -1
) -> int: ...
def ipc_floor(  # raw ping-pong, kind: spin futex unix tcp
    kind: str, payload_bytes: int, rounds: int, warmup: int, cpus: tuple[int, int]
) -> list[int]: ...
def memcpy_bytes_per_s(payload_bytes: int, rounds: int, cpu: int = -1) -> list[float]: ...

# -- experts (bench experts) -----------------------------------------------------------------------
class LayerBenchmark:
    """`num_layers` layers of one shape with random weights; `run` takes them in turn."""

    def __init__(
        self,
        *,
        spec: Mapping[str, Any],
        num_experts: int,
        num_layers: int,
        weight_dtype: str,
        isa: str,
        num_threads: int,
        seed: int = 1,
        numerics: str = ...,
        device: BackendDevice | None = None,  # computes there instead of with the kernels of `isa`
    ) -> None: ...
    def run(  # ns of each round; NumPy float32 rows and weights, uint16 counts and ids
        self, rows: object, row_counts: object, local_expert_ids: object, weights: object, *, row_dtype: str, rounds: int
    ) -> list[int]: ...
    # ns of each round: the matrix products alone, the same number of rows through every expert
    def run_gemm(self, *, rows_per_expert: int, rounds: int) -> list[int]: ...
    def resident_bytes(self) -> int: ...
    # that the device computed in all rounds so far, copies aside; 0 on the processor
    def device_ns(self) -> int: ...

# FLOP/s
def multiply_add_per_s(isa: str, num_threads: int, rounds: int, milliseconds: float = 5.0) -> list[float]: ...
def bf16_multiply_add_per_s(  # FLOP/s with bf16 factors; only of sets with an instruction for them
    isa: str, num_threads: int, rounds: int, milliseconds: float = 5.0
) -> list[float]: ...

# int8 products and int32 sums, 2 operations a product; x86-64's vector sets
def integer_multiply_add_per_s(isa: str, num_threads: int, rounds: int, milliseconds: float = 5.0) -> list[float]: ...

# num_bytes per thread
def read_bytes_per_s(isa: str, num_threads: int, rounds: int, num_bytes: int) -> list[float]: ...

# -- doorbells (bench doorbell) --------------------------------------------------------------------
class BellDevice:
    """A card, or a simulated one, with the kernel that rings. UnsupportedError with what to do
    where its plug-in is missing or cannot be used, ConfigError for one that does not exist.
    """

    def __init__(self, *, backend: str, device: int = 0) -> None: ...
    @property
    def name(self) -> str: ...

class BellMemory:
    """Two words for a ping-pong of a device and a processor, both ends of it: `bench doorbell`."""

    @staticmethod
    # the heads of two; open: see segment.h
    def of_segments(*, is_open: bool, slot_bytes: int) -> BellMemory: ...
    @staticmethod
    def pinned(device: BellDevice) -> BellMemory: ...
    # bytes, 0 for pinned memory; UnsupportedError with the driver's words
    def map(self, device: BellDevice) -> int: ...
    def unmap(self, device: BellDevice) -> None: ...
    # When each round was seen, in ns of the monotonic clock; fewer than `rounds` where the time was
    # over.
    def answer(self, *, first: int, rounds: int, timeout_s: float) -> list[int]: ...
    # `kind`: kernel, stream or call. (rounds answered, when calls of the host were made).
    # UnsupportedError, WorkerTimeout.
    def ring(self, device: BellDevice, *, kind: str, first: int, rounds: int, budget_s: float) -> tuple[int, list[int]]: ...
