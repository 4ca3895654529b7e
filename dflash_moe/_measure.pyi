"""What benchmarks need in C++: peaks of this machine, layers without anything around them, round
trips of transports, doorbells of cards. Only benchmarks import it. Errors are those of `_core`,
whose channels and devices it takes. Each `rounds` gives one sample a round.

`make stubs` writes this file.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from dflash_moe._core import BackendDevice, Channel

class LayerBenchmark:
    """`num_layers` layers of one shape with random weights. `run` takes them in turn."""

    def __init__(
        self,
        *,
        spec: dict[str, Any],
        num_experts: int,
        num_layers: int,
        weight_dtype: str,
        isa: str,
        num_threads: int,
        seed: int = 1,
        numerics: str = ...,
        device: BackendDevice | None = None,
    ) -> None:
        """device: This device computes instead of the kernels of `isa`."""

    def device_ns(self) -> int:
        """The nanoseconds that the device computed in all rounds so far, copies aside; 0 on the
        processor.
        """

    def resident_bytes(self) -> int: ...
    def run(
        self,
        rows: Annotated[npt.ArrayLike, np.float32],
        row_counts: Annotated[npt.ArrayLike, np.uint16],
        local_expert_ids: Annotated[npt.ArrayLike, np.uint16],
        weights: Annotated[npt.ArrayLike, np.float32],
        *,
        row_dtype: str,
        rounds: int,
    ) -> list[int]:
        """Returns the nanoseconds of each round. Rows and weights are NumPy arrays of float32,
        counts and ids of uint16.
        """

    def run_gemm(self, *, rows_per_expert: int, rounds: int) -> list[int]:
        """Returns the nanoseconds of each round of the matrix products alone, with the same number
        of rows through every expert.
        """

class BellDevice:
    """A card, or a simulated one, with the kernel that rings. UnsupportedError says what to do
    where its plug-in is missing or cannot be used, and ConfigError is for a device that does not
    exist.
    """

    def __init__(self, *, backend: str, device: int = 0) -> None: ...
    @property
    def name(self) -> str: ...

class BellMemory:
    """Two words for a ping-pong of a device and a processor (`bench.lab doorbell`), with both ends
    of it.
    """

    @staticmethod
    def of_segments(*, is_open: bool, slot_bytes: int) -> BellMemory:
        """The words are the heads of two segments. Open segments have no seal against writing
        (segment.h).
        """

    @staticmethod
    def pinned(device: BellDevice) -> BellMemory: ...
    def answer(self, *, first: int, rounds: int, timeout_s: float) -> list[int]:
        """Returns when each round was seen, in nanoseconds of the monotonic clock. There are fewer
        than `rounds` where the time was over.
        """

    def map(self, device: BellDevice) -> int:
        """Returns the bytes that were mapped, 0 for pinned memory. UnsupportedError has the
        driver's words.
        """

    def ring(self, device: BellDevice, *, first: int, rounds: int, budget_s: float) -> int:
        """Returns the number of rounds that were answered. UnsupportedError, WorkerTimeout."""

    def unmap(self, device: BellDevice) -> None: ...

def bf16_multiply_add_per_s(isa: str, num_threads: int, rounds: int, milliseconds: float = 5.0) -> list[float]:
    """Returns operations a second with bf16 factors. Only kernel sets with an instruction for them
    have it.
    """

def integer_multiply_add_per_s(isa: str, num_threads: int, rounds: int, milliseconds: float = 5.0) -> list[float]:
    """Returns operations a second of int8 products and int32 sums, two for each product. Only the
    vector sets of x86-64 have it.
    """

def ipc_echo(channel: Channel, spin_ns: int, idle_timeout_s: float, cpu: int = -1) -> int:
    """Copies each request to its reply, and returns the number of rounds."""

def ipc_floor(kind: str, payload_bytes: int, rounds: int, warmup: int, cpus: tuple[int, int], habit: str = "bare") -> list[int]:
    """Returns the nanoseconds of each round of a raw ping-pong. `kind` is spin, futex, unix, tcp,
    tls or fabric. `habit` says what sockets do beyond one write and one read: bare, two reads or
    polls.
    """

def ipc_round_trip(
    channel: Channel, payload_bytes: int, rounds: int, warmup: int, spin_ns: int, timeout_s: float, cpu: int = -1
) -> list[int]:
    """Returns the nanoseconds of each round trip: copy in, publish, wait, copy out. The other end,
    a thread or a process, runs `ipc_echo`.
    """

def memcpy_bytes_per_s(payload_bytes: int, rounds: int, cpu: int = -1) -> list[float]: ...
def multiply_add_per_s(isa: str, num_threads: int, rounds: int, milliseconds: float = 5.0) -> list[float]:
    """Returns float32 operations a second; a multiply-add counts two."""

def read_bytes_per_s(isa: str, num_threads: int, rounds: int, num_bytes: int) -> list[float]:
    """Returns bytes a second; each thread reads `num_bytes`."""
